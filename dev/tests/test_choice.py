"""eval_gpt2 --task choice: log-likelihoods, acc and acc_norm against what lm_eval itself gave (lm_eval.json); lengths
against the reference; messages.

    LM_EVAL=1 python -m pytest dev/tests/test_choice.py -k lm_eval_gives

runs lm_eval by doc/evaluation.md's command, and LM_EVAL=store also writes lm_eval.json again.
"""
import hashlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from eval_models import evaluate, reference, with_weights
from tiny import BIN, ROOT, environment, lm_eval_python, peak_memory, run, write_data
from trainer import xxh3_128

from transformers import AutoTokenizer

DATA = write_data
L = 64


def hellaswag(label, ctx_a, ctx_b, endings, gold):
    return {"activity_label": label, "ctx_a": ctx_a, "ctx_b": ctx_b, "ctx": f"{ctx_a} {ctx_b}", "endings": endings,
            "label": str(gold)}


# HellaSwag's fields, with texts that lm_eval changes: markup, spaces, capitals; and one of more than L tokens
CLEANED = [
    hellaswag("Baking bread", "A cook has the dough on a table.", "she",
              ["said the cat went on.", "[step] went  on it.", "went [title] a dog", "  over."], 0),
    hellaswag("Knots", "[header] How to tie [title] Take a rope.[step] Make a loop.  Then pull", "",
              ["[substeps] a]b [c", "x [open", "[a\nb] c", "house"], 3),
    hellaswag("Écoles", "das Café ist ÜBER 5 €", "ÉCOLE ÜBER ПРИВЕТ ǅUNGLA 日本",
              ["über", "Über", "ПРИВЕТ", "привет"], 1),
    hellaswag("ǆ", "the   cat    on", "ǆUNGLA", ["a   b", "on the mat", "on", "the"], 1),
    hellaswag("Dogs", "The dog went", "[title]", ["house", " house", "cat and dog", "on the house and the cat"], 2),
    hellaswag("\u2003Cats\u00a0", "the cat [x]", "the dog\u3000[x]", ["went\u2028", "\x1cwent on\x1f", "said", "and"],
              0),
    hellaswag("Same", "the cat", "said", ["on on", "on on", "the dog went over the house", "[x]"], 0),
    hellaswag("Long", "the cat and the dog went over the house and said " * 12, "and",
              ["the cat", "日本語 " * 4 + "cat", "went", "on the house"], 3),
]
PLAIN = [{"query": query, "choices": choices, "gold": gold} for query, choices, gold in (
    ("", ["the cat", "a dog went on"], 1), ("the  cat [x] said ", ["on the house", " on the house", "ON THE HOUSE"], 2),
    ("the cat\u00a0\u3000", ["went", "over and over"], 0), ("the cat", ["", "went"], 1))]


def write_questions(path, questions):
    path.write_text("".join(json.dumps(question, ensure_ascii=i % 2 == 0) + "\n"
                            for i, question in enumerate(questions)))
    return path


@pytest.mark.parametrize("shape, attn, scaling", [("llama", "softmax", "ntk"), ("gau", "relu2-T", "none")])
def test_the_length_of_each_sequence(shape, attn, scaling, model_of, tmp_path):
    """It determines T and, beyond L, ntk's theta."""
    folder, tensors, config = model_of(shape, attn)
    questions = [{"query": query, "choices": ["went", "on the house"], "gold": 0}
                 for query in ("the cat and the dog" + 12 * " went over the house and said", "the cat")]
    path = write_questions(tmp_path / "q.jsonl", questions)
    _, result = evaluate("choice", folder, None, tmp_path, "--data", path, "--seq-lens", 900, "--rope-scaling", scaling)
    encode, config = AutoTokenizer.from_pretrained(folder).encode, reference.replace(config, rope_scaling=scaling)
    for found, question in zip(result["results"][0]["log_likelihoods"], questions, strict=True):
        context = len(encode(question["query"]))
        for log_likelihood, ending in zip(found, question["choices"], strict=True):
            ids = torch.tensor(encode(f"{question['query']} {ending}"))
            logits = torch.log_softmax(reference.forward(tensors, ids[None, :-1], config)[0], -1)
            expected = logits.gather(-1, ids[1:, None])[context - 1:].sum().item()
            assert log_likelihood == pytest.approx(expected, rel=1e-5)


def test_the_first_of_equal_endings_wins(model_of, tmp_path):
    path = write_questions(tmp_path / "q.jsonl", [{"query": "the cat", "choices": ["went", "went"], "gold": 0}])
    _, result = evaluate("choice", model_of("llama", "softmax")[0], None, tmp_path, "--data", path)
    assert result["results"][0]["acc"] == result["results"][0]["acc_norm"] == 1


def test_acc_norm_counts_characters_not_bytes(model_of, tmp_path):
    """The ending that is likelier per character is not the one that is likelier per byte."""
    def result(endings):
        path = write_questions(tmp_path / "q.jsonl", [{"query": "the cat", "choices": endings, "gold": 0}])
        return evaluate("choice", model_of("llama", "softmax")[0], None, tmp_path, "--data", path)[1]["results"][0]

    endings = ["日本語", "€", "went", "the cat", "naïve café", "ПРИВЕТ", "went over the house and said"]
    [lls] = result(endings)["log_likelihoods"]
    by_character, by_byte = ([ll / len(text) for ll, text in zip(lls, texts)]
                             for texts in (endings, [text.encode() for text in endings]))
    pairs = ((i, j) for i in range(7) for j in range(7))
    i, j = next((i, j) for i, j in pairs if by_character[i] > by_character[j] + 0.01 and by_byte[i] < by_byte[j] - 0.01)
    assert result([endings[i], endings[j]])["acc_norm"] == 1


@pytest.mark.parametrize("at", [0, 1])
def test_activations_that_are_not_finite_in_one_ending(at, model_of, tmp_path):
    """No ending wins. One token fills channel 0 of the residual stream, which the MLP multiplies by a huge weight."""
    folder = model_of("llama", "softmax")[0]
    endings, encode = ["went on", "said on"], AutoTokenizer.from_pretrained(folder).encode
    [token] = set(encode("the cat said")) - set(encode("the cat went on"))

    def change(tensors):
        for name, tensor in tensors.items():
            if re.search("(o|down)_proj", name):
                tensor[0] = 0
            elif re.search("(gate|up)_proj", name):
                tensor[:, 0] = 1e25
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 0] = 0
        embedding[token] = np.eye(1, embedding.shape[1])

    folder = with_weights(folder, tmp_path / "model", change)
    question = {"query": "the cat", "choices": endings if at else endings[::-1], "gold": 0}
    words = ["--task", "choice", "--model", folder, "--data", write_questions(tmp_path / "q.jsonl", 2 * [question])]
    output, errors = run(BIN / "eval_gpt2", *words, "--picture", 0, "--out", tmp_path / "out")
    [row] = json.loads((tmp_path / "out/eval.json").read_text())["results"]
    assert [value is None for value in row["log_likelihoods"][0]] == [at == 0, at == 1]
    assert "model under softmax: its activations are not finite in 2 of 2 questions" in errors
    assert [row[key] for key in KEYS] == 4 * [None]
    assert output.splitlines()[-1].split() == ["2", "nan", "nan", "n/a"]


def test_ctx_alone_is_used_as_it_is(model_of, tmp_path):
    """Questions without ctx_a and ctx_b, as some files have them."""
    folder, *_ = model_of("llama", "softmax")
    whole = {"activity_label": "Cats", "ctx": "the cat The dog", "endings": ["went", "said on"], "label": 1}
    found = []
    for name, question in (("ctx", whole), ("parts", hellaswag("Cats", "the cat", "THE DOG", ["went", "said on"], 1))):
        path = write_questions(tmp_path / f"{name}.jsonl", [question])
        found.append(evaluate("choice", folder, None, tmp_path, "--data", path)[1]["results"][0])
    assert found[0] == found[1] and found[0]["acc_stderr"] is None      # of one question


def test_the_questions_of_the_documentation(model_of, tmp_path):
    """doc/evaluation.md shows a line of each format."""
    text = (Path(__file__).resolve().parents[2] / "doc/evaluation.md").read_text()
    lines = re.search(r"\$ cat questions.jsonl\n(.*?)\$ ", text, re.S)[1].splitlines()
    assert ["endings" in line for line in lines] == [True, False]
    (tmp_path / "q.jsonl").write_text("\n".join(lines) + "\n")
    _, result = evaluate("choice", model_of("llama", "softmax")[0], None, tmp_path, "--data", tmp_path / "q.jsonl")
    assert result["results"][0]["questions"] == 2


def test_pn_suffices_for_long_questions(model_of, tmp_path):
    """They lose their start, so that L inputs remain, for which a model has all its p_n."""
    folder, *_ = model_of("llama", "ssmax-pn")
    path = write_questions(tmp_path / "q.jsonl", [GOOD | {"query": "a b " * L}])
    output, _ = run(BIN / "eval_gpt2", "--task", "choice", "--model", folder, "--data", path, "--picture", 0, "--out",
                    tmp_path / "out")
    assert "lengths of up to" not in output
    assert "asks for" in evaluate("choice", folder, None, tmp_path, "--data", path, "--seq-lens", L + 1, code=2)


GOOD = {"query": "a", "choices": ["b", "c"], "gold": 0}
WRONG = {
    "empty file": ("", ["found none"]),
    "line 4": (f"{json.dumps(GOOD)}\n" * 2 + '\n{"query": "a",,}\n', ["expected JSON", "at offset", "(line 4)"]),
    "not JSON": ("{\n", ["q.jsonl", "offset"]),
    "a list over several lines": (json.dumps([GOOD], indent=1), ["(line 1)", "one question per line"]),
    "a byte order mark in the second line": (f"{json.dumps(GOOD)}\n\ufeff{json.dumps(GOOD)}", ["(line 2)"]),
    "not an object": ("[]\n", ["line 1", "choices"]),
    "one choice": (json.dumps(GOOD | {"choices": ["b"]}), ["line 1", "at least two"]),
    "a number as a choice": (json.dumps(GOOD | {"choices": ["b", 1]}), ["line 1", "ending 1 (from 0) is not a text"]),
    "no query": (json.dumps({"choices": ["b", "c"], "gold": 0}), ["line 1", '"query"']),
    "no label": (json.dumps({"query": "a", "choices": ["b", "c"]}), ["line 1", '"label" or "gold"', "0 to 1"]),
    "gold 2": (json.dumps(GOOD | {"gold": 2}), ["line 1", "0 to 1"]),
    "gold 0.5": (json.dumps(GOOD | {"gold": 0.5}), ["line 1", "0 to 1"]),
    "gold with a space": (json.dumps(GOOD | {"gold": " 1"}), ["line 1", "0 to 1"]),
    "label and gold": (json.dumps(GOOD | {"label": 1}), ["line 1", '"label" and "gold" name different endings']),
    "an empty label": (json.dumps(hellaswag("a", "b", "c", ["d", "e"], "")), ["line 1", "0 to 1"]),
    "other capitals": (json.dumps({"Query": "a", "Choices": ["b", "c"], "gold": 0}), ["line 1", "choices"]),
    "not UTF-8": (b'{"query": "\xff", "choices": ["b", "c"], "gold": 0}', ["q.jsonl", "UTF-8"]),
    "an ending longer than L": (json.dumps(GOOD | {"choices": ["日本語" * 40, "c"]}),
                                ["line 1", "expected at least 1 and at most 64", "--seq-lens"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named(name, model_of, tmp_path):
    text, parts = WRONG[name]
    (tmp_path / "q.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    errors = evaluate("choice", model_of("llama", "softmax")[0], None, tmp_path / "out", "--data", tmp_path / "q.jsonl",
                      code=3)
    assert errors.startswith("eval_gpt2: ") and not (tmp_path / "out/eval.json").exists()
    for part in parts:
        assert part in errors, errors
    assert "damaged" not in errors


def test_a_byte_order_mark_and_the_files_hash(model_of, tmp_path):
    """models[].data has the hash that `xxhsum -H2` prints."""
    found, question = [], json.dumps(GOOD | {"query": "the cat went"})
    for text in (f"\ufeff{question}\n\n{question}\n", f"{question}\n{question}"):
        (tmp_path / "q.jsonl").write_text(text)
        _, result = evaluate("choice", f"{model_of('llama', 'softmax')[0]},{model_of('gau', 'softmax1')[0]}", None,
                             tmp_path, "--data", tmp_path / "q.jsonl", "--attn", "ssmax")
        digest = xxh3_128(text.encode())
        assert [m["data"] for m in result["models"]] == 2 * [{"files": 1, "questions": 2, "xxh3_128": digest}]
        found.append(result["results"])
    assert found[0] == found[1] and len({json.dumps(row["log_likelihoods"]) for row in found[0]}) == 4


def test_memory_does_not_grow_with_the_file(model_of, tmp_path):
    """The questions are read one at a time. A bad last line ends the program before it evaluates the others."""
    folder, path, peaks = model_of("llama", "softmax")[0], tmp_path / "q.jsonl", []
    for count in (10, 10_000):      # 13 KB, 13 MB
        path.write_text((json.dumps(GOOD | {"query": "the cat said " * 100}) + "\n") * count + "{}\n")
        words = ["--task", "choice", "--model", folder, "--data", path, "--out", tmp_path / "out"]
        assert f"line {count + 1}:" in run(BIN / "eval_gpt2", *words, code=3)[1]
        peaks.append(peak_memory(BIN / "eval_gpt2", *words, code=3))
    assert peaks[1] - peaks[0] < 4 << 20, peaks


@pytest.mark.parametrize("left", ["fewer", "more", "longer", "others", "others for the next model"])
def test_a_file_that_changes_is_named(left, model_of, tmp_path):
    """While the first of two normalizers is measured, or the second, or before the next model. Lines of 128 bytes, of
    which a buffer holds whole ones. A sequence that is much longer than any before would overflow every array."""
    path, question = tmp_path / "q.jsonl", GOOD | {"query": "the cat said " * 5}
    path.write_text(f"{json.dumps(question):127}\n" * 4000)
    models = ",".join(str(model_of(shape, "softmax")[0]) for shape in ("llama", "gau"))
    job = subprocess.Popen(["stdbuf", "-oL", BIN / "eval_gpt2", "--task", "choice", "--model", models, "--attn",
                            "softmax1", "--data", path, "--seq-lens", "60000", "--picture", "0", "--out",
                            tmp_path / "out"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    last = "     4000 " if left == "others for the next model" else "under softmax,"
    rows = (row for row in iter(job.stdout.readline, "") if row.startswith(last))
    for _ in range(2 if left == "others for the next model" else 1):
        next(rows)
    if left == "fewer": os.truncate(path, 0)
    elif left == "more":
        with path.open("a") as file: file.write(json.dumps(question) + "\n")
    else:
        changed = question | ({"query": "x" * 50000} if left == "longer" else {"gold": 1})
        with path.open("r+") as file:
            file.seek(3999 * 128)
            file.write(f"{json.dumps(changed):127}\n")
    errors = job.communicate(timeout=120)[1]
    assert job.returncode == 3 and f"{path}: the file changed during the evaluation" in errors, errors
    assert not (tmp_path / "out/eval.json").exists()


# ---------------------------------------------------------------- lm_eval

TASK = """task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{query}}}}"
doc_to_choice: "choices"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


STORED = Path(__file__).with_name("lm_eval.json")
KEYS = "acc", "acc_norm", "acc_stderr", "acc_norm_stderr"


def documented(folder, task):
    """The words of the command in doc/evaluation.md, for this checkpoint and task."""
    page = (ROOT / "doc/evaluation.md").read_text()
    [command] = re.findall(r"^lm_eval --model hf(?:.*\\\n)*.*$", page, re.M)
    command, changes = re.subn(r"(?<=pretrained=)[^,]+", str(folder), command)
    command, tasks = re.subn(r"(?<=--tasks )\S+", task, command)
    assert changes == tasks == 1
    return shlex.split(command.replace("\\\n", ""))


def test_the_documented_command_loads_a_checkpoint_as_it_is(model_of):
    """What lm_eval passes on to transformers: float32 as in our programs, and the modeling file in the folder."""
    from transformers import AutoModelForCausalLM
    folder, *_ = model_of("grouped", "ssmax")
    words = documented(folder, "x")
    given = dict(pair.split("=") for pair in words[words.index("--model_args") + 1].split(","))
    model = AutoModelForCausalLM.from_pretrained(given["pretrained"], dtype=given["dtype"],
                                                 trust_remote_code=given["trust_remote_code"] == "True")
    assert model.dtype == torch.float32 and model.config.attention_normalizer["name"] == "ssmax"


def ask_lm_eval(name, path, folder, scratch):
    """What `lm_eval --model hf` gives for the questions in the file."""
    own = 'process_docs: !function utils.process_docs\ndoc_to_target: "{{label}}"\n'
    task = TASK.format(name=name, path=path) + (own if name == "hellaswag" else 'doc_to_target: "gold"\n')
    (scratch / "tasks").mkdir()
    (scratch / "tasks/local.yaml").write_text(task)
    (scratch / "tasks/utils.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs\n")
    words = [lm_eval_python(), "-m", *documented(folder, f"local_{name}"), "--include_path", scratch / "tasks",
             "--output_path", scratch / "lm", "--log_samples"]
    env = dict(os.environ, HF_HOME=str(scratch / "home"), HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    [samples], [results] = ([path.read_text() for path in (scratch / "lm").rglob(f"{kind}*")]
                            for kind in ("samples_", "results_"))
    samples = sorted(map(json.loads, samples.strip("\n").split("\n")), key=lambda sample: sample["doc_id"])
    theirs = json.loads(results)["results"][f"local_{name}"]
    return {"log_likelihoods": [[float(response[0]) for response in sample["filtered_resps"]] for sample in samples],
            **{key: theirs[f"{key},none"] for key in KEYS}}


def stored_results(case, asked):
    """lm_eval's results for the case, which are written if lm_eval was asked."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if asked:
        stored[case] = asked
    if os.environ.get("LM_EVAL") == "store":
        STORED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    return stored[case]


def digest(folder, path):
    """Of the questions and the tokenizer. The weights are drawn from their names."""
    return hashlib.sha256(path.read_bytes() + (folder / "tokenizer.json").read_bytes()).hexdigest()[:16]


@pytest.mark.parametrize("shape, attn", [("llama", "softmax"), ("grouped", "ssmax"), ("gau", "softmax1")])
@pytest.mark.parametrize("name, rows", [("hellaswag", CLEANED), ("plain", PLAIN)])
def test_lm_eval_gives_the_same(name, rows, shape, attn, model_of, tmp_path):
    """The same file through `lm_eval --model hf`."""
    folder, *_ = model_of(shape, attn)
    path = write_questions(tmp_path / "q.jsonl", rows)
    asked = os.environ.get("LM_EVAL") and {"inputs": digest(folder, path), **ask_lm_eval(name, path, folder, tmp_path)}
    theirs = stored_results(f"{name}, {shape}, {attn}", asked)
    assert theirs["inputs"] == digest(folder, path), "other questions or another tokenizer: run with LM_EVAL=store"
    output, result = evaluate("choice", folder, None, tmp_path, "--data", path)
    [row] = result["results"]
    for found, lls in zip(row["log_likelihoods"], theirs["log_likelihoods"], strict=True):
        assert np.abs(np.subtract(found, lls)).max() <= 2e-5 * np.abs(lls).max(), (found, lls)
    for key in KEYS:
        assert row[key] == pytest.approx(theirs[key])
    assert row["questions"] == len(rows)
    assert output.splitlines()[-1].split() == [str(len(rows)), *(f"{theirs[key]:.4f}" for key in (
        "acc", "acc_norm", "acc_norm_stderr"))]
