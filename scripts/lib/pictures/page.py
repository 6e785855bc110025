"""HTML pages that need no other file, and the page that shows any attention map."""
import base64
import io
import json
import math
from html import escape
from pathlib import Path

import numpy as np

from . import charts
from .attention import (DECADES, HEAD_KEYS, RESIDUAL_KEYS, bin_means, coarsen, encode, head_means, is_signed, load_map,
                        of_residual, palette, prompts, sheet, weights_by_distance)

FOLDER = Path(__file__).parent
CELLS = 24_000_000      # of all maps of a page together
NAMES = {"sum": "sum of a row", "unspent": "1 − sum", "entropy": "entropy, nats",
         "first_token": "share on the first token", "zeros": "share of zero weights",
         "log_z_slope": "slope of ln Z in ln n", "log_z_intercept": "ln Z at n = 1, by that line",
         "residual_kurtosis": "kurtosis after the layer", "residual_largest": "largest |x| after the layer"}


def page(title, body, focus=""):
    """A whole page. focus: the selector of the element that has the keyboard first."""
    script = f"<script>document.querySelector({focus!r}).focus({{preventScroll: true}})</script>" if focus else ""
    return ('<!DOCTYPE html>\n<html lang="en">\n'
            '<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>\n{(FOLDER / 'page.css').read_text('utf-8')}</style>\n"
            f"</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n{script}</body>\n</html>\n")


def table(head, rows, classes=None):
    """head: texts; rows: lists of texts, which are escaped; classes: {(row, column): class}."""
    classes = classes or {}

    def cell(tag, text, name):
        return f'<{tag}{f" class={name!r}" if name else ""}>{escape(str(text))}</{tag}>'
    top = "".join(cell("th", text, classes.get((-1, j))) for j, text in enumerate(head))
    cells = ["".join(cell("td", text, classes.get((i, j))) for j, text in enumerate(row)) for i, row in enumerate(rows)]
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def hex_color(color):
    return "#" + "".join(f"{round(255 * part):02x}" for part in color[:3])


def legend(entries):
    """entries: [(label, color, dash)]"""
    def swatch(color, dash):
        dashes = "" if dash == "-" else f' stroke-dasharray="{" ".join(str(2.5 * x) for x in dash[1])}"'
        path = f'<path d="M0 5H32" stroke="{hex_color(color)}" stroke-width="4"{dashes}/>'
        return f'<svg viewBox="0 0 32 10" aria-hidden="true">{path}</svg>'
    items = "".join(f"<li>{swatch(color, dash)}{escape(label)}</li>" for label, color, dash in entries)
    return f'<ul class="legend">{items}</ul>\n' if entries else ""


def panels(found, identity, least=25):
    """Panels side by side, as SVG, each at least `least` rem wide."""
    drawn = "".join(f"<figure><h3>{escape(panel.title.strip())}</h3>\n{charts.svg(panel, f'{identity}-{i}')}</figure>\n"
                    for i, panel in enumerate(found))
    return f'<div class="panels" style="--least: {least}rem">\n{drawn}</div>\n'


# ---------------------------------------------------------------- the attention page


def plain(x):
    """Lists of numbers with six digits, for JSON; None where not finite."""
    if isinstance(x, (list, np.ndarray)):
        return [plain(value) for value in x]
    return float(f"{x:.6g}") if math.isfinite(x) else None


def png(image):
    """An array (height, width) or (height, width, 4) of bytes as a PNG in base64."""
    from PIL import Image
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def statistics(rows):
    if not rows:
        return None
    return ({key: plain(head_means(rows, key).round(6)) for key in HEAD_KEYS}
            | {key: plain(of_residual(rows, key)) for key in RESIDUAL_KEYS})


def largest_side(series):
    """The cells per side that keep all maps within CELLS."""
    heads = sum(len(s.rows[0]["layers"]) * len(s.rows[0]["layers"][0]["heads"]) for s in series)
    return max(64, math.isqrt(CELLS // heads))


def of_series(s, most):
    """What the page has of one series."""
    rows, first = prompts(s, False), next(row for row in s.rows if "prompt" in row)
    layers, heads = len(first["layers"]), len(first["layers"][0]["heads"])
    out = {"label": s.label, "layers": layers, "heads": heads, "T": int(first["tokens"]), "cell": 1, "side": 1,
           "signed": False, "maps": None, "tokens": first.get("token_texts"),
           "first": statistics(rows[:1]), "mean": statistics(rows), "with_end": statistics(prompts(s, True)),
           "entropy_by_n": plain(bin_means(rows, "entropy_by_n")),
           "weight_by_distance": plain(weights_by_distance(rows))}
    found = load_map(s, first)
    if not found:
        return out
    array, cell, T = found
    signed = is_signed(array)
    drawn, tops = [], []
    for layer in array:
        coarse = [coarsen(head, cell, T, most) for head in layer]
        coded = [encode(values, signed) for values, _ in coarse]
        drawn.append([png(codes) for codes, _ in coded])
        tops.append([plain(top) for _, top in coded])
    return out | {"cell": coarse[0][1], "side": len(coded[0][0]), "signed": signed, "maps": drawn, "tops": tops,
                  "sheet": png(sheet(array, cell, T, 40, 0))}


def attention(series, identity="attention"):
    """The part of a page that shows these series."""
    most = largest_side(series)
    data = {"series": [of_series(s, most) for s in series], "decades": DECADES,
            "palettes": {name: "".join(hex_color(color / 255)[1:] for color in palette(signed))
                         for name, signed in (("plain", False), ("signed", True))},
            "statistics": [(key, NAMES[key]) for key in HEAD_KEYS],
            "residual": [(key, NAMES[key]) for key in RESIDUAL_KEYS]}
    models = "".join(f'<option value="{i}">{escape(s.label)}</option>' for i, s in enumerate(series))
    model = f'<label>Model <select class="series">{models}</select></label>' if len(series) > 1 else ""
    shown = [("map", "maps"), *((key, NAMES[key]) for key in HEAD_KEYS[:-1])]
    statistic = "".join(f'<option value="{key}">{name}</option>'
                        for key, name in shown if key != "map" or any(s["maps"] for s in data["series"]))
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")     # no tags in the page
    return f"""<noscript><p>The maps need JavaScript.</p></noscript>
<div class="attention" id="{identity}" tabindex="0" hidden>
<div class="controls">{model}
<label>Layer <select class="layers"></select></label> <label>Head <select class="heads"></select></label>
<label>Color <select class="color"><option>logarithmic</option><option class="linear">linear</option></select></label>\
</div>
<p class="muted">Arrow keys: up and down change the layer, left and right the head. Or click one below.</p>
<div class="columns">
<figure><h3 class="name"></h3>
<div class="map"><div class="ticks down"></div><canvas class="canvas" role="img"></canvas><div class="ticks wide"></div>
<p class="reading wide"></p>
<div class="scale wide"><span class="least"></span><canvas class="bar" aria-hidden="true"></canvas>\
<span class="most"></span></div></div>
<figcaption>Down: queries; across: keys. <span class="cells"></span></figcaption></figure>
<div><div class="scroll"><table><thead>\
<tr><th>head</th><th>first prompt</th><th>all prompts</th><th>with end-of-text</th></tr></thead>
<tbody class="numbers"></tbody></table></div>
<label>Overview: <select class="statistic">{statistic}</select></label>
<div class="overview"></div><p class="muted extent"></p></div>
</div>
<div class="charts"><figure><h3>Entropy by n</h3><div class="entropy"></div>\
<figcaption>dashed: ln n, all keys alike</figcaption></figure>
<figure><h3>Weight by distance</h3><div class="distance"></div>\
<figcaption>in ranges that double</figcaption></figure></div>
</div>
<script type="application/json" id="{identity}-data">{text}</script>
<script>
{(FOLDER / 'attention.js').read_text("utf-8")}
attentionPage(document.getElementById("{identity}"), \
JSON.parse(document.getElementById("{identity}-data").textContent));
</script>
"""


def attention_page(series, title):
    count = len(prompts(series[0], False))
    about = (f"<p>The weights of the first of {count} prompt{'s' * (count != 1)}, without a leading end-of-text token. "
             "The numbers are means over rows: the first prompt's, of all prompts, and of all prompts with a leading "
             "end-of-text token.</p>\n")
    return page(f"Attention: {title}", about + attention(series), "#attention")
