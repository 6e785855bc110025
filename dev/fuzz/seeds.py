#!/usr/bin/env python3
"""Writes the small files from which each target of dev/fuzz starts: seeds.py FOLDER creates FOLDER/fuzz_NAME/*."""
import json
import pathlib
import struct
import sys


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    every = {"__metadata__": {"format": "pt"}, "a.weight": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32),
             "c": entry("F16", [], 32, 34), "d": entry("F64", [1], 34, 42), "e": entry("I64", [0, 7], 42, 42),
             "f": entry("I32", [1], 42, 46), "g": entry("U8", [2], 46, 48),
             "\u00e9\"": entry("BOOL", [1, 1, 1, 1], 48, 49)}
    overlap = {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}
    hole = {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}
    huge = {"a": entry("F32", [4294967296, 4294967296], 0, 9007199254740991)}
    many = {"h": entry("F32", [1, 1, 1, 1, 1, 1, 1, 1], 0, 4), "i": entry("F32", [0, 0, 0, 0, 0, 0, 0, 0, 0], 4, 4)}
    wraps = {"a": entry("F32", [2147483648, 8589934592, 0], 0, 0),
             "b": entry("F32", [3037000500, 3037000500, 1, 3], 0, 0)}
    for header, size in ((every, 49), (many, 4), (wraps, 0), ({}, 0), (overlap, 8), (hole, 12), (huge, 8),
                         ({"n": entry("F32", [1], 0, 4)}, 4)):
        text = json.dumps(header, ensure_ascii=False).encode()
        data = bytes(range(size)) if header is not hole else b"\0\0\x80\x7f" * 3
        yield b"h" + text + b"\0" + data
        yield b"r" + struct.pack("<Q", len(text)) + text + data
    for name in (b"\xc3\xa9", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
                 b"\\u20ac\\n\\"):
        for cut in range(len(name) + 1):
            yield b'h{"' + name[:cut]
            yield b'h{"' + name[:cut] + b'":7}'
    yield b"h" + b"[" * 40 + b"]" * 40
    yield b'h{"a\\u0000":1e5,"\\ud83d\\ude00":[-0.5E-3,true,false,null]}'


def index_seeds():
    maps = ({"a": "a.safetensors", "b": "b.safetensors"}, {"a": "b.safetensors"}, {"a": "../a"}, {"a": 1}, [])
    for weight_map in maps:
        yield json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}).encode()


def manifest_seeds():
    right = {"size": 1, "xxh3_128": "5c7401c0ec22eeeeeaf06c6480b2cd11"}
    weights = {"config.json": right, "model.safetensors": right}
    for files in ({"a": right}, {"a": {"size": 2, "xxh3_128": ""}}, {"../a": right}, {"b": right}, {"a": {"size": -1}}):
        yield json.dumps({"files": {**weights, **files}}).encode()
    for files in ({}, []):
        yield json.dumps({"files": files}).encode()


def folder_seeds():
    remove, names, kinds = 9, 19, 9
    for kind in range(1, kinds):
        for name in range(names):
            yield bytes([name, remove, name, kind, 0])
        yield bytes(part for name in range(names) for part in (name, remove, name, kind)) + b"\0"
    for name, content in ((3, b'{"step": 1}\n{"step": 9}\nhalf'), (8, b'{"files": {"../../victim": {"size": 1}}}')):
        yield bytes([name, remove, name, 0, len(content)]) + content


def config_seeds():
    llama = {"model_type": "llama", "vocab_size": 50257, "hidden_size": 128, "intermediate_size": 352,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
             "hidden_act": "silu", "rms_norm_eps": 1e-5,
             "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 50256, "rope_theta": 10000.0,
             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    stages = {"qk": "none", "scale": "logn", "offset": "none", "phi": "exp", "norm": "l1", "post": "none"}
    grouped = {**llama, "num_key_value_heads": 2}
    for normalizer in ({"name": "ssmax", "seq_len": 64, **stages}, {"name": "softmax1", "seq_len": 64},
                       {"name": "ssmax+window=9+rope=500", "window": 9, "rope": 500, **stages},
                       {"name": "ssmax+cap=2,ssmax+rope=none", "layers": [{"name": "ssmax+cap=2", **stages, "cap": 2},
                                                                          {**stages, "rope": "none"}] * 2},
                       {"name": "softmax+qk=l2+post=reweight:3", "seq_len": 64}, {"name": "relu2-n+s=0.5"}, {"name": 7},
                       []):
        yield json.dumps({**llama, "attention_normalizer": normalizer}).encode()
    yield json.dumps(llama).encode()
    yield json.dumps(grouped).encode()
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
            "truncate": True}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}
    for rope in ({"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 1.0}, llama3, yarn,
                 {"rope_type": "longrope"}):
        yield json.dumps({**llama, "rope_parameters": rope}).encode()
        yield json.dumps({**llama, "rope_parameters": None, "rope_scaling": rope}).encode()
    yield json.dumps({**grouped, "head_dim": 48, "rms_norm_eps": 1e-3}).encode()
    yield json.dumps({**grouped, "model_type": "qwen3", "max_window_layers": 4, "use_sliding_window": False}).encode()
    yield json.dumps({**grouped, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768}).encode()
    yield json.dumps({**grouped, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
                      "layer_types": ["sliding_attention", "full_attention"] * 2}).encode()
    yield json.dumps({**grouped, "model_type": "mistral", "sliding_window": 4096}).encode()
    yield json.dumps({**grouped, "model_type": "mistral", "sliding_window": 4}).encode()
    yield json.dumps({**grouped, "model_type": "attn_gpt", "qk_norm": True, "qkv_bias": True, "gate": "head",
                      "softmax_model_type": "mistral",
                      "attention_normalizer": {"name": "ssmax", "seq_len": 64}}).encode()


def normalizer_seeds():
    names = ("softmax ssmax ssmax-fixed ssmax-bias ssmax-pn softmax1 identity relu2-n sigmoid-logn-l1 relu-L "
             "lssar relu2-512".split())
    stages = {"qk": "none l2", "scale": "rsqrt-d logn logn-bias pn log:512 log:L logd-logn const:-0.5",
              "offset": "none -logL -logT -logn", "phi": "exp identity relu relu2 relu6 gelu sigmoid softplus mish",
              "norm": "l1 l1+0.5 n n2 L T T2 const:7e2 sqrt-half-n none",
              "post": "none negate recenter recenter-l1 reweight:15", "s": "1 -2.5 1e-3"}
    yield from (name.encode() for name in names)
    for stage, values in stages.items():
        yield from (f"{names[i % len(names)]}+{stage}={value}".encode() for i, value in enumerate(values.split()))
    yield from (b"softmax+norm=l1+0.5+post=negate", b"softmax+qk=l2+scale=logd-logn+phi=softplus", b"ssmax+s=2+fixed",
                b"softmax+norm=l1+", b"ssmx", b"+")


def shards_seeds():
    def shard(magic, version, count, tokens):
        return struct.pack("<256i", magic, version, count, *[0] * 253) + tokens

    tokens = struct.pack("<20H", *[50256, 1, 2, 3, 50256, 50256, 7, 8, 9, 10, 11, 12, 13, 14, 15, 50256, 1, 2, 3, 4])
    yield shard(20240520, 1, 20, tokens)
    yield shard(20240520, 1, 20, tokens[:-1])
    yield shard(20240520, 1, -1, b"")
    yield shard(20240520, 2, 20, tokens)
    yield shard(20240520, 1, 20, b"\xff\xff" * 20)
    wide = struct.pack("<12I", *[50256, 1, 2, 3, 50256, 7, 8, 9, 10, 11, 12, 13])
    yield shard(20240801, 7, 12, wide)
    yield shard(20240801, 1, 12, wide)
    yield shard(20240801, 7, 12, b"\xff" * 48)
    for mask in (shard(20240521, 1, 20, bytes([0, 1] * 10)), shard(20240521, 1, 19, bytes(19)),
                 shard(20240521, 1, 20, b"\2" * 20)):
        yield b"m" + struct.pack("<H", 1064) + shard(20240520, 1, 20, tokens) + mask


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                               {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}


def byte_level_seeds():
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or (0xA1 <= b and b != 0xAD)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    joints = ["he", "the", "\u0120the", "\u0120t", "12"]
    vocab = {**{alphabet[b]: b for b in range(256)}, **{joint: 256 + i for i, joint in enumerate(joints)}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]}
    end = {"id": 256 + len(joints), "content": "<|endoftext|>"}
    whole = {"added_tokens": [end], "normalizer": None, "pre_tokenizer": level}
    for merges in (["h e", "t he", "\u0120 the", "\u0120 t", "1 2"], [["h", "e"], ["1", "2"]], ["h e", "h e"], [7], []):
        yield compact({**whole, "model": {"type": "BPE", "vocab": vocab, "merges": merges}})
    # as in SmolLM2: digits alone, special tokens first, and no token for some bytes
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|> \u00e9",
             *(alphabet[b] for b in range(256) if b not in (4, 6, 0x27, 0xF1)), *joints]
    added = [{"id": i, "content": name, "special": True} for i, name in enumerate(names[:3])]
    for unknown in (None, "<|endoftext|>"):
        model = {"type": "BPE", "unk_token": unknown, "vocab": {name: i for i, name in enumerate(names)},
                 "merges": ["h e", "t he", "1 2"]}
        yield compact({"added_tokens": added, "normalizer": None, "pre_tokenizer": digits, "model": model})
    # as in Llama 3 and Qwen3: other words, NFC, words that are not merged, tokens that are found in text
    model = {"type": "BPE", "vocab": vocab, "merges": ["h e"], "ignore_merges": True}
    plain = {"id": end["id"] + 1, "content": "then", "special": False, "normalized": False}
    for numbers, normalizer in (("{1,3}", None), ("", {"type": "NFC"})):
        split = {"type": "Split", "pattern": {"Regex": PATTERN % numbers}, "behavior": "Isolated", "invert": False}
        words = {"type": "Sequence", "pretokenizers": [split, level | {"use_regex": False}]}
        yield compact({"added_tokens": [end, plain], "normalizer": normalizer, "pre_tokenizer": words, "model": model})


def fallback_seeds():
    """As in Llama 2: characters, with byte fallback."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "t", "h", "e", "he", "the",
             "\u2581the", "e\u2581"]
    for merges in (["h e", "t he", "\u2581 the"], ["h e", "e \u2581"]):
        model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": merges,
                 "byte_fallback": True, "unk_token": "<unk>"}
        whole = {"added_tokens": [{"id": 1, "content": "<s>"}], "model": model, "normalizer": None}
        yield compact({**whole, "normalizer": PREPEND, "pre_tokenizer": None})
        for scheme in ("always", "first", "never"):
            yield compact({**whole, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": False,
                                                      "prepend_scheme": scheme}})


def chat_seeds():
    turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    chatml = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
              "{{ '<|im_start|>system\nYou\\'re kind.<|im_end|>\n' }}{% endif %}" + turn + "{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    statements = ("{#- a -#}{%- if tools %}a{% elif b == \"c\\n\" -%} d {% else %}\n  {%- endif +%}"
                  "{% for tool_call in message.tool_calls %}{{ 'x' }}{% else %}{% set a = b %}{% endfor %}"
                  "{{- [1] -}}\n")
    for template in (chatml, statements, "'<|start_header_id|>' + message['role']", "[INST]", 7,
                     [{"name": "rag", "template": statements}, {"name": "default", "template": chatml}]):
        yield compact({"chat_template": template})
    yield b"{}"


def words_seeds():
    for text in ("it's IT'S 'll\u017f  12345 a1b\n\n  b \u2581c.\r\n", "e\u0301\u0323 \u1112\u1161\u11ab \ufb2c \u0344",
                 "\u00c5\u212b \uac01 q\u0307\u0323 \U0001d15e"):
        yield text.encode()
        yield text.encode("utf-16-le")


def tokenizer_seeds():
    yield from byte_level_seeds()
    yield from fallback_seeds()


SEEDS = {"fuzz_safetensors": safetensors_seeds, "fuzz_index": index_seeds, "fuzz_manifest": manifest_seeds,
         "fuzz_folder": folder_seeds,
         "fuzz_config": config_seeds, "fuzz_normalizer": normalizer_seeds, "fuzz_shards": shards_seeds,
         "fuzz_tokenizer": tokenizer_seeds, "fuzz_words": words_seeds, "fuzz_chat": chat_seeds}

for name, seeds in SEEDS.items():
    folder = pathlib.Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds()):
        (folder / f"seed-{i:02}").write_bytes(seed)
