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


@pytest.fixture(scope="module")
def model_of(request, data, tmp_path_factory):
    """A function that returns models for the module's data and its length L: see eval_models.models()."""
    import eval_models
    return eval_models.models(tmp_path_factory.mktemp("models"), data, request.module.L)
