"""Wrong usage of the programs: each error has its exit code, its message says what was expected, what was found and
what to do, and nothing is written. What all flags have in common is in test_options.c; a row here for each program
shows that it uses that."""
import json
import os
import re
import shutil

import numpy as np
import pytest

from byte_text import END_OF_TEXT, VOCAB, write_text, write_tokenizer
from tiny import BIN, run
from trainer import checkpoint, make_data, says, train, write_shard

USAGE = 2
SHAPE = f"layers=1,heads=2,channels=16,ffn=24,tied=1,vocab={VOCAB}"
L = 600

# What each row's words are added to. A word in braces is a file or folder of files().
PROGRAMS = {
    "train": ("train_gpt2", ["--train-data", "{ids}/*_train_*.bin", "--model", SHAPE, "--seq-len", 8, "--batch", 4]),
    "sample": ("sample_gpt2", ["--model", "{model}"]),
    "sample ids": ("sample_gpt2", ["--model", "{bare}"]),
    "eval": ("eval_gpt2", ["--model", "{model}", "--data", "{text}/*_val_*.bin", "--seq-lens", 8]),
    "needle": ("eval_gpt2", ["--task", "needle", "--model", "{model}", "--data", "{text}/*_val_*.bin", "--seq-lens",
                             593]),
    "attention": ("eval_gpt2", ["--task", "attention", "--model", "{model}"]),
    "scores": ("eval_gpt2", ["--task", "scores", "--model", "{model}"]),
    "choice": ("eval_gpt2", ["--task", "choice", "--model", "{model}", "--data", "{questions}"]),
    **{f"{name} alone": (name, []) for name in ("train_gpt2", "sample_gpt2", "eval_gpt2")},
}
GAU = "layers=1,block=gau,channels=32"

ROWS = [        # of exit code 2, unless it is given
    ("train", ["--stpes", 3], ["--stpes: unknown flag. Did you mean --steps?", "--help"]),
    ("train", ["--zero", 1], ["--zero is only supported by train_gpt2cu", "not by train_gpt2"]),
    *(("train", ["--lr-scale", value], ["expected PATTERN:X", f'found "{found}"', "An example: --lr-scale"])
      for value, found in (("", ""), ("*", "*"), (":2", ":2"), ("*:", "*:"), ("*:-1", "*:-1"), ("*:nan", "*:nan"),
                           ("*:inf", "*:inf"), ("*:1e7", "*:1e7"), ("*:2,", ""), ("*:2,*norm", "*norm"))),
    ("train", ["--lr-scale", "*:2,lm_head*:2"],
     ["a pattern that matches", 'found "lm_head*"', "from model.embed_tokens.weight to model.norm.weight"]),
    ("train", ["--lr-scale", ",".join(65 * ["*:2"])], ["--lr-scale: expected at most 64 patterns"]),
    ("train", ["--decay-frac", "1.1"], ["--decay-frac 1.1", "from 0 to 1"]),
    ("train", ["--attn", "ssmx"], ["--attn ssmx", "Did you mean ssmax? "]),
    ("train", ["--rope-scaling", "yran:4:8"], ["--rope-scaling yran:4:8: unknown scaling. Did you mean yarn?"]),
    ("train", ["--attn-switch", "ssmax"], ["--attn-switch ssmax", "STEP:NAME"]),
    ("train", ["--attn-switch", "3:ssmx"], ["--attn-switch 3:ssmx", "ssmax"]),
    *(("train", [f"--attn-switch={text}"], ["expected STEP:NAME with a step from 0 to 1000000000000"])
      for text in ("9223372036854775808:ssmax", "1000000000001:ssmax", "-1:ssmax", " 5:ssmax", "5.5:ssmax", ":ssmax")),
    ("train", ["--model", "125M"],
     ["'125M'. Did you mean 124M? Models: 15M, 124M, 162M, 350M, 760M, 1.3B. Keys: layers="]),
    ("train", ["--model", "124M,kv_head=4"], ["'kv_head'. Did you mean kv_heads?"]),
    ("train", ["--model", "gpt2"], ["'gpt2'. Models: "]),
    ("train", ["--model", "layers=2"], ["heads= is required, unless a model such as 124M comes first"]),
    ("train", ["--model", "124M,vocab=1048577"], ["vocab", "1048576", "1048577"]),
    ("train", ["--model", "layers=1,heads=3,channels=16,ffn=24"], ["16 channels", "3 heads", "divisible"]),
    ("train", ["--model", "layers=1,heads=16,channels=16,ffn=24"], ["even"]),
    ("train", ["--model", "124M,kv_heads=5"], ["12 heads", "5 key-value heads"]),
    ("train", ["--model", "124M,head_dim=33"], ["33", "even"]),
    *(("train", ["--model", f"124M,norm_eps={text}"], ["norm_eps", "1e-12", "0.1", f"'{text}'"])
      for text in ("0", "1e-5x", "0x1p-17", "nan")),
    *(("train", ["--model", f"124M,layers={text}"], ["layers", "1 to 1024", f"'{text}'"]) for text in (" 1", "1.5")),
    ("train", ["--model", "124M,qk_norm=yes"], ["qk_norm=yes: expected 0 or 1"]),
    ("train", ["--model", "124M,bias=all"], ["bias=all: expected none or qkv"]),
    ("train", ["--model", "124M,gate=all"], ["gate=all: expected none, channel or head"]),
    *(("train", ["--model", f"{GAU},{key}={value}"], [key, "block=gau"])
      for key, value in {"bias": "qkv", "kv_heads": 1, "head_dim": 128, "qk_norm": 1, "gate": "head"}.items()),
    ("train", ["--total-batch-tokens", 50], ["--total-batch-tokens 50", "4 x 8 x 1 = 32", "Nearest: 64"]),
    ("train", ["--seq-len", "8,5"], ["--seq-len", "5 does not divide", "8"]),
    ("train", ["--resume", "--out", ""], ["--out is empty"]),
    *(("train", ["--logit-softcap", value], [f"--logit-softcap {value}", "expected a number from 0"])
      for value in ("0.09", "-1", "2e6", "nan")),
    ("train", ["--train-data", "{ids}/d_train_000001.bin:0.7,{ids}/d_val_000000.bin"],
     ["d_val_000000.bin\" has no weight", "Give all sources a weight"]),
    ("train", ["--val-data", "{ids}/*:1"], ["/*:1: only --train-data can have weights"]),
    ("train", ["--train-data", "{ids}/gone.bin"], 3, ["gone.bin", "no file matches", "data/"]),
    ("train_gpt2 alone", [], ["--train-data is missing"]),
    ("train_gpt2 alone", ["--train-data", "{ids}/d_train_000001.bin", "--resume"], ["--resume needs --out"]),
    ("train_gpt2 alone", ["--out", "{ids}/typo", "--resume"],
     ["typo: this folder contains no run to resume", "needs --train-data"]),

    ("sample_gpt2 alone", [], ["--model"]),
    ("sample", ["--promt", "1"], ["--prompt"]),
    ("sample", ["--attn", "ssmx"], ["Did you mean ssmax?"]),
    ("sample", ["--prompt", "1", "--prompt-file", "x"], ["--prompt-file"]),
    ("sample ids", ["--prompt", "the cat"], ["token ids", "the cat", "tokenizer.json"]),
    ("sample ids", ["--prompt", f"1,{VOCAB}"], [f"below {VOCAB}"]),
    *(("sample ids", [f"--prompt={text}"], ["token ids"]) for text in ("-1", "1,", "1,,2")),
    ("sample ids", ["--prompt", "1", "--max-new-tokens", "1048576"], ["1048576"]),
    ("sample", ["--model", "{ids}/nowhere"], 3, ["nowhere", "config.json", "ckpt"]),
    ("sample", ["--prompt-file", "{ids}/nowhere"], 3, ["nowhere"]),
    ("sample", ["--prompt-file", "{blank}"], 3, ["blank", "one prompt per line"]),
    ("sample ids", ["--prompt-file", "{bad_ids}"], 3, ["bad_ids: line 2", "1,x"]),
    ("sample", ["--model", "{small}", "--prompt", "the cat"], ["token", "only 100 ids"]),
    ("sample", ["--stop", ""], ["--stop"]),
    ("sample ids", ["--stop", "x"], 3, ["--stop", "tokenizer.json"]),
    ("sample", ["--model", "{huge}"], 4, ["memory", "--max-new-tokens"]),
    ("sample", ["--interactive", "--prompt", "a"], ["--interactive reads from stdin: omit --prompt"]),
    ("sample", ["--interactive", "--num-samples", 2], ["--interactive reads from stdin", "--num-samples"]),
    ("sample", ["--chat", "chatml"], ["--chat, --system and --context need --interactive"]),
    ("sample", ["--interactive", "--chat", "alpaca"], ["--chat alpaca", "chatml"]),
    ("sample", ["--interactive", "--chat", "llama3"], ["<|begin_of_text|>", "--chat raw"]),
    ("sample", ["--interactive", "--chat", "raw", "--context", 200], ["--context 200", "256"]),
    ("sample", ["--interactive", "--chat", "raw", "--max-new-tokens", L], [f"{L}", "--context"]),
    ("sample", ["--interactive", "--chat", "raw", "--system", "x"], ["--system"]),

    ("eval_gpt2 alone", [], ["--model is missing"]),
    ("eval_gpt2 alone", ["--model", "{model}"], ["--data is missing"]),
    ("eval", ["--seq-len", "8"], ["Did you mean --seq-lens?"]),
    ("eval", ["--task", "needles"], ["--task needles", "needle|attention"]),
    ("eval", ["--attn", "ssmx"], ["--attn ssmx", "Did you mean ssmax?"]),
    ("eval", ["--rope-scaling", "yran:4:8"], ["--rope-scaling yran:4:8", "Did you mean yarn?", "linear:FACTOR, ntk"]),
    ("eval", ["--rope-theta", "1"], ["--rope-theta 1", "above 1"]),
    ("eval", ["--seq-lens", "8,2000000"], ["--seq-lens", "1048576"]),
    ("eval", ["--seq-lens", "0,600"], ["--seq-lens: 600 is listed twice."]),
    ("eval", ["--model", "{one}", "--attn", "softmax+scale=log:L"], ["ln L", "L = 1"]),
    ("eval", ["--model", "{pairs}", "--rope-scaling", "ntk", "--seq-lens", "700"], ["ntk", "size 2"]),
    ("eval", ["--model", "{endless}", "--seq-lens", 0], ["2000000", "--seq-lens"]),
    ("eval", ["--model", "{pn}", "--seq-lens", 601], ["p_n for n up to L = 600", "--pn-extrapolate log"]),
    ("eval", ["--model", "{ids}/nowhere"], 3,
     ["--model", "nowhere", "config.json", "ckpt/step-*", "found neither"]),
    ("eval", ["--model", "{hash}"], 3, ["model.safetensors", "XXH3", "damaged"]),
    ("eval", ["--model", "{cut}"], 3, ["model.safetensors"]),
    ("eval", ["--model", "{scalar}"], 3, ["attn_scale", "none of that name"]),
    ("eval", ["--data", "{ids}/none*.bin"], 3, ["no file matches"]),
    ("eval", ["--data", "a.bin:0.7,b.bin:0.3"],
     ["--data a.bin:0.7,b.bin:0.3", "weights are for --train-data", "each source by itself"]),
    ("eval", ["--data", "{ids}/d_val_000000.bin", "--seq-lens", "8,1000"], 3,
     ["too little data", "600 tokens", "at least 1 is needed", "reduce --seq-lens."]),
    ("eval", ["--data", "{over}"], 3, ["over.bin", f"token id {VOCAB}", "offset 1,064"]),
    ("eval", ["--data", "{masked}"], 3, ["masked.bin", "no token counts", "mask", "length 8"]),
    ("eval", ["--model", "{huge}"], 4, ["memory", "--seq-lens"]),
    ("eval", ["--save-prompts"], ["--save-prompts", "needle"]),
    ("eval", ["--out", ""], ["--out is empty"]),

    ("eval_gpt2 alone", ["--task", "needle", "--model", "{model}"], ["--data is missing"]),
    ("eval_gpt2 alone", ["--task", "needle", "--model", "{model}", "--data", "{few}", "--save-prompts"],
     ["--save-prompts", "--out"]),
    ("needle", ["--seq-lens", "200,30"], ["--seq-lens 30", "too short", "needle alone", "tokens"]),
    ("needle", ["--seq-lens", "30001"], 3,
     ["too little data", "30,000 tokens", "contexts of 30,001", "reduce --seq-lens"]),
    ("needle", ["--data", "{few}"], 3,
     ["few.bin: too little data: 60 tokens;", "contexts of 593 needs at least 593", "reduce --seq-lens"]),
    ("needle", ["--data", "{empty}"], 3, ["empty.bin"]),
    ("needle", ["--data", "{ends}"], 3,
     ["only 592 tokens other than end-of-text; expected 593", "reduce --seq-lens"]),
    ("needle", ["--model", "{bare}"], 3,
     ["bare: it has no tokenizer.json", "Copy tokenizer.json from the folder of the model's training data into"]),
    ("needle", ["--model", "{without7}"],
     ["without7/tokenizer.json: it has no tokens for the number", "which was drawn for sample 2", "Set --number"]),
    ("needle", ["--model", "{without7}", "--number", "171"],
     ["--number 171", "without7/tokenizer.json", "Choose another"]),
    ("needle", ["--model", "{without:}"], 3,
     ["without:/tokenizer.json: it has no tokens for all of \"The special magic ", " number is:\"", "(the city is ",
      "Choose another model"]),
    ("needle", ["--model", "{withoutB}"],
     ["withoutB/tokenizer.json: it has no tokens for the city ", "which was drawn for sample ", "Set --city"]),
    ("needle", ["--model", "{withoutB}", "--city", "Rome", "--chat", "chatml", "--system", "Be brief."],
     ["--system", "withoutB/tokenizer.json"]),
    ("needle", ["--city", "Area51"], ["--city Area51: expected a name without digits", "--number"]),
    ("needle", ["--city", b"Z\xfcrich"], ["--city: expected text in UTF-8"]),
    *(("needle", ["--city", name], ["--city", "1 to 63"]) for name in ("", "X" * 64)),
    ("needle", ["--number", "12a"], ["--number 12a", "digits"]),
    ("needle", ["--number", "1" * 19], ["--number", "1 to 18"]),
    ("needle", ["--chat", "alpaca"], ["raw|squad|chatml"]),
    ("needle", ["--chat", "chatml", "--model", "{plain}"], ["--chat chatml", "<|im_start|>", "--chat raw"]),
    ("needle", ["--system", "Hi"], ["--system needs --chat chatml"]),
    ("needle", ["--system", "x" * 257, "--chat", "chatml"], ["--system", "at most 256"]),
    ("needle", ["--model", "{pn}"], ["p_n for n up to L = 600", "--pn-extrapolate log"]),

    ("attention", [], ["--data is missing"]),
    ("attention", ["--prompt-file", "{letter}"], 3, ["line 1", "single token", "Make the line longer"]),
    ("attention", ["--prompt-file", "{blank}"], 3, ["one prompt per line", "found none"]),
    ("attention", ["--prompt-file", "/nowhere"], 3, ["/nowhere"]),
    ("attention", ["--prompt-file", "{line}", "--model", "{pn}"],
     ["p_n for n up to L = 600", "asks for 601", "--pn-extrapolate log"]),
    ("attention", ["--data", "{text}/*_val_*.bin", "--seq-lens", "10,20"], ["--seq-lens", "one length"]),
    ("attention", ["--data", "{text}/*_val_*.bin", "--seq-lens", "2"], ["--seq-lens", "at least 3"]),
    ("attention", ["--data", "{text}/*_val_*.bin", "--seq-lens", "1048576"], 3,
     ["too little data", "reduce --seq-lens"]),

    # flags that a task does not use
    ("eval", ["--max-new-tokens", 3], ["--max-new-tokens is for --task needle, not loss."]),
    ("eval", ["--task", "attention", "--pack", "example"],
     ["--pack is for --task loss or positions, not attention."]),
    ("needle", ["--depths", "50,10,50"], ["--depths: 50 is listed twice."]),
    ("needle", ["--depths", 50, "--random-depth"], ["--depths and --random-depth exclude each other."]),
    ("needle", ["--digits", 3, "--number", 12], ["--digits and --number exclude each other."]),
    *(("attention", ["--prompt-file", "{line}", flag, value],
       [f"{flag} is for --task {tasks}, not attention with --prompt-file."]) for flag, value, tasks in (
        ("--samples", 3, "needle or attention without --prompt-file"), ("--max-tokens", 5, "loss or positions"),
        ("--data", "x", "loss, positions, needle, attention without --prompt-file or choice"))),
    *(("scores", [flag, 8], [f"{flag} is for --task loss, positions, needle, attention{which} or choice, not scores."])
      for flag, which in {"--data": " without --prompt-file", "--seq-lens": " without --prompt-file",
                          "--rope-theta": ""}.items()),
    ("choice", ["--seq-lens", "8,9"], ["--seq-lens: --task choice expects one length"]),
    ("choice", ["--data", "/nowhere"], 3, ["/nowhere"]),
    ("eval_gpt2 alone", ["--task", "choice", "--model", "{model}"], ["--data is missing", "JSONL"]),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of the files and folders that the rows name: shards; models, one of them intact; texts."""
    root = tmp_path_factory.mktemp("files")
    make_data(root / "ids")
    text = write_text(root / "text")
    for name, attn in (("run", "softmax"), ("pn-run", "ssmax-pn")):
        train(text, "--model", SHAPE, "--attn", attn, "--seq-len", L, "--batch", 1, "--steps", 0, "--out",
              root / name, model=False)
    whole = checkpoint(root / "run", 0)
    config = json.loads((whole / "config.json").read_text())
    normalizer = config["attention_normalizer"]
    changes = {"model": {}, "bare": {}, "plain": {}, "cut": {},
               **{f"without{letter}": {} for letter in "7:B"},
               "one": {"attention_normalizer": normalizer | {"seq_len": 1}},
               "endless": {"attention_normalizer": {"name": "softmax"}, "max_position_embeddings": 2000000},
               "pairs": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 2},
               "scalar": {"attention_normalizer": {"name": "ssmax", "seq_len": L}},
               "small": {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0},
               "huge": {"num_hidden_layers": 1024, "intermediate_size": 262144}}
    for name, change in changes.items():
        shutil.copytree(whole, root / name)
        (root / name / "manifest.json").unlink()
        (root / name / "config.json").write_text(json.dumps(config | change))
    weights = (whole / "model.safetensors").read_bytes()
    (root / "cut/model.safetensors").write_bytes(weights[:-40])
    (shutil.copytree(whole, root / "hash") / "model.safetensors").write_bytes(weights[:-1] + b"\x7f")
    (root / "bare/tokenizer.json").unlink()
    write_tokenizer(root / "plain", {"<|endoftext|>": END_OF_TEXT})
    for letter in "7:B":
        path = root / f"without{letter}/tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab[2 * letter] = vocab.pop(letter)               # the ids stay; without merges, no text has this token
        path.write_text(json.dumps(tokenizer))
    ones = np.ones(1000, int)
    over = np.where(np.arange(1000) == 20, VOCAB, 1)
    ends = np.where(np.arange(64 * 37 + 1) % 4 == 0, 97, END_OF_TEXT)
    shards = {"over": over, "masked": ones, "empty": [], "few": 60 * [97], "ends": ends}
    for name, tokens in shards.items():
        write_shard(root / f"{name}.bin", tokens)
    write_shard(root / "masked.mask", 0 * ones, magic=20240521)
    texts = {"blank": "\n\n", "bad_ids": "1,2\n1,x\n", "letter": "a\n", "line": L * "x" + "\n",
             "questions": json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0})}
    for name, content in texts.items():
        (root / name).write_text(content)
    return {"pn": checkpoint(root / "pn-run", 0), **{name: root / f"{name}.bin" for name in shards},
            **{name: root / name for name in ("ids", "text", "hash", *changes, *texts)}}


def filled(word, files):
    """A word of a row, with the path of the file that it names."""
    if isinstance(word, bytes):
        return os.fsdecode(word)
    return re.sub(r"\{(.+?)\}", lambda found: str(files[found[1]]), str(word))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(map(str, [*PROGRAMS[row[0]][0:1], *row[1]]))[:70])
def test_wrong_usage(row, files, tmp_path):
    kind, words, *code, parts = row
    program, before = PROGRAMS[kind]
    out = [] if "alone" in kind or program == "sample_gpt2" else ["--out", tmp_path / "out"]
    everything = [filled(word, files) for word in [*before, *out, *words]]
    output, errors = run(BIN / program, *everything, code=code[0] if code else USAGE)
    says(errors, f"{program}: ", *parts)
    if program == "sample_gpt2" or program == "eval_gpt2" and not code:
        assert not output
    assert not list(tmp_path.rglob("*.json")) and not (files["ids"] / "typo").exists()
    assert program == "eval_gpt2" and code or not (tmp_path / "out").exists()
