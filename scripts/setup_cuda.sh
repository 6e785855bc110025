#!/usr/bin/env bash
# Downloads what this machine lacks to build the CUDA programs, from PyPI's wheels into the folder .cuda, without root:
# nvcc with its headers and runtime, cuBLASLt, NCCL (for several GPUs). The Makefile finds them there.
#
#   scripts/setup_cuda.sh
#
# An installed CUDA Toolkit is used: if it has nvcc, only the libraries that it lacks are downloaded. cuBLASLt takes
# 0.6 GB on disk, NCCL 0.2 GB, nvcc 0.3 GB. It is safe to rerun: what is already there is skipped, and that takes a
# second. The programs then need a driver for CUDA 13: 580 or newer. With an older driver, install a Toolkit of CUDA 12
# first; this script adds what it lacks.
#
# Example: scripts/setup_cuda.sh
# See doc/gpu.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

say() { echo "setup_cuda: $*"; }
stop() { echo "setup_cuda: $*" >&2; exit 1; }

[ $# = 0 ] || { echo "setup_cuda: $1: this script takes no flags" >&2; exit 2; }

# One row per need, as `make lacking` names it | what it is | its wheels, of CUDA 13.0 or, for a Toolkit of CUDA 12, 12.8
wheels() {
    cat <<'TABLE'
toolkit | nvcc and the CUDA runtime | nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-nvtx==13.0.85
cublas  | cuBLASLt                  | nvidia-cublas==13.1.0.3
nccl    | NCCL                      | nvidia-nccl-cu13==2.28.9
cublas12 | cuBLASLt for CUDA 12     | nvidia-cublas-cu12==12.8.4.1
nccl12  | NCCL for CUDA 12          | nvidia-nccl-cu12==2.28.9
TABLE
}

# Prefers pip of the environment that scripts/setup.sh created.
find_pip() {
    local python
    for python in .venv/bin/python python3; do
        if "$python" -m pip --version >/dev/null 2>&1; then echo "$python"; return; fi
    done
    stop "pip is missing: run scripts/setup.sh first, or install python3-pip"
}

# Moves a complete download into place. If this is interrupted, the next call finishes it.
install() {
    cp -a --link --force .cuda/complete/. .cuda/
    rm -rf .cuda/complete
}

# Downloads into a separate folder first, whose name says when it is complete. `folder` is 12 for CUDA 12.
fetch() {
    local what=$1 packages=$2 folder=$3 python
    python=$(find_pip)
    say "downloading $what"
    rm -rf .cuda/new
    # shellcheck disable=SC2086
    "$python" -m pip install -q --disable-pip-version-check --no-user --prefix= --root=/ --no-deps --only-binary :all: \
        --target "$PWD/.cuda/new/$folder" $packages ||
        stop "pip could not download $packages (its message is above).
  The network or the package index may be down. Rerun this script to continue."
    mv .cuda/new .cuda/complete
    install
}

free_kb() { df --output=avail -k . | tail -1; }

[ ! -d .cuda/complete ] || install
for name in $(make -s lacking); do
    IFS='|' read -r _ what packages < <(wheels | grep "^$name ")
    [ "$(free_kb)" -ge 1500000 ] ||
        stop "$(($(free_kb) / 1000)) MB are free, but $(xargs <<<"$what") needs up to 1,500 MB while it is unpacked"
    fetch "$(xargs <<<"$what")" "$packages" "${name//[a-z]/}"
done
still=$(make -s lacking)
[ -z "$still" ] || stop "downloaded, but the Makefile does not find $(xargs <<<"$still")"
