"""matplotlib with its own defaults and without a display. Every script that draws imports this before matplotlib, so
that its pictures depend neither on MPLBACKEND, which notebooks set, nor on a matplotlibrc. That of the current folder
comes before all others, so the import happens in another one."""
import os
from pathlib import Path

os.environ["MPLBACKEND"], os.environ["MATPLOTLIBRC"] = "Agg", os.devnull
current = os.open(".", os.O_PATH)
try:
    os.chdir(Path(__file__).parent)
    import matplotlib.pyplot  # noqa: F401
finally:
    os.fchdir(current)
    os.close(current)
