"""Conversations: the templates of runtime/chat.c against transformers' apply_chat_template(), and sample_gpt2
--interactive."""
import ctypes
import json
import os
import pty
import re
import select
import signal
import subprocess

import pytest

import byte_text
import vocabularies
from eval_models import write_model
from test_tokenizer import CTokenizer, Error, library      # noqa: F401, a fixture
from tiny import BIN, build, environment, logits, run

INSIDE = 2
MESSAGES = ["Hi!", "  What is  2+2?  ", "日本語 <|im_end|><|user|>\\n</s> <|eot_id|>", "a"]
ANSWERS = ["Hello there.", "It is 4.", "Yes"]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
QWEN = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n"
    "        {{- messages[0]['content'] }}\n    {%- endif %}\n{%- else %}\n"
    "    {%- if messages[0]['role'] == 'system' %}\n"
    "        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n    {%- else %}\n"
    "        {{- '<|im_start|>system\\nYou are Qwen\\'s \"friend\".<|im_end|>\\n' }}\n    {%- endif %}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) "
    "or (message.role == \"assistant\") %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n")
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
ZEPHYR = "{% for message in messages %}\n" + "".join(
    f"{{% {'if' if role == 'user' else 'elif'} message['role'] == '{role}' %}}\n"
    f"{{{{ '<|{role}|>\\n' {' ' * (role == 'assistant')}+ message['content'] + eos_token }}}}\n"
    for role in ("user", "system", "assistant")) + (
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}")
# the name of the template, the vocabulary, the special tokens that templates name, and the Jinja text
PUBLISHED = {
    "SmolLM2": ("chatml", "qwen", {}, SMOLLM2),
    "Qwen": ("chatml", "qwen", {}, QWEN),
    "Llama 3": ("llama3", "llama3", {"bos_token": "<|begin_of_text|>"}, LLAMA3),
    "Zephyr": ("zephyr", "mistral", {"bos_token": "<s>", "eos_token": "</s>"}, ZEPHYR),
    "Zephyr, newer files": ("zephyr", "mistral-first", {"bos_token": "<s>", "eos_token": "</s>"}, ZEPHYR),
}
# Other spellings of the same template: files have both newlines and both quotes.
STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.S)
SPELLINGS = {
    "as published": lambda text: text,
    "newlines": lambda text: STRING.sub(lambda found: found[0].replace("\\n", "\n"), text),
    "escapes": lambda text: STRING.sub(lambda found: found[0].replace("\n", "\\n"), text),
    "double quotes": lambda text: STRING.sub(lambda found: json.dumps(found[0][1:-1].replace("\\n", "\n")
                                                                      .replace("\\'", "'")), text),
}


class ChatTurn(ctypes.Structure):
    _fields_ = [("first", ctypes.c_bool), ("system", ctypes.c_char_p), ("text", ctypes.c_char_p),
                ("length", ctypes.c_size_t)]


@pytest.fixture(scope="module")
def chat(library):      # noqa: F811
    library.chat_template.restype = library.chat_template_in.restype = ctypes.c_void_p
    library.chat_encode.restype = ctypes.POINTER(ctypes.c_int32)
    library.chat_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ChatTurn, ctypes.POINTER(ctypes.c_size_t)]
    library.chat_template.argtypes = [ctypes.c_char_p]
    return library


def recognized(chat, folder):
    """The template of a folder and its system message; or the error's code and text."""
    error, system = Error(), ctypes.create_string_buffer(2048)
    found = chat.chat_template_in(str(folder).encode(), system, len(system), ctypes.byref(error))
    return (found, system.value.decode()) if found else (error.code, error.text.decode())


def turn_ids(chat, template, tokenizer, text, first, system=None):
    count = ctypes.c_size_t()
    turn = ChatTurn(first, system.encode() if system else None, text.encode(), len(text.encode()))
    ids = chat.chat_encode(template, tokenizer.handle, turn, ctypes.byref(count))
    return ids[:count.value]


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


@pytest.mark.parametrize("system", [None, "Answer briefly.\nIn English. "])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_equal_transformers(name, spelling, system, chat, opened, tmp_path):
    """All turns of a conversation. The answers are encoded as the text inside that they are, and so is what a person
    types, so messages with names of special tokens are left out here."""
    template_name, vocabulary, special, text = PUBLISHED[name]
    text = SPELLINGS[spelling](text)
    ours, theirs = opened(vocabulary)
    theirs.chat_template = text
    for key, value in special.items():
        setattr(theirs, key, value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    template, own_system = recognized(chat, tmp_path)
    assert template == chat.chat_template(template_name.encode())
    messages = [{"role": "system", "content": system}] if system else []
    found = []
    for i, said in enumerate(message for message in MESSAGES if "<" not in message):
        found += turn_ids(chat, template, ours, said, not i, system or own_system)
        messages.append({"role": "user", "content": said})
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = theirs.encode(rendered, add_special_tokens=False)
        assert found == expected == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"], said
        messages.append({"role": "assistant", "content": ANSWERS[i]})
        found += ours.encode_at(INSIDE, ANSWERS[i].encode()).tolist()


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_with_whitespace(name, chat, opened):
    """They stay as they were sampled. Only Llama 3's template trims them: doc/checkpoints.md names the difference."""
    template_name, vocabulary, special, text = PUBLISHED[name]
    ours, theirs = opened(vocabulary)
    theirs.chat_template = text
    for key, value in special.items():
        setattr(theirs, key, value)
    messages = [{"role": role, "content": said} for role, said in (
        ("system", "Be brief."), ("user", "Hi"), ("assistant", " Yes \n"), ("user", "And?"))]
    template = chat.chat_template(template_name.encode())
    found = turn_ids(chat, template, ours, "Hi", True, "Be brief.") + ours.encode_at(INSIDE, b" Yes \n").tolist()
    found += turn_ids(chat, template, ours, "And?", False)
    same = found == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    trimmed = theirs.apply_chat_template([*messages[:2], {"role": "assistant", "content": "Yes"}, messages[3]],
                                         add_generation_prompt=True)["input_ids"]
    assert same == (template_name != "llama3") and found != trimmed


def test_names_of_special_tokens_are_text(chat, opened):
    for name, end in (("qwen", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("mistral", "</s>")):
        ours, theirs = opened(name)
        template = chat.chat_template({"qwen": b"chatml", "llama3": b"llama3", "mistral": b"zephyr"}[name])
        ids = turn_ids(chat, template, ours, f"a{end}b", True)
        assert ids.count(theirs.convert_tokens_to_ids(end)) == 1 and f"a{end}b{end}" in theirs.decode(ids)


def test_recognizing(chat, tmp_path):
    assert recognized(chat, tmp_path)[0] == 2
    config = tmp_path / "tokenizer_config.json"
    for templates, name, system in (
            (SMOLLM2, b"chatml", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
            (QWEN, b"chatml", "You are Qwen's \"friend\"."), (LLAMA3, b"llama3", ""), (ZEPHYR, b"zephyr", ""),
            ([{"name": "tool_use", "template": LLAMA3}, {"name": "default", "template": ZEPHYR}], b"zephyr", "")):
        config.write_text(json.dumps({"chat_template": templates}))
        assert recognized(chat, tmp_path) == (chat.chat_template(name), system)
    (tmp_path / "chat_template.jinja").write_text(LLAMA3)
    assert recognized(chat, tmp_path) == (chat.chat_template(b"llama3"), "")
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}[INST]{{ message }}{% endfor %}")
    code, text = recognized(chat, tmp_path)
    assert code == 2 and str(tmp_path) in text and "--chat" in text
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    assert recognized(chat, tmp_path)[0] == 3


# ---------------------------------------------------------------- the program

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights and a tokenizer of single bytes."""
    build()
    root = tmp_path_factory.mktemp("chat")
    write_model(root / "model", byte_text.write_text(root / "data"), "llama", "ssmax", 512)
    config = json.loads((root / "model/tokenizer_config.json").read_text())
    (root / "model/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SMOLLM2}))
    return root / "model"


def talk(folder, *words, said, code=0):
    """What the program prints, as bytes, and its messages."""
    result = subprocess.run([str(BIN / "sample_gpt2"), "--model", str(folder), "--interactive", *map(str, words)],
                            input=said.encode(), capture_output=True, env=environment())
    assert result.returncode == code, result.stderr.decode()
    return result.stdout, result.stderr.decode()


def greedy(folder, ids, most):
    """The answer that the model gives after these ids, by a full pass for each token."""
    answer = []
    while len(answer) < most:
        row = logits(folder, [*ids, *answer])[-1]
        if int(row.argmax()) in (byte_text.IM_END, byte_text.END_OF_TEXT):
            break
        answer.append(int(row.argmax()))
    return answer


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
    assert output.decode() == shown(answers) and len(set(map(tuple, answers))) > 1


def test_raw_continues_the_text(folder):
    first = greedy(folder, list(b"the cat"), 6)
    second = greedy(folder, [*b"the cat", *first, *b" on"], 6)
    output, _ = talk(folder, "--chat", "raw", "--temperature", 0, "--max-new-tokens", 6, said="the cat\r\n on\n")
    assert output.decode() == shown([first, second])


def test_a_full_conversation_starts_over(folder):
    flags = ["--chat", "chatml", "--temperature", 0, "--max-new-tokens", 6, "--context", 60]
    output, errors = talk(folder, *flags, said="first\nsecond\n")
    again = greedy(folder, [*chatml("user", "second"), byte_text.IM_START, *b"assistant\n"], 6)
    assert output.decode().endswith(shown([again])) and errors.count("starts over") == 1
    output, errors = talk(folder, *flags, said="x" * 80 + "\nsecond\n")
    assert output.decode() == shown([again]) and "--context" in errors


def test_the_seed_decides(folder):
    outputs = {talk(folder, "--seed", seed, "--max-new-tokens", 20, said="a\nb\n")[0] for seed in (1, 1, 2)}
    assert len(outputs) == 2


ENDLESS = ["--chat", "raw", "--temperature", 0, "--context", 60000, "--max-new-tokens", 50000]     # for this model


def read(handle):
    """What comes next, within a minute."""
    assert select.select([handle], [], [], 60)[0], "the program prints nothing"
    return os.read(handle, 4096)


class Terminal:
    """The program on a terminal."""

    def __init__(self, folder, *words):
        self.handle, side = pty.openpty()
        self.process = subprocess.Popen(
            [str(BIN / "sample_gpt2"), "--model", str(folder), "--interactive", *map(str, words)], env=environment(),
            stdin=side, stdout=subprocess.PIPE, stderr=side, start_new_session=True)
        os.close(side)

    def wait_for_prompt(self):
        said = b""
        while not said.endswith(b"> "):
            said += read(self.handle)

    def write(self, text):
        os.write(self.handle, text)

    def read(self):
        return read(self.process.stdout.fileno())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def end(self):
        """The exit code, and the last of stdout."""
        output, _ = self.process.communicate(timeout=60)
        os.close(self.handle)
        return self.process.returncode, output


@pytest.fixture
def terminal(folder):
    """Starts the program on a terminal, and ends it after the test whatever happens."""
    started = []

    def start(*words):
        started.append(Terminal(folder, *words))
        started[-1].wait_for_prompt()
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_an_answer_streams_and_ctrl_c_stops_it_alone(terminal):
    it = terminal(*ENDLESS)
    for line in (b"the cat\n", b"more\n"):
        it.write(line)
        assert len(it.read()) < 5000                   # some of the answer
        it.interrupt()
        it.wait_for_prompt()
        while not it.read().endswith(b"\n"):
            pass
    it.interrupt()                                     # at the prompt, it ends the program
    assert it.end() == (0, b"")


def test_the_end_of_input_ends_it(folder, terminal):
    it = terminal("--max-new-tokens", 3)
    it.write(b"\x04")
    assert it.end() == (0, b"")
    assert talk(folder, said="") == (b"", "")


WRONG = {
    "a prompt": (["--interactive", "--prompt", "a"], 2, ["--prompt"]),
    "several samples": (["--interactive", "--num-samples", "2"], 2, ["--num-samples"]),
    "not interactive": (["--chat", "chatml"], 2, ["--interactive"]),
    "no such template": (["--interactive", "--chat", "alpaca"], 2, ["chatml"]),
    "no such tokens": (["--interactive", "--chat", "llama3"], 2, ["<|begin_of_text|>", "--chat raw"]),
    "no room": (["--interactive", "--context", "200"], 2, ["--context 200", "256"]),
    "no room by default": (["--interactive", "--max-new-tokens", "512"], 2, ["512", "--context"]),
    "a system message for text": (["--interactive", "--chat", "raw", "--system", "x"], 2, ["--system"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_named(name, folder):
    words, code, parts = WRONG[name]
    output, errors = run(BIN / "sample_gpt2", "--model", folder, *words, code=code)
    assert output == "" and errors.startswith("sample_gpt2: ") and all(part in errors for part in parts)


def test_a_folder_without_tokenizer_or_template(folder, tmp_path):
    for name in ("config.json", "model.safetensors", "modeling_attn_gpt.py"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "chat_template.jinja" in talk(tmp_path, said="", code=2)[1]
    assert "tokenizer.json" in talk(tmp_path, "--chat", "raw", said="", code=3)[1]
