"""The Dockerfile's commands are those of the README. CONTAINER_LONG=1 runs them in a new Debian, which debootstrap
makes; it needs root and a network, and takes about half an hour on two cores."""
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer import ROOT

LINES = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
COMMANDS = [text for word, text in LINES if word == "RUN"]


def test_the_commands_are_those_of_the_readme():
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert COMMANDS and [text for text in COMMANDS if f"`{text}`" not in readme and f" {text} " not in readme] == []


@pytest.mark.skipif(not os.environ.get("CONTAINER_LONG"), reason="half an hour; CONTAINER_LONG=1 runs it")
@pytest.mark.skipif(os.geteuid() or not shutil.which("debootstrap"), reason="needs root and debootstrap")
def test_the_commands_in_a_new_debian(tmp_path):
    """With kernels for one GPU and two normalizers, because all of them take as long again."""
    suite = dict(LINES)["FROM"].removeprefix("debian:")
    root = tmp_path / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", suite, root], check=True, stdout=subprocess.DEVNULL)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    (root / "attn.c").mkdir()
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", root / "attn.c"], cwd=ROOT, input=files, check=True)
    # this machine's network, its package index, and the certificates that it trusts
    settings = [text for word, text in LINES if word == "ENV"]
    settings += ["GPUS=90", "INSTANCES=exp float", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    for path in map(Path, ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")):
        if path.exists():
            shutil.copy(path, root / ("root" if path.suffix == ".crt" else "etc"))
            settings += ["PIP_CERT=/root/ca-certificates.crt"] * (path.suffix == ".crt")

    def run(command):
        inside = shlex.join(["env", "-i", *settings, "sh", "-c", f"cd /attn.c && {command}"])
        done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c",
                               f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && "
                               f"exec chroot {root} {inside}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        print(command, done.stdout[-3000:], sep="\n")
        return done

    for command in COMMANDS:
        assert run(command).returncode == 0
    help = run("make help").stdout
    assert all(re.search(f"yes {name}", help) for name in ("MPI", "CUDA Toolkit", "cuBLASLt", "NCCL"))
    assert run("scripts/launch.sh 2 ./train_gpt2cu --version").returncode == 0
