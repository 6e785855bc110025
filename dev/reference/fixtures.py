"""Writes the fixtures with which the C tests compare (README.md describes them), or checks the stored ones."""

import argparse
import functools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import model as reference

FOLDER = Path(__file__).parent / "fixtures"
FULL, SAMPLES, LOGITS = 100, 8, 8
BLOCK = 1 << 16     # elements that are projected at a time
LENGTHS = (1, 33, 64)
# Clips within the range of each run's gradient norms, so that some steps are clipped and some are not.
CLIP = {("softmax", 33): 6.2, ("softmax", 64): 4.8, ("relu2-n", 33): 9.0, ("relu2-n", 64): 5.8, (50257, 33): 4.0}
FIRST = ("softmax", "ssmax", "softmax1", "relu2-n")     # those with the most model cases
OVERRIDES = (
    "softmax+norm=l1+0.5+post=negate",
    "softmax+post=reweight:3",
    "softmax+qk=l2+scale=const:-7",
    "sigmoid-logn-l1+post=reweight:15",
    "lssar+post=reweight:100",
    "exp+post=reweight:0.5",            # under other norms too many weights are near the infinite slope at A n = 1
    "gelu-l1+post=recenter-l1",
    "identity-l1+post=recenter-l1",
    "mish-l1+norm=l1+2+post=recenter",
    "relu6-l1+scale=const:1+norm=T2+offset=-logT",
    "relu2-l1+qk=l2+scale=logd-logn+post=reweight:2",
    "softplus-l1+scale=log:L+norm=n2",
    "ssmax-pn+phi=softplus+norm=n+s=0.5+fixed",
    "softmax-floorlog+scale=floorlog:4")
NORMALIZERS = (*(name for name in reference.PRESETS if name != "softmax-floorlog"), *OVERRIDES)     # it equals softmax
# A model of one layer (or two gated units) for each normalizer without a model above; the clip lies among the usual
# gradient norms.
BLOCKS = {"llama": ("layers=1,heads=2,channels=64,ffn=112,vocab=97,tied=1", 3.6),
          "gau": ("layers=1,block=gau,channels=32,vocab=97,tied=1", 2.1)}
NO_MODEL = ("lssar+post=reweight:100",      # float32 gradients through two units are off by 1e-4: the runs diverge
            "softmax-floorlog+scale=floorlog:4")    # differs from softmax only inside attention
# A learning rate below 0.001 where a high power, or a row with a small sum, lets rounding errors grow from step to
# step.
LR = {("gau", "relu-l1"): 0.0003, ("gau", "relu6-l1"): 0.0003,
      ("gau", "relu2-l1+qk=l2+scale=logd-logn+post=reweight:2"): 0.0003,
      ("h4_kv2", "lssa"): 0.0001, ("gau", "lssar"): 0.0001, ("gau", "sigmoid-logn-l1+post=reweight:15"): 0.0001}
# Where a gradient is nothing but rounding (p_1's under exp and l1) or comes close to that: a clip so small that the
# gradient is small compared with AdamW's eps.
SMALL_CLIP = {"ssmax-pn": 0.01, "softmax": 0.05, "softmax-negated": 0.05, "softmax+post=reweight:3": 0.05}
ATTENTION_SHAPES = (*((2, 2, 48, T) for T in (1, 2, 3, 4, 33, 64, 257)),
                    *((1, 2, d, T) for d in (64, 128) for T in (64, 257)))
# The scale of the inputs q and k. With 2, z has a standard deviation of about 1.3 and reaches 6 in both directions.
# Exceptions: where another scale is needed to get there, to reach relu6's 6, or to reach both ends of sigmoid; and
# where a row of few keys could have a sum so small that rounding dominates.
QK_SCALE = {"ssmax-fixed": 1, "ssmax-pn": 4, "ssmax-pn+phi=softplus+norm=n+s=0.5+fixed": 4, "sigmoid": 3,
            "sigmoid-logn": 3, "relu6-l1": 4, "relu-l1": 4, "relu2-l1": 6, "mish-l1": 2.5, "identity-l1": 3,
            "identity-l1+post=recenter-l1": 3}
# Grouped-query attention (fewer key-value heads than heads), alone and in models, some with a head size that is not
# channels/heads.
GROUPED = ("softmax", "ssmax", "lssar", "softmax-recentered", "sigmoid", "softmax-sink")
# B, heads, kv_heads, head_size, T.
GROUPED_SHAPES = ((2, 4, 2, 48, 1), (2, 4, 2, 48, 33), (2, 4, 2, 48, 64), (1, 3, 1, 64, 33), (1, 8, 2, 128, 65))
# Models: shape, a clip among the gradient norms, (normalizer, T).
HEAD_MODELS = {
    "h4_kv2": ("layers=2,heads=4,kv_heads=2,channels=64,ffn=112,vocab=97,tied=1", 5,
               (("softmax", 1), ("softmax", 33), ("softmax", 64), ("lssa", 33), ("softmax-sink", 33))),
    "h3_kv1_d24_eps": ("layers=2,heads=3,kv_heads=1,head_dim=24,channels=64,ffn=112,norm_eps=0.05,vocab=97,tied=0", 4.8,
                       (("softmax", 33), ("ssmax", 33))),
    "h2_kv2_d48": ("layers=1,heads=2,head_dim=48,channels=32,ffn=88,vocab=97,tied=1", 3, (("softmax", 33),)),
    "qk_norm": ("layers=2,heads=2,channels=64,ffn=112,qk_norm=1,vocab=97,tied=1", 4,
                (("softmax", 1), ("softmax", 33), ("relu2-n", 33))),
    "qk_norm_h4_kv2": (
        "layers=2,heads=4,kv_heads=2,head_dim=24,channels=64,ffn=112,norm_eps=0.05,qk_norm=1,vocab=97,tied=0", 4.8,
        (("ssmax", 33),)),
    "bias": ("layers=2,heads=2,channels=64,ffn=112,bias=qkv,vocab=97,tied=1", 4,
             (("softmax", 1), ("softmax", 33), ("relu2-n", 33))),
    "bias_h4_kv2": ("layers=2,heads=4,kv_heads=2,head_dim=24,channels=64,ffn=112,norm_eps=0.05,qk_norm=1,bias=qkv,"
                    "vocab=97,tied=0", 3, (("ssmax", 33),)),
    "gate": ("layers=1,heads=2,channels=64,ffn=112,gate=channel,vocab=97,tied=1", 4.05, (("softmax", 33),)),
    "gate_h4_kv2": ("layers=1,heads=4,kv_heads=2,head_dim=24,channels=64,ffn=112,qk_norm=1,gate=head,vocab=97,tied=0",
                    4.05, (("ssmax", 33),))}
# Windows and caps: (normalizer, docs, (T, head_size)...). With `docs`, each sequence is documents of that length.
LIMITED = (
    *((f"softmax+window={W}", 0, (257, 64)) for W in (2, 63, 64, 65, 256, 257)),
    ("softmax-sink+window=1", 0, (33, 48)),
    ("ssmax-bias+window=20", 0, (33, 48), (257, 128)),
    ("ssmax-pn+window=16", 0, (16, 48), (257, 64)),     # L = 16: each row has at most that many keys
    ("lssar+window=40", 0, (257, 64)),
    ("softmax-recentered+window=3", 0, (33, 48)),
    ("softmax-recentered-l1+window=40", 0, (257, 64)),
    ("relu2-T+window=30", 0, (64, 48)),
    ("sigmoid-logn+window=30", 0, (257, 64)),
    ("softpick+window=65", 0, (257, 64)),
    ("softmax+cap=1.5", 0, (33, 48), (257, 64)),
    ("softmax1+cap=2+window=70", 0, (257, 64)),
    ("softmax-sink+cap=2", 0, (64, 128)),
    ("ssmax-bias+cap=1.5", 0, (64, 48)),
    ("sigmoid-logn-l1+cap=2+post=reweight:3", 0, (64, 48)),
    ("gelu-l1+cap=3", 0, (64, 48)),
    ("softmax+window=10", 23, (64, 48)),
    ("ssmax+window=80+cap=2", 100, (257, 64)),
    ("lssa+window=23", 23, (257, 128)))
# Models with a list for the layers: shape, steps, L, the list.
LISTS = {
    "window_nope": ("layers=3,heads=4,kv_heads=2,channels=64,ffn=112,vocab=97,tied=1", 0, 64,
                    "2*softmax+window=8,ssmax+rope=none"),
    "scalars": ("layers=4,heads=2,channels=64,ffn=112,vocab=97,tied=1", 10, 64,
                "ssmax-pn+window=5,softmax-sink+window=1,ssmax-bias+cap=2+rope=100,ssmax-pn+rope=none"),
    "units": ("layers=2,block=gau,channels=32,vocab=97,tied=1", 0, 64,
            "softmax-recentered+window=7,lssa+rope=none+cap=3,relu2-T+window=33,sigmoid+window=16"),
    "beyond_L": ("layers=2,heads=2,channels=64,ffn=112,qk_norm=1,vocab=97,tied=1", 0, 8, "ssmax-pn+window=8+rope=50")}
# A high power makes almost every row of two to four keys one-hot, with nothing but rounding in its gradient; among many
# rows a few are not.
HIGH_POWERS = ("lssar", "lssar+post=reweight:100", "sigmoid-logn-l1+post=reweight:15")
# The second sequence of two tokens begins with z = 0.004.
ONE_SEQUENCE = ("identity-l1", "identity-l1+post=recenter-l1")


# ---- The formulas of hash.h

def mix(z):
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return mix(np.uint64(h))


def hashes(name, first, count):
    i = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    return mix(stream(name) + i * np.uint64(0x9E3779B97F4A7C15))


def values(name, shape, mean=0.0, scale=1.0, first=0):
    """Float64 numbers that a float32 holds exactly."""
    odd = 2 * (hashes(name, first, math.prod(shape)) >> np.uint64(40)).astype(np.int64) + 1 - 2**24
    out = np.float64(np.float32(mean)) + np.float64(np.float32(scale)) * (odd / 2.0**24)
    return torch.from_numpy(out.astype(np.float32).astype(np.float64)).view(shape)


# The mean and the scale of a parameter, by a word in its name. All others are matrices: 0 and 2/sqrt(columns).
RULES = {"norm.weight": (1.0, 0.3), "_gain": (0.0, 1.5), "_offset": (0.0, 0.6),
         "attn_scale": (0.3, 0.1), "attn_bias": (0.0, 0.2), "attn_pn": (1.0, 0.3), "attn_sink": (0.0, 0.5),
         "proj.bias": (0.0, 0.5)}


@functools.lru_cache
def parameter(name, shape):
    rule = next((RULES[words] for words in RULES if words in name), (0.0, 2 / math.sqrt(shape[-1])))
    return values(name, shape, *rule)


def indices(name, first, count, n):
    return torch.from_numpy((hashes(name, first, count) % np.uint64(n)).astype(np.int64))


def signs(first, count):
    """(count, 16) of +1 and -1."""
    low = hashes("projection", first, count).astype("<u2")
    return 2.0 * np.unpackbits(low.view(np.uint8).reshape(count, 2), axis=1, bitorder="little") - 1.0


def digest(x):
    """Norm, projections on hashed signs, sampled elements (hash.h)."""
    projections = sum(x[i:i + BLOCK] @ signs(i, min(BLOCK, x.size - i)) for i in range(0, x.size, BLOCK))
    samples = x[indices("sample", 0, SAMPLES, x.size).numpy()]
    return np.concatenate([[np.linalg.norm(x)], projections, samples])


def stored(x):
    """The form in which a tensor is stored: in full or as a digest, float32."""
    x = x.detach().double().numpy().ravel()
    return (x if x.size <= FULL else digest(x)).astype(np.float32)


# ---- The cases

def cases():
    """Every case as a dictionary of text, in the order of cases.txt."""
    def case(name, kind, **keys):
        return {"case": name, "kind": kind, **{key: str(value) for key, value in keys.items()}}

    for vocab, shape in (97, "heads=2,channels=96,ffn=176"), (50257, "heads=1,channels=32,ffn=88"):
        for tied in 1, 0:
            for attn in FIRST:
                for T in LENGTHS:
                    steps = 10 if T > 1 and vocab == 97 or T == 33 and attn == "ssmax" else 0
                    clip = CLIP.get((vocab if vocab > 97 else attn if attn == "relu2-n" else "softmax", T))
                    yield case(f"{attn}_{'tied' if tied else 'untied'}_v{vocab}_T{T}", "model",
                               model=f"layers=2,{shape},vocab={vocab},tied={tied}", attn=attn, L=64, B=2, T=T,
                               steps=steps, **(dict(lr=0.001, clip=clip, weight_decay=0.1) if steps else {}))
    for block, (model, clip) in BLOCKS.items():
        for attn in NORMALIZERS:
            if attn not in NO_MODEL and (block == "gau" or attn not in FIRST):
                lr, clip_here = LR.get((block, attn), 0.001), SMALL_CLIP.get(attn, clip)
                yield case(f"{attn}_{block}_T33", "model", model=model, attn=attn, L=64, B=2, T=33, steps=10, lr=lr,
                           clip=clip_here, weight_decay=0.1)
    for name, (model, clip, pairs) in HEAD_MODELS.items():
        for attn, T in pairs:
            steps = (dict(steps=0) if T == 1
                     else dict(steps=10, lr=LR.get((name, attn), 0.001), clip=clip, weight_decay=0.1))
            yield case(f"{attn}_{name}_T{T}", "model", model=model, attn=attn, L=64, B=2, T=T, **steps)
    for name, (model, steps, L, attn) in LISTS.items():
        yield case(f"layers_{name}_T33", "model", model=model, attn=attn, L=L, B=2, T=33, steps=steps,
                   **(dict(lr=0.001, clip=3.6, weight_decay=0.1) if steps else {}))
    for N, C in (1, 8), (5, 96), (33, 48):
        yield case(f"rmsnorm_N{N}_C{C}", "rmsnorm", N=N, C=C)
    yield case("rmsnorm_N5_C96_eps", "rmsnorm", N=5, C=96, eps=0.05)
    for B, T, heads, head_size in (1, 1, 1, 48), (2, 33, 2, 48), (1, 64, 3, 64):
        yield case(f"rope_T{T}_d{head_size}", "rope", B=B, T=T, heads=heads, head_size=head_size)
    for N in 1, 88, 4097:
        yield case(f"swiglu_N{N}", "swiglu", N=N)
    for N, C, OC in (1, 48, 97), (33, 96, 176), (64, 64, 33):
        yield case(f"matmul_N{N}_C{C}_OC{OC}", "matmul", N=N, C=C, OC=OC)
    for N, C, vocab in (1, 32, 97), (64, 48, 97), (66, 32, 50257):
        yield case(f"embedding_N{N}_v{vocab}", "embedding", N=N, C=C, vocab=vocab)
    for N, vocab, scale, softcap, z_loss in ((1, 97, 8, 0, 0), (33, 97, 300, 0, 0), (7, 50257, 8, 0, 0),
                                             (5, 97, 8, 0, 0.125), (6, 97, 20, 7.5, 0), (9, 50257, 8, 30, 0.0625)):
        yield case(f"crossentropy_N{N}_v{vocab}", "crossentropy", N=N, vocab=vocab, scale=scale, softcap=softcap,
                   z_loss=z_loss)
    for attn in NORMALIZERS:
        for B, heads, head_size, T in ATTENTION_SHAPES:
            L = 257 if attn.startswith("ssmax-pn") else 64
            B = 16 if attn in HIGH_POWERS and 1 < T <= 4 else 1 if attn in ONE_SEQUENCE and T == 2 else B
            yield case(f"attention_{attn}_T{T}_d{head_size}", "attention", attn=attn, scale=QK_SCALE.get(attn, 2), L=L,
                       B=B, T=T, heads=heads, head_size=head_size)
    for attn in GROUPED:
        for B, heads, kv_heads, head_size, T in GROUPED_SHAPES:
            yield case(f"attention_{attn}_T{T}_d{head_size}_h{heads}_kv{kv_heads}", "attention", attn=attn,
                       scale=QK_SCALE.get(attn, 2), L=64, B=B, T=T, heads=heads, kv_heads=kv_heads, head_size=head_size)
    for attn, docs, *sizes in LIMITED:
        for T, head_size in sizes:
            yield case(f"attention_{attn}_T{T}_d{head_size}{f'_docs{docs}' if docs else ''}", "attention", attn=attn,
                       scale=2, L=16 if attn.startswith("ssmax-pn") else 64, B=2, T=T, heads=2, kv_heads=1,
                       head_size=head_size, **(dict(docs=docs) if docs else {}))
    for N, weight_decay in (1, 0), (1000, 0.1):
        yield case(f"adamw_N{N}", "adamw", N=N, steps=5, lr=0.01, weight_decay=weight_decay)


def cases_text():
    lines = ["# The cases that models.safetensors and layers.safetensors answer; "
             "written by fixtures.py, see ../README.md."]
    return "\n".join(lines + [" ".join(f"{key}={value}" for key, value in case.items()) for case in cases()]) + "\n"


# ---- The answers

def model_config(case):
    shape = dict(pair.split("=") for pair in case["model"].split(","))
    block, tied, eps = shape.pop("block", "llama"), shape.pop("tied") == "1", float(shape.pop("norm_eps", 1e-5))
    words = {key: shape.pop(key, "none") for key in ("bias", "gate")}
    return reference.Config(**words, **{key: int(value) for key, value in shape.items()}, block=block, tied=tied,
                            norm_eps=eps, attn=case["attn"], L=int(case["L"]))


def batch(case, step, vocab):
    B, T = int(case["B"]), int(case["T"])
    window = indices("tokens", step * B * (T + 1), B * (T + 1), vocab).view(B, T + 1)
    return window[:, :-1], window[:, 1:]


def some_logits(logits):
    """(B, T, V) -> (B·T, 9): for each position, the logits of eight hashed ids, and logsumexp."""
    flat = logits.flatten(0, 1)
    ids = indices("logit_ids", 0, LOGITS * len(flat), flat.shape[1]).view(-1, LOGITS)
    return torch.cat([flat.gather(1, ids), torch.logsumexp(flat, -1, keepdim=True)], 1)


def run_model(case):
    config, steps = model_config(case), int(case["steps"])
    start = {name: parameter(name, shape) for name, shape in reference.parameter_shapes(config).items()}
    parameters = {name: p.clone() for name, p in start.items()}
    optimizer = reference.AdamW(parameters, float(case.get("weight_decay", 0)))
    losses, norms, answers = [], [], {}
    for step in range(max(1, steps)):
        logits, loss, grads = reference.gradients(parameters, *batch(case, step, config.vocab), config)
        if step == 0:
            answers["logits"] = some_logits(logits).numpy().astype(np.float32)
            answers.update({f"grad/{name}": stored(g) for name, g in grads.items()})
        losses.append(loss)
        norms.append(reference.global_norm(grads.values()))
        if steps:
            optimizer.step(grads, float(case["lr"]) * min(1, (step + 1) / 2), float(case["clip"]))
    answers["losses"], answers["grad_norms"] = np.float32(losses), np.float32(norms)
    if steps:
        answers.update({f"update/{name}": stored(p - start[name]) for name, p in parameters.items()})
    return answers


def backward(function, inputs, shape):
    """Output and input gradients, by name, for the upstream gradient `dout`."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = function(**inputs)
    grads = torch.autograd.grad(out, list(inputs.values()), values("dout", shape))
    return {"out": stored(out), **{"d" + name: stored(g) for name, g in zip(inputs, grads)}}


def run_rmsnorm(N, C, eps=1e-5):
    return backward(lambda x, weight: reference.rmsnorm(x, weight, eps),
                    {"x": values("x", (N, C), scale=2), "weight": values("weight", (C,), 1.0, 0.3)}, (N, C))


def run_rope(B, T, heads, head_size):
    shape = (B, T, heads, head_size)
    return backward(lambda x: reference.rope(x.transpose(1, 2)).transpose(1, 2), {"x": values("x", shape)}, shape)


def run_swiglu(N):
    return backward(reference.swiglu, {"gate": values("gate", (N,), scale=4), "up": values("up", (N,), scale=2)}, (N,))


def run_matmul(N, C, OC):
    return backward(lambda x, weight: x @ weight.T, {"x": values("x", (N, C)), "weight": parameter("weight", (OC, C))},
                    (N, OC))


def run_embedding(N, C, vocab):
    tokens = indices("tokens", 0, N, vocab)
    return backward(lambda weight: weight[tokens], {"weight": parameter("weight", (vocab, C))}, (N, C))


def run_crossentropy(N, vocab, scale, softcap, z_loss):
    logits, targets = values("logits", (N, vocab), scale=scale).requires_grad_(), indices("tokens", 0, N, vocab)
    y = reference.softcap(logits, softcap)
    loss = reference.cross_entropy(y, targets)
    minimized = loss + z_loss * reference.z_loss(y)
    return {"loss": stored(loss), "dlogits": stored(torch.autograd.grad(minimized, logits)[0])}


def run_attention(attn, scale, L, B, T, heads, head_size, kv_heads=None, docs=None):
    normalizer = reference.parse_normalizer(attn)
    first = (torch.arange(T) // docs * docs).expand(B, T) if docs else None
    shape, kv_shape = (B, T, heads, head_size), (B, T, kv_heads or heads, head_size)
    inputs = {"q": values("q", shape, scale=scale), "k": values("k", kv_shape, scale=scale),
              "v": values("v", kv_shape, scale=2)}
    inputs.update({name: parameter(name, size) for name, size in reference.scalar_shapes(normalizer, heads, L).items()})
    start = reference.scalars_at_start(normalizer, heads, L)

    def attention(q, k, v, **given):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scalars = {name: given.get(reference.SCALARS[name].tensor, x) for name, x in start.items()}
        return reference.attention(q, k, v, normalizer, L, scalars, first).transpose(1, 2)
    return backward(attention, inputs, shape)


def run_adamw(N, steps, lr, weight_decay):
    name = "param.weight"   # a parameter that decays
    param = {name: values("param", (N,))}
    optimizer = reference.AdamW(param, weight_decay)
    for step in range(steps):
        optimizer.step({name: values("grad", (N,), first=step * N)}, lr)
    return {"param": stored(param[name]), "exp_avg": stored(optimizer.exp_avg[name]),
            "exp_avg_sq": stored(optimizer.exp_avg_sq[name])}


def run_layer(case):
    number = lambda key, text: text if key == "attn" else float(text) if "." in text else int(text)
    keys = {key: number(key, text) for key, text in case.items() if key not in ("case", "kind")}
    return globals()["run_" + case["kind"]](**keys)


@functools.cache
def all_answers(wanted=None):
    """{file name: tensors} of the two files, for all cases or only for the wanted ones."""
    torch.set_num_threads(1)    # the operations are small: threads would cost more than they save
    files = {"models.safetensors": {}, "layers.safetensors": {}}
    for case in cases():
        if wanted is not None and case["case"] not in wanted:
            continue
        is_model = case["kind"] == "model"
        answers = run_model(case) if is_model else run_layer(case)
        file = files["models.safetensors" if is_model else "layers.safetensors"]
        file.update({f"{case['case']}/{name}": x for name, x in answers.items()})
    return files


def differences(folder, wanted=None):
    """Lists, a line each, what in the folder differs from the reference. Tensors must agree to 1e-6 of their norm.

    With `wanted`, only those cases are checked, but tensors of cases that do not exist are listed in any event."""
    left_out = set() if wanted is None else {case["case"] for case in cases()} - set(wanted)
    found = [] if (folder / "cases.txt").read_text() == cases_text() else ["cases.txt differs"]
    for name, tensors in all_answers(wanted and tuple(wanted)).items():
        kept = {key: x for key, x in load_file(folder / name).items() if key.split("/")[0] not in left_out}
        found += [f"{name}: {key} is on one side only" for key in sorted(kept.keys() ^ tensors.keys())]
        for key in kept.keys() & tensors.keys():
            if kept[key].shape != tensors[key].shape:
                found.append(f"{name}: {key} has shape {kept[key].shape}, expected {tensors[key].shape}")
            elif not np.linalg.norm(kept[key] - tensors[key]) <= 1e-6 * np.linalg.norm(tensors[key]) + 1e-9:
                found.append(f"{name}: {key} differs by {np.linalg.norm(kept[key] - tensors[key]):.3g}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the stored fixtures with fresh ones")
    arguments = parser.parse_args()
    if arguments.check:
        found = differences(FOLDER)
        print("\n".join(found) or "The stored fixtures match the reference.")
        sys.exit(bool(found))
    FOLDER.mkdir(exist_ok=True)
    for name, tensors in all_answers().items():
        save_file(tensors, FOLDER / name)
    (FOLDER / "cases.txt").write_text(cases_text())


if __name__ == "__main__":
    main()
