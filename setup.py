"""Builds the PyTorch package attn_c (doc/pytorch.md) with the Makefile: pyproject.toml has everything else.

    pip install .
    TORCH_CUDA=0 pip install .      without the library for GPUs, which is otherwise built where `make help` finds the
                                    CUDA Toolkit and cuBLASLt, even for a PyTorch that cannot use it: 141 MB, 8 minutes
                                    on two cores"""
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def version():
    return re.search(r'ATTN_C_VERSION "(.*)"', (ROOT / "runtime/version.h").read_text())[1]


def finds_cuda():
    """Does the Makefile find what it needs for the library for GPUs?"""
    lacking = subprocess.run(["make", "-s", "lacking"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return not {"toolkit", "cublas"} & set(lacking.split())


class Make(build_py):
    """`make` puts Python's files and the libraries into the package."""

    def run(self):
        if self.editable_mode:      # setuptools takes an Exception for a warning
            raise SystemExit("attn_c: expected `pip install .`, found an editable installation, which would lack the "
                             "libraries; to edit the package, run `make attn_c` and set PYTHONPATH=build/python")
        package = Path(self.build_lib).absolute() / "attn_c"
        shutil.rmtree(package, ignore_errors=True)
        environment = {"TORCH_CUDA": str(int(finds_cuda())), **os.environ}
        relative = os.path.relpath(package, ROOT)       # make has no targets with spaces, which ROOT may have
        subprocess.run(["make", f"-j{os.cpu_count()}", "attn_c", f"PACKAGE={relative}"], cwd=ROOT, env=environment,
                       check=True)


class Wheel(bdist_wheel):
    """For any Python 3 on this platform: the libraries use neither Python's C interface nor PyTorch's."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Native(Distribution):
    def has_ext_modules(self):
        return True


setup(version=version(), cmdclass={"build_py": Make, "bdist_wheel": Wheel}, distclass=Native)
