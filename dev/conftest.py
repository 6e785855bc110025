"""Orders the files, and selects the cases that CI runs of tests that have many.

@pytest.mark.drawn(N): with DRAW=COMMIT in the environment, as scripts/test.sh sets it, only N of a test's cases run,
drawn by that commit (dev/draw.py). Without it all of them run, and so does `scripts/test.sh --all`.
@pytest.mark.drawn(N, of="NAME") draws N from the cases of all tests that have this name in their mark.
DRAW_ONE_IN=N draws one in N of all tests.

In the end, the command that repeats it is printed for each failed test.
"""
import gc
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "reference")]
sys.path.append(str(FOLDER.parent / "attention"))      # last, because it has a folder named torch
import draw

# What the programs that tests start inherit. In a shell's background job SIGINT is ignored, and under nohup SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(name, signal.SIG_DFL)
os.umask(0o022)
os.environ["LC_ALL"] = "C.UTF-8"
os.environ["HF_HUB_OFFLINE"] = "1"      # no test contacts a hub
os.environ.setdefault("PATH", os.defpath)
os.environ.pop("COLUMNS", None)

# The files that take longest. They come first, so that none of them keeps one process of `pytest -n` busy after the
# others.
LONGEST = ["test_smollm2", "test_cuda", "test_machines", "test_cuda_build", "test_flash", "test_torch_models",
           "test_combinations", "test_gpu_check", "test_torch", "test_restart", "test_readme",
           "test_cuda_on_cpu", "test_data", "test_tokenizer", "test_vocabularies", "test_normalizers",
           "test_eval_cuda", "test_soak", "test_environment", "test_eval", "test_reference",
           "test_hopper_on_cpu", "test_grid", "test_to_gguf", "test_descriptors"]


def pytest_configure(config):
    config.addinivalue_line("markers", "drawn(n, of=None): CI runs n of the cases, drawn by commit")
    gc.disable()        # while modules are imported


def pytest_collection_finish():
    """The garbage collector need not look at the imported modules again: they stay until the end."""
    gc.freeze()
    gc.enable()


def pytest_report_header():
    return f"cases drawn by {draw.commit()}" if os.environ.get("DRAW") else "all cases, none drawn"


def draw_of(item):
    """What an item is drawn from, and how many of it run."""
    mark = item.get_closest_marker("drawn")
    if not mark:
        return item, 1
    return mark.kwargs.get("of", item.function), mark.args[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    if not os.environ.get("DRAW"):
        return
    groups = {}
    for item in items:
        groups.setdefault(draw_of(item), []).append(item)
    kept = [item for (_, count), cases in groups.items() for item in draw.sample(cases, count)]
    share = int(os.environ.get("DRAW_ONE_IN", 1))
    if share > 1:
        kept = draw.sample(kept, len(kept) // share)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_terminal_summary(terminalreporter):
    words = [f"{name}={shlex.quote(os.environ[name])}" for name in draw.VARIABLES
             if name in os.environ and name != "DRAW_ONE_IN"]
    command = " ".join([*words, ".venv/bin/python -m pytest"])
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    for test in dict.fromkeys(report.nodeid for report in reports):
        terminalreporter.write_line(f"to repeat: {command} {shlex.quote(test)}")
