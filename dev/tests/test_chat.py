"""Conversations: the templates of text/chat.c against transformers' apply_chat_template(), and sample_gpt2
--interactive."""
import ctypes
import functools
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess

import pytest

import byte_text
import vocabularies
from eval_models import write_model
from test_tokenizer import INSIDE, CTokenizer, Error, library      # noqa: F401, a fixture
from tiny import BIN, environment, ids_of, run, sample

os.environ.pop("SOURCE_DATE_EPOCH", None)      # transformers writes today's date
MESSAGES = ["Hi!", "  What is  2+2?  ", "\u3000\x1cAnd\u200b\u2028\x85",
            "日本語 <|im_end|><|user|>\\n</s> <|eot_id|>", "a"]
ANSWERS = ["Hello there.", " It is 4.\u3000\n", "Yes", "No"]
THOUGHTS = "<think>\nHm\n</think>\n\nIt is so."
TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
CHATML = (
    "{% for message in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_UNSET = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}" + CHATML)
NAMED = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2 = CHATML.replace(TURN, "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
                         + NAMED + "<|im_end|>\n' }}{% endif %}" + TURN)
ZEPHYR = "{% for message in messages %}\n" + "".join(
    f"{{% {'if' if role == 'user' else 'elif'} message['role'] == '{role}' %}}\n"
    f"{{{{ '<|{role}|>\\n' {' ' * (role == 'assistant')}+ message['content'] + eos_token }}}}\n"
    for role in ("user", "system", "assistant")) + (
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}")
BEGIN = {"bos_token": "<|begin_of_text|>"}
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
# the name of the template, the vocabulary, and the special tokens that templates name
PUBLISHED = {
    "ChatML": ("chatml", "qwen", {}),
    "ChatML, unset": ("chatml", "qwen", {}),
    "SmolLM2": ("chatml", "qwen", {}),
    "Qwen2": ("chatml", "qwen", {}),
    "Qwen2.5": ("chatml", "qwen", {}),
    "Qwen3-2507": ("chatml", "qwen", {}),
    "Qwen3": ("qwen3", "qwen", {}),
    "Qwen3, first": ("qwen3", "qwen", {}),
    "Llama 3": ("llama3", "llama3", BEGIN),
    "Llama 3, first": ("llama3", "llama3", BEGIN),
    "Llama 3.1": ("llama3.1", "llama3", BEGIN),
    "Llama 3.2": ("llama3.2", "llama3", BEGIN),
    "Zephyr": ("zephyr", "mistral", ENDS),
    "Zephyr, newer files": ("zephyr", "mistral-first", ENDS),
}
# Published files in a package, and their names here. All others in it are rejected.
PACKAGED = {"llama3": "Llama 3", "llama3_1": "Llama 3.1", "llama3_2": "Llama 3.2", "qwen2_5": "Qwen2.5",
            "qwen3": "Qwen3", "qwen3_instruct_2507": "Qwen3-2507"}


@functools.cache
def texts():
    """{name: the Jinja text} of PUBLISHED."""
    files = vocabularies.chat_templates()
    known = {name: files[file] for file, name in PACKAGED.items()}
    known |= {"ChatML": CHATML, "ChatML, unset": CHATML_UNSET, "SmolLM2": SMOLLM2, "Zephyr": ZEPHYR,
              "Zephyr, newer files": ZEPHYR}
    # without the condition around the beginning of the answer
    first = re.sub(r"{% if add_generation_prompt %}(.*){% endif %}$", r"\1", known["Llama 3"], flags=re.S)
    known |= {"Llama 3, first": first, "Qwen2": SMOLLM2.replace(NAMED, "You are a helpful assistant")}
    return known | {"Qwen3, first": first_qwen3(known["Qwen3"])}


def first_qwen3(text):
    """It takes all content for strings, and cuts an answer before its thoughts."""
    text = re.sub(r"    {%- if message.content is string %}\n.*\n    {%- else %}\n.*\n    {%- endif %}\n", "", text)
    for later, first in (
            ("'\\n' + content + '<|im_end|>' +", "'\\n' + message.content + '<|im_end|>' +"),
            ("        {%- set reasoning_content = '' %}\n",
             "        {%- set content = message.content %}\n        {%- set reasoning_content = '' %}\n"),
            ("reasoning_content is string %}",
             "reasoning_content is defined and message.reasoning_content is not none %}"),
            ("in content %}", "in message.content %}"), ("message.content is string and ", ""),
            ("= content.split", "= message.content.split")):
        assert later in text, later
        text = text.replace(later, first)
    return re.sub(r"( +{%- set reasoning_content = message.content.split.*\n)(.*\n)", r"\2\1", text)


# Published files have a newline in a string as such or as an escape.
SHORT = ["ChatML", "ChatML, unset", "SmolLM2", "Qwen2", "Zephyr", "Llama 3", "Llama 3, first"]
TAG = re.compile(r"{{.*?}}|{%.*?%}", re.S)


def spelled(text, old, new):
    return TAG.sub(lambda tag: re.sub("'[^']*'", lambda string: string[0].replace(old, new), tag[0]), text)


class ChatTurn(ctypes.Structure):
    _fields_ = [("first", ctypes.c_bool), ("system", ctypes.c_char_p), ("text", ctypes.c_char_p),
                ("length", ctypes.c_size_t), ("answer", ctypes.c_char_p), ("answer_length", ctypes.c_size_t)]


@pytest.fixture(scope="module")
def chat(library):      # noqa: F811
    library.chat_template.restype = library.chat_template_in.restype = ctypes.c_void_p
    library.chat_encode.restype = ctypes.POINTER(ctypes.c_int32)
    library.chat_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ChatTurn, ctypes.POINTER(ctypes.c_size_t)]
    library.chat_template.argtypes = [ctypes.c_char_p]
    library.chat_kept.restype = ctypes.c_void_p
    library.chat_kept.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    return library


def recognized(chat, folder):
    """The template of a folder and its system message; or the error's code and text."""
    error, system = Error(), ctypes.c_char_p()
    found = chat.chat_template_in(str(folder).encode(), ctypes.byref(system), ctypes.byref(error))
    return (found, system.value.decode()) if found else (error.code, error.text.decode())


def recognized_text(chat, folder, text):
    (folder / "chat_template.jinja").write_bytes(text.encode())
    return recognized(chat, folder)


def turn_ids(chat, template, tokenizer, text, first, system=None, answer=None):
    count = ctypes.c_size_t()
    turn = ChatTurn(first, system.encode() if system else None, text.encode(), len(text.encode()), answer,
                    len(answer or b""))
    ids = chat.chat_encode(template, tokenizer.handle, turn, ctypes.byref(count))
    return ids[:count.value]


def kept(chat, template, answer):
    length, buffer = ctypes.c_size_t(len(answer)), ctypes.create_string_buffer(answer, len(answer) + 1)
    start = chat.chat_kept(template, ctypes.cast(buffer, ctypes.c_char_p), ctypes.byref(length))
    return ctypes.string_at(start, length.value)


@pytest.fixture(scope="module")
def opened(library, tmp_path_factory):      # noqa: F811
    """A function that opens a real vocabulary in C and in transformers, once."""
    from transformers import PreTrainedTokenizerFast
    made = {}

    def get(name):
        if name not in made:
            path = vocabularies.write(name, tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
            made[name] = CTokenizer(library, path), PreTrainedTokenizerFast(tokenizer_file=str(path))
        return made[name]

    return get


@pytest.mark.drawn(30)
@pytest.mark.parametrize("system", [None, " Answer briefly.\nIn English. "])
@pytest.mark.parametrize("name, escapes", [*((name, False) for name in PUBLISHED), *((name, True) for name in SHORT)])
def test_templates_equal_transformers(name, escapes, system, chat, opened, tmp_path):
    """All turns of a conversation. What a person types is ordinary text, and so are answers, so messages with names of
    special tokens are left out here."""
    template_name, vocabulary, special = PUBLISHED[name]
    text = texts()[name]
    if name in SHORT:
        text = spelled(text, "\n", "\\n") if escapes else spelled(text, "\\n", "\n")
    ours, theirs = opened(vocabulary)
    theirs.chat_template = text
    for key, value in special.items():
        setattr(theirs, key, value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    template, own_system = recognized(chat, tmp_path)
    assert template == chat.chat_template(template_name.encode()), own_system
    messages = [{"role": "system", "content": system}] if system else []
    found, again = [], None
    answers = [*ANSWERS[:2], THOUGHTS, "No"] if template_name == "qwen3" else ANSWERS
    for i, said in enumerate(message for message in MESSAGES if "<" not in message):
        found += turn_ids(chat, template, ours, said, not i, system or own_system, again)
        messages.append({"role": "user", "content": said})
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = theirs.encode(rendered, add_special_tokens=False)
        assert found == expected == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"], said
        messages.append({"role": "assistant", "content": answers[i]})
        again = kept(chat, template, answers[i].encode())
        if again == answers[i].encode():
            again = None
            found += ours.encode_at(INSIDE, answers[i].encode()).tolist()


@pytest.mark.parametrize("day", ["2024-02-09", "1999-12-31"])
def test_the_date(day, chat, opened, monkeypatch):
    """Llama 3.2's, on days of one digit and two, late in UTC, when it is tomorrow elsewhere."""
    import datetime
    from transformers.utils import chat_template_utils
    time = datetime.datetime.fromisoformat(day + "T23:59:59+00:00")

    class Then(datetime.datetime):
        @classmethod
        def now(cls):
            return time

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(time.timestamp())))
    monkeypatch.setenv("TZ", "XXX-14")
    ours, theirs = opened("llama3")
    theirs.chat_template, theirs.bos_token = texts()["Llama 3.2"], BEGIN["bos_token"]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert f"Today Date: {time:%d %b %Y}\n" in rendered
    assert turn_ids(chat, chat.chat_template(b"llama3.2"), ours, "Hi", True) == \
        theirs.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("template", [b"llama3", b"llama3.1", b"zephyr", b"chatml", b"qwen3", b"raw"])
def test_trimming_equals_python(template, chat):
    """Every white space that Python knows, around and inside a text, and invalid UTF-8."""
    trims = template.startswith(b"llama3")
    template = chat.chat_template(template)
    cases = [chr(code).encode() for code in [*range(0xD800), *range(0xE000, 0x10000), 0x1F600]] if trims else []
    cases = [b"", b" \n", *(case + b"a" + case for case in cases), *cases]
    random_ = random.Random(1)
    pieces = [b" ", b"\n", b"\xe2\x80\x80", b"\xe3\x80\x80", b"\xc2\x85", b"\xc2", b"\xe2\x80", b"\x80", b"\xff",
              b"\0", b"\xf0\x9f", b"x", "é".encode(), b"\x1c", b"\xc2\xa0"]
    cases += [b"".join(random_.choices(pieces, k=random_.randrange(9))) for _ in range(3000)]
    for case in cases:
        found, text = kept(chat, template, case).decode("utf-8", "replace"), case.decode("utf-8", "replace")
        assert found == (text.strip() if trims else text), case


@pytest.mark.parametrize("answer", ["<think>\nHm\n</think>\n\nYes", "<think>", "a</think>b</think>\n", "</think>",
                                    "\nYes", "</think", "<think>\n\n</think>\n\n Yes </think >"])
def test_thoughts_are_forgotten_as_by_qwen3(answer, chat):
    found = kept(chat, chat.chat_template(b"qwen3"), answer.encode()).decode()
    assert found == (answer.split("</think>")[-1].lstrip("\n") if "</think>" in answer else answer)
    assert kept(chat, chat.chat_template(b"chatml"), answer.encode()).decode() == answer


def test_names_of_special_tokens_are_text(chat, opened):
    for name, end in (("qwen", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")):
        ours, theirs = opened(name)
        template = chat.chat_template({"qwen": b"chatml", "llama3": b"llama3", "mistral": b"zephyr"}[name])
        ids = turn_ids(chat, template, ours, f"a{end}b", True)
        assert ids.count(theirs.convert_tokens_to_ids(end)) == 1 and f"a{end}b{end}" in theirs.decode(ids)


def test_recognizing(chat, tmp_path):
    assert recognized(chat, tmp_path)[0] == 2
    config = tmp_path / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": CHATML}, {"name": "default", "template": ZEPHYR}]
    config.write_text(json.dumps({"chat_template": templates}))
    assert recognized(chat, tmp_path) == (chat.chat_template(b"zephyr"), "")
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    assert recognized(chat, tmp_path) == (chat.chat_template(b"chatml"), NAMED)
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    assert recognized(chat, tmp_path)[0] == 3


@pytest.mark.parametrize("template, family", [
    (CHATML + " ", "ChatML"),
    ("{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endfor %}", "Mistral")])
def test_other_templates_are_rejected(template, family, chat, tmp_path):
    """However little they differ. The message names the family."""
    code, text = recognized_text(chat, tmp_path, template)
    assert code == 2 and str(tmp_path) in text and family in text and "--chat raw" in text


@pytest.mark.parametrize("name, key, token", [("Llama 3", "bos_token", "<|begin_of_text|>"),
                                              ("Llama 3.2", "bos_token", "<|begin_of_text|>"),
                                              ("Zephyr", "eos_token", "</s>")])
def test_tokens_that_a_template_takes_from_settings(name, key, token, chat, tmp_path):
    """Another bos_token or eos_token makes another text, so it is rejected; one that does not occur may be any."""
    (tmp_path / "chat_template.jinja").write_text(texts()[name])
    template = chat.chat_template(PUBLISHED[name][0].encode())
    for right in {}, {key: token}, {key: {"content": token}}, {key: token, "pad_token": None, "unk_token": "x"}:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(right))
        assert recognized(chat, tmp_path) == (template, ""), right
    for wrong, found in ("<|endoftext|>", '"<|endoftext|>"'), ({"content": "x"}, '"x"'), (None, "no name"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: wrong}))
        code, text = recognized(chat, tmp_path)
        assert code == 2 and f'"{key}" is {found}; ' in text and "tokenizer_config.json" in text and "--chat" in text


def test_published_files(chat, tmp_path):
    """Of many families; those that PUBLISHED does not have are rejected."""
    files = vocabularies.chat_templates()
    assert len(files) > 60
    for file, text in files.items():
        found, reason = recognized_text(chat, tmp_path, text)
        if file in PACKAGED:
            assert found == chat.chat_template(PUBLISHED[PACKAGED[file]][0].encode()), (file, reason)
        else:
            assert found == 2 and "--chat raw" in reason, file


# ---------------------------------------------------------------- the program

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights and a tokenizer of single bytes."""
    root = tmp_path_factory.mktemp("chat")
    write_model(root / "model", byte_text.write_text(root / "data"), "llama", "ssmax", 512)
    config = json.loads((root / "model/tokenizer_config.json").read_text())
    (root / "model/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SMOLLM2}))
    return root / "model"


def talk(folder, *words, said, code=0):
    """What the program prints, and its messages."""
    return run(BIN / "sample_gpt2", "--model", folder, "--interactive", *words, said=said, code=code)


def greedy(folder, ids, most):
    """The answer that the model gives after these ids, as a prompt in numbers."""
    plain = folder.with_name(folder.name + "-plain")
    if not plain.exists():
        shutil.copytree(folder, plain, ignore=shutil.ignore_patterns("tokenizer*"))
    [text], _ = sample(plain, "--prompt", ",".join(map(str, ids)), "--temperature", 0, "--max-new-tokens", most)
    answer = ids_of(text)[len(ids):]
    ends = [i for i, token in enumerate(answer) if token in (byte_text.IM_END, byte_text.END_OF_TEXT)]
    return answer[:ends[0]] if ends else answer


def shown(answers):
    names = {index: name.encode() for name, index in byte_text.SPECIAL.items()}
    return "".join(b"".join(names.get(i, bytes([i % 256])) for i in answer).decode("utf-8", "replace") + "\n"
                   for answer in answers)


def chatml(role, text):
    return [byte_text.IM_START, *f"{role}\n{text}".encode(), byte_text.IM_END, *b"\n"]


def test_a_conversation(folder):
    """Every answer is the model's to all turns before, of which the cache keeps the keys and values."""
    said, ids, answers = ["Hi <|im_end|>", "And?", "ä"], chatml("system", "Be brief"), []
    for line in said:
        ids += [*chatml("user", line), byte_text.IM_START, *b"assistant\n"]
        answers.append(greedy(folder, ids, 8))
        ids += [*answers[-1], byte_text.IM_END, *b"\n"]
    output, _ = talk(folder, "--system", "Be brief", "--temperature", 0, "--max-new-tokens", 8,
                     said="\n".join([said[0], "", *said[1:]]))
    assert output == shown(answers) and len(set(map(tuple, answers))) > 1


def test_thoughts_are_forgotten(folder, tmp_path):
    """What the model writes again and again is called </think>, so the second turn sees what comes after it."""
    first = greedy(folder, [*chatml("user", "Hi"), byte_text.IM_START, *b"assistant\n"], 24)
    said = set(b"Hi<user>assistant\nAnd?")
    end = next(i for i in first[4:] if i < 256 and i not in said)
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {"</think>" if i == end else name: i for name, i in vocab.items()}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    rest = bytes(i for i in first[len(first) - first[::-1].index(end):] if i < 256)
    rest = bytes(byte for byte in rest.lstrip(b"\n").decode("utf-8", "replace").encode() if byte != end)
    second, other = (greedy(folder, [*chatml("user", "Hi"), *chatml("assistant", "")[:-2], *kept, byte_text.IM_END,
                                     *b"\n", *chatml("user", "And?"), byte_text.IM_START, *b"assistant\n"], 24)
                     for kept in (rest, first))
    assert second != other
    output, _ = talk(tmp_path / "model", "--chat", "qwen3", "--temperature", 0, "--max-new-tokens", 24,
                     said="Hi\nAnd?\n")
    expected = "".join(b"".join(b"</think>" if i == end else bytes([i]) for i in answer).decode("utf-8", "replace")
                       + "\n" for answer in (first, second))
    assert output == expected


@pytest.mark.parametrize("begins", [False, True])
def test_raw_continues_the_text(begins, folder, tmp_path):
    """It begins as a prompt does: with the token of post_processor, if there is one, once."""
    model, start = shutil.copytree(folder, tmp_path / "model"), [byte_text.END_OF_TEXT] * begins
    if begins:
        whole, name = json.loads((model / "tokenizer.json").read_text()), "<|endoftext|>"
        whole["post_processor"] = {
            "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": start, "tokens": [name]}}}
        (model / "tokenizer.json").write_text(json.dumps(whole))
    first = greedy(folder, [*start, *b"the cat"], 6)
    second = greedy(folder, [*start, *b"the cat", *first, *b" on"], 6)
    assert not begins or first != greedy(folder, list(b"the cat"), 6)
    output, _ = talk(model, "--chat", "raw", "--temperature", 0, "--max-new-tokens", 6, said="the cat\r\n on\n")
    assert output == shown([first, second])


def test_a_full_conversation_starts_over(folder):
    flags = ["--chat", "chatml", "--temperature", 0, "--max-new-tokens", 6, "--context", 60]
    output, errors = talk(folder, *flags, said="first\nsecond\n")
    again = greedy(folder, [*chatml("user", "second"), byte_text.IM_START, *b"assistant\n"], 6)
    assert output.endswith(shown([again])) and errors.count("starts over") == 1
    output, errors = talk(folder, *flags, said="x" * 80 + "\nsecond\n")
    assert output == shown([again]) and "--context" in errors


def test_the_seed_decides(folder):
    outputs = {talk(folder, "--seed", seed, "--max-new-tokens", 20, said="a\nb\n")[0] for seed in (1, 1, 2)}
    assert len(outputs) == 2


ENDLESS = ["--chat", "raw", "--temperature", 0, "--context", 60000, "--max-new-tokens", 50000]     # for this model


def read(handle):
    """What comes next, within a minute."""
    assert select.select([handle], [], [], 60)[0], "the program prints nothing"
    return os.read(handle, 4096)


def read_until(handle, end):
    said = b""
    while not said.endswith(end):
        said += read(handle)


def test_an_answer_streams_and_ctrl_c_stops_it_alone(folder):
    terminal, side = pty.openpty()
    program = subprocess.Popen([BIN / "sample_gpt2", "--model", folder, "--interactive", *map(str, ENDLESS)],
                               env=environment(), stdin=side, stdout=subprocess.PIPE, stderr=side,
                               start_new_session=True)
    os.close(side)
    try:
        read_until(terminal, b"> ")
        for line in (b"the cat\n", b"more\n"):
            os.write(terminal, line)
            read(program.stdout.fileno())              # some of the answer
            program.send_signal(signal.SIGINT)
            read_until(terminal, b"> ")
            read_until(program.stdout.fileno(), b"\n")
        program.send_signal(signal.SIGINT)             # at the prompt, it ends the program
        assert program.communicate(timeout=60) == (b"", None) and program.returncode == 0
    finally:
        program.kill()
        program.wait()
        os.close(terminal)


def test_the_end_of_input_ends_it(folder):
    assert talk(folder, said="") == ("", "")


def test_a_wrong_date(folder, tmp_path, monkeypatch):
    """Of SOURCE_DATE_EPOCH, which Llama 3's template without a date does not read."""
    data = byte_text.write_text(tmp_path / "data")
    names = ["begin_of_text", "start_header_id", "end_header_id", "eot_id"]
    byte_text.write_tokenizer(data, {f"<|{name}|>": 256 + i for i, name in enumerate(names)})
    write_model(tmp_path / "model", data, "llama", "ssmax", 512)
    for seconds, code in ("", 2), ("now", 2), ("-5", 2), ("9" * 30, 2), ("1707436800", 0):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        _, errors = talk(tmp_path / "model", "--chat", "llama3.2", "--max-new-tokens", 1, said="a\n", code=code)
        assert code == 0 or f"SOURCE_DATE_EPOCH={seconds}: expected seconds since 1970" in errors
        talk(tmp_path / "model", "--chat", "llama3", "--max-new-tokens", 1, said="a\n")


def test_a_folder_without_tokenizer_or_template(folder, tmp_path):
    for name in ("config.json", "model.safetensors", "modeling_attn_gpt.py"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "chat_template.jinja" in talk(tmp_path, said="", code=2)[1]
    assert "tokenizer.json" in talk(tmp_path, "--chat", "raw", said="", code=3)[1]
