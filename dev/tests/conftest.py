"""Fixtures of several test modules."""
import pytest

from trainer import make_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with shards to train and to validate on. Modules with other needs have a fixture of this name."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder
