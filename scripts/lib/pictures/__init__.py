"""The pictures and pages of evaluations, runs and grids.

    results.py      reads eval.json as series, one for each model and normalizer, and labels them
    tasks.py        the panels of loss, positions, needle, scores and choice
    attention.py    the panels and maps of attention
    runs.py         the panels of training runs
    grids.py        the pictures of a grid's report
    charts.py       panels, axes and colors; panels become a figure (PNG) or an SVG of a page
    page.py         HTML: tables, legends, and the page of attention maps, with page.css and attention.js
"""
import sys
from pathlib import Path

try:
    from lib import canvas  # noqa: F401
    import numpy  # noqa: F401
except ImportError as error:
    sys.exit(f"{Path(sys.argv[0]).name}: {error}. To install what pictures need: pip install -r requirements.txt")
