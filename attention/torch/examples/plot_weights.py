"""Plots the attention weights that every normalizer computes from your own q and k.

    python plot_weights.py QK.pt OUT.png [--row 63]

QK.pt: torch.save({"q": q, "k": k}), each (heads, T, d) or (T, d), after RoPE; of several heads, the first is drawn.
Without QK.pt, q and k are random. With v = identity, attention's output is its weights. Needs
matplotlib."""
import argparse
import math
import os
from pathlib import Path

import torch

from attn_c import PRESETS, attention

os.environ["MPLBACKEND"], os.environ["MATPLOTLIBRC"] = "Agg", os.devnull     # whatever a notebook or the user has set
import matplotlib.pyplot as plt     # noqa: E402
from matplotlib.backend_bases import FigureCanvasBase     # noqa: E402

plt.rcdefaults()        # whatever a matplotlibrc in the current folder says


def weights(q, k, normalizer):
    """(T, T): the weights of q, k (T, d)."""
    T = len(q)
    q, k, v = (x[None, None].float() for x in (q, k, torch.eye(T)))
    return attention(q, k, v, normalizer, seq_len=T)[0, 0]


def draw(q, k, row, path):
    columns = 6
    figure, axes = plt.subplots(math.ceil(len(PRESETS) / columns), columns, figsize=(16, 14), sharex=True)
    for axis, name in zip(axes.flat, PRESETS):
        values = weights(q, k, name)[row, :row + 1]
        axis.bar(range(len(values)), values, color=["C3" if x < 0 else "C0" for x in values])
        axis.set_title(name, fontsize=9)
    for axis in axes.flat[len(PRESETS):]:
        axis.axis("off")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=80)
    except OSError as error:
        raise SystemExit(f"{path}: expected a picture that can be written: {error.strerror}")


def check_format(path):
    """Without an ending, matplotlib writes a PNG."""
    formats, ending = FigureCanvasBase.get_supported_filetypes(), path.suffix[1:]
    if ending and ending.lower() not in formats:
        raise SystemExit(f"{path}: .{ending} is not a format of pictures. Expected one of "
                         f".{', .'.join(sorted(formats))}")


def read(path):
    """q and k of a file, each (T, d)."""
    try:
        given = torch.load(path)
    except Exception as error:      # of several kinds, for files that torch.save() has not written
        raise SystemExit(f"{path}: expected a file of torch.save({{'q': q, 'k': k}}): "
                         f"{str(error).partition(chr(10))[0] or type(error).__name__}")
    found = [given.get(name) for name in "qk"] if isinstance(given, dict) else []
    if not found or any(not isinstance(x, torch.Tensor) or x.ndim < 2 or not x.numel() for x in found):
        raise SystemExit(f"{path}: expected {{'q': q, 'k': k}} with tensors (heads, T, d) or (T, d) that are not empty")
    for name, x in zip("qk", found):
        if not x.float().isfinite().all():
            raise SystemExit(f"{path}: expected finite numbers, found NaN or infinity in {name}")
    return [x.flatten(0, -3)[0] if x.ndim > 2 else x for x in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qk", type=Path, nargs="?", help="a file of torch.save({'q': q, 'k': k}); default: random q, k")
    parser.add_argument("out", type=Path, help="the picture, such as x.png or x.pdf")
    parser.add_argument("--row", type=int, help="the query whose weights are drawn; default: the last one")
    options = parser.parse_args()
    check_format(options.out)
    torch.manual_seed(0)
    q, k = read(options.qk) if options.qk else (torch.randn(64, 32), torch.randn(64, 32))
    if q.shape != k.shape:
        raise SystemExit(f"{options.qk}: expected q and k of one shape, found {tuple(q.shape)} and {tuple(k.shape)}")
    row = len(q) - 1 if options.row is None else options.row
    if not 0 <= row < len(q):
        raise SystemExit(f"--row: expected a query from 0 to {len(q) - 1}, found {row}")
    draw(q, k, row, options.out)


if __name__ == "__main__":
    main()
