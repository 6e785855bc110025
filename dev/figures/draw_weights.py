"""Draws the weights of each normalizer on the same row of scores into doc/img/weights.

Writes NAME.png for each normalizer, all.png with all of them, families.png with README's six, scores.png with the
scores, and weights.csv with the numbers. attention/presets.md shows them.

    .venv/bin/python dev/figures/draw_weights.py          # draws them
    .venv/bin/python dev/figures/draw_weights.py --check  # compares with the stored ones; exit status 1 if they differ

The row is the last of n = T = L = 64 keys, head size d = 64. Its scores q · k_j, over sqrt(d), are a hump around j =
20, a dip around 38, a peak of 3 at 48, and noise; |q| = |k_j| = sqrt(d), which determines the cosines under qk=l2. A
comes from dev/reference/model.py (PyTorch, float64), with the identity as v and the learned scalars at their initial
values.
"""
import csv
import io
import math
import sys
from pathlib import Path

import numpy as np
import torch


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/reference"), str(ROOT / "scripts")]
import model as reference  # noqa: E402
from lib import command_line, files  # noqa: E402

FOLDER = ROOT / "doc/img/weights"
N = D = 64
SIZE, DPI = (2.2, 1.1), 100     # inches, so 220 x 110 pixels
POSITIVE, NEGATIVE, TEXT = "#3b7fc4", "#d9566a", "#7a828a"   # for light and for dark pages
FAMILIES = ("softmax", "ssmax", "softmax1", "sigmoid", "relu2-L", "lssar")      # README's
TOLERANCE = 1e-6                # of a stored number, relative to its row's largest


def scores():
    """z_j = q · k_j / sqrt(d), j = 0..n-1."""
    j = np.arange(N)
    bumps = 2.5 * np.exp(-((j - 20) / 6) ** 2) - 2 * np.exp(-((j - 38) / 4) ** 2)
    # RandomState's stream is the same in every version.
    z = bumps - 0.3 + 0.3 * np.random.RandomState(1).standard_normal(N)
    z[48] = 3
    return z


def weights(name):
    """A_j of the last row. q lies on one axis, and k_j in a plane with it, at the angle that gives q · k_j."""
    normalizer = reference.parse_normalizer(name)
    cosine = torch.from_numpy(scores()) / D**0.5
    q, k = (torch.zeros(N, D, dtype=torch.float64) for _ in "qk")
    v = torch.eye(N, dtype=torch.float64)
    q[:, 0] = D**0.5
    k[:, 0], k[:, 1] = D**0.5 * cosine, D**0.5 * torch.sqrt(1 - cosine**2)
    scalars = reference.scalars_at_start(normalizer, 1, N)
    return reference.attention(*(x[None, None] for x in (q, k, v)), normalizer, N, scalars)[0, 0, -1].numpy()


def compute():
    """{"scores": z, NAME: A, ...}"""
    return {"scores": scores(), **{name: weights(name) for name in reference.PRESETS}}


# ---------------------------------------------------------------- plots

def draw(axes, name, values):
    """Bars over j, one color above 0 and one below. Each picture has its own scale, so its text has the numbers."""
    j = np.arange(N)
    for sign, color in (values >= 0, POSITIVE), (values < 0, NEGATIVE):
        axes.bar(j[sign], values[sign], width=0.85, color=color, linewidth=0)
    axes.axhline(0, color="0.5", linewidth=0.5)
    largest = values[np.abs(values).argmax()]
    below, above = values.min(), values.max()
    axes.set(xlim=(-1, N), ylim=(min(below * 1.08, 0), above * 1.08 if above > 0 else -0.08 * below), xticks=(),
             yticks=())
    axes.spines[:].set_visible(False)
    rounded = round(values.sum(), 9) + 0.0      # no 1e-17 and no -0
    text = f"from {below:.2f} to {above:.2f}" if name == "scores" else f"sum {rounded:.3g}, largest {largest:.3g}"
    axes.annotate(name, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=6.5,
                  weight="bold", color=TEXT)
    axes.annotate(text, (0, 1), (0, 1.5), xycoords="axes fraction", textcoords="offset points", fontsize=5.5,
                  color=TEXT)


def draw_figure(name, found, columns, **margins):
    """Draws some rows of weights into NAME.png."""
    from lib import canvas  # noqa: F401
    import matplotlib.pyplot as plt
    rows = -(-len(found) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(SIZE[0] * columns, SIZE[1] * rows), squeeze=False)
    figure.subplots_adjust(**margins)
    for axes in grid.flat[len(found):]:
        axes.set_axis_off()
    for axes, (label, values) in zip(grid.flat, found.items()):
        draw(axes, label, values)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, transparent=True, metadata={"Software": None},
                   pil_kwargs={"optimize": True})
    files.replace(FOLDER / f"{name}.png", file.getvalue())
    plt.close(figure)


def draw_all(found):
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in found:
        draw_figure(name, {name: found[name]}, 1, left=0.02, bottom=0.03, right=0.98, top=0.79)
    several = {"left": 0.005, "bottom": 0.005, "right": 0.995, "wspace": 0.04, "hspace": 0.35}
    draw_figure("all", found, 4, top=1 - 0.24 / math.ceil(len(found) / 4), **several)
    draw_figure("families", {name: found[name] for name in FAMILIES}, 3, top=0.88, **several)


# ---------------------------------------------------------------- numbers

def write(found):
    with files.create(FOLDER / "weights.csv", "w") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["j", *found])
        rows.writerows([j, *(f"{values[j]:.8g}" for values in found.values())] for j in range(N))


def differences(found):
    """The stored numbers and pictures that are missing or differ from what would be made now."""
    names, *rows = csv.reader(files.read(FOLDER / "weights.csv", files.JSON).decode().splitlines())
    stored = dict(zip(names[1:], np.array(rows, float).T[1:]))

    def current(name):
        return (name in stored and name in found
                and np.abs(stored[name] - found[name]).max() <= TOLERANCE * np.abs(found[name]).max())
    return ([f"{name} in weights.csv" for name in stored | found if not current(name)]
            + [f"{name}.png" for name in (*found, "all", "families") if not (FOLDER / f"{name}.png").exists()])


def main():
    files.print_escapes()
    parser = command_line.parser(__doc__, "doc/normalizers.md")
    parser.add_argument("--check", action="store_true",
                        help="compare with the stored pictures and numbers; exit status 1 if they differ")
    options = parser.parse_args()
    found = compute()
    if not options.check:
        draw_all(found)
        write(found)
        print(f"{FOLDER}: {len(found)} pictures, all.png, weights.csv")
        return 0
    if wrong := differences(found):
        print(f"Missing or outdated: {', '.join(wrong)}. Run dev/figures/draw_weights.py.")
        return 1
    print("the stored weights are current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
