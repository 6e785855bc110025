"""Fixtures of several test modules."""
import functools
import sys

import pytest

from trainer import ROOT, cuda_program, faults_program, make, make_data


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory):
    """A function that makes a folder with a function of its path, such as make_data(), once for the session."""
    @functools.cache
    def folder(write):
        path = tmp_path_factory.mktemp("data") / "data"
        write(path)
        return path
    return folder


@pytest.fixture(scope="module")
def data(request, shared_data):
    """A folder with shards for training and validation, which tests must not change. A module that needs other shards
    than those of make_data() names the function that writes them DATA."""
    return shared_data(getattr(request.module, "DATA", make_data))


@pytest.fixture(scope="session")
def cuda():
    return cuda_program()


@pytest.fixture(scope="session")
def faults():
    return faults_program()


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="module")
def model_of(request, data, tmp_path_factory):
    """A function that returns models for the module's data and its length L: see eval_models.models()."""
    import eval_models
    return eval_models.models(tmp_path_factory.mktemp("models"), data, request.module.L)


@pytest.fixture(scope="session")
def attn_c():
    """The PyTorch package, as `make attn_c` leaves it in build/python."""
    make("-s", "-j2", "attn_c", check=True)
    sys.path.insert(0, str(ROOT / "build/python"))
    import attn_c
    # transformers keeps a modeling file that was imported without the package.
    for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
        del sys.modules[name]
    return attn_c
