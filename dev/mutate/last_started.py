"""A plugin of pytest: the file $LAST_STARTED has the id of the latest test case that was started, even if it ended the
process."""
import os
from pathlib import Path


def pytest_runtest_logstart(nodeid):
    Path(os.environ["LAST_STARTED"]).write_text(nodeid)
