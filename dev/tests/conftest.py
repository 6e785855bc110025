"""Fixtures of several test modules."""
import pytest

from trainer import make_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with shards for training and validation. Modules with other needs define their own fixture with this
    name."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder
