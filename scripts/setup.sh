#!/usr/bin/env bash
# Installs what the build and the scripts need: Debian packages and the virtual environment .venv.
#
#   scripts/setup.sh           what training, sampling and plotting need
#   scripts/setup.sh --test    also what the tests need: PyTorch, transformers, clang and, for root on a machine without
#                              systemd, an SSH server, which is not started
#
# It says what it installs and why. It is safe to rerun: what is already installed is skipped, and that takes a second.
# Packages are installed if there is apt and the user is root or may use sudo; otherwise missing packages are listed.
# Missing optional packages do not stop the setup.
#
# Example: scripts/setup.sh --test
# See dev/notes/tests.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."
export PATH       # under env -i, bash sets it without exporting it

tests=0
case "${1:-}" in
    "") ;;
    --test) tests=1 ;;
    *) echo "setup: $1: unknown flag; the only one is --test" >&2; exit 2 ;;
esac

# Python and pip set up .venv only, whatever the user's settings name: other modules, another Python, another folder.
unset "${!PYTHON@}"
pip_install() {
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-user --target= --prefix="$PWD/.venv" --root=/ "$@"
}

say() { echo "setup: $*"; }
stop() { echo "setup: $*" >&2; exit 1; }

# ---------------------------------------------------------------- Debian packages

header() { echo "#include <$1>" | gcc -fsyntax-only -x c - 2>/dev/null; }
clang_header() { echo "#include <$1>" | clang -fsyntax-only -x c - 2>/dev/null; }

# Without recommended packages, clang lacks the libraries of its sanitizers.
has_fuzzer() {
    echo 'int LLVMFuzzerTestOneInput(const char *data, unsigned long size) { return data && size > 9; }' |
        clang -fsanitize=fuzzer,address -x c -o /dev/null - 2>/dev/null
}

# One row per need: Debian packages | how to check for them | what they are for; empty: required
needs() {
    cat <<'TABLE'
gcc libc6-dev             | header stdio.h          |
make                      | command -v make         |
libcjson-dev              | header cjson/cJSON.h    |
libxxhash-dev             | header xxhash.h         |
python3 python3-venv      | python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' |
libdnnl-dev               | header dnnl.h           | oneDNN's matmuls: a CBLAS or plain loops replace them, more slowly
libopenblas-dev           | header cblas.h          | OpenBLAS: needed only without oneDNN
libopenmpi-dev            | command -v mpicc        | training with several ranks
openmpi-bin               | command -v mpirun       | training with several ranks
g++                       | command -v g++          | train_gpt2cu and eval_gpt2cu
libsodium-dev             | header sodium.h         | heartbeats between machines (--rank-timeout)
git                       | command -v git          | the commit in run.json
TABLE
    if [ $tests = 1 ]; then
        cat <<'TABLE'
clang libclang-rt-dev     | has_fuzzer              | the fuzzer's tests
clang libomp-dev          | clang_header omp.h      | the build with clang
TABLE
        # These are for network namespaces, which only root may create. With systemd, sshd would start at every boot, so
        # there you have to install it yourself.
        if [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ]; then
            cat <<'TABLE'
openssh-server openssh-client | command -v sshd && command -v ssh | the tests with two machines: network namespaces, each with an SSH server that ends with its test. Nothing starts one now
iproute2                  | command -v ip           | the tests with two machines
TABLE
        fi
    fi
}

# Prints the rows of needs() that are missing.
missing() {
    needs | while IFS='|' read -r packages check cost; do
        eval "$check" >/dev/null 2>&1 </dev/null || echo "$packages|$cost"
    done
}

# Runs a command as root: directly, or with sudo, which may ask for a password only if somebody can type it.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif [ -t 0 ]; then sudo "$@"; else sudo -n "$@"; fi
}

# In a subshell, whose trap also acts after Ctrl-C.
apt_install() (
    policy=/usr/sbin/policy-rc.d
    # This is how Debian installs a server (sshd) without starting it.
    if [ ! -e $policy ]; then
        trap 'as_root rm -f $policy' EXIT
        as_root sh -c "printf '#!/bin/sh\nexit 101\n' > $policy && chmod 755 $policy" || true
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
        install -y --no-install-recommends "$@" >/dev/null </dev/null
)

debian_packages() {
    local lacking packages row cost
    lacking=$(missing)
    [ -n "$lacking" ] || return 0
    packages=$(cut -d'|' -f1 <<<"$lacking" | xargs)
    if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null; }; then
        say "installing Debian packages:"
        while IFS='|' read -r row cost; do echo "  $(xargs <<<"$row"):${cost:- the build}"; done <<<"$lacking"
        as_root apt-get -qq update </dev/null || say "apt-get update failed; continuing with the existing package lists"
        # A name that this release lacks must not prevent the others.
        apt_install $packages || for package in $packages; do apt_install "$package" || say "apt-get cannot install $package"; done
        lacking=$(missing)
    else
        say "cannot install Debian packages: there is no apt-get, or neither root nor sudo"
    fi
    required=
    while IFS='|' read -r packages cost; do
        packages=$(xargs <<<"$packages")
        if [ -z "$packages" ]; then continue
        elif [ -n "${cost// }" ]; then say "without $packages:$cost"
        else required="$required $packages"; fi
    done <<<"$lacking"
    [ -z "$required" ] || stop "the build needs these packages, which are missing:$required
  These are Debian's names (python3 must be 3.10 or newer). Install them and rerun this script:
  apt-get install$required"
}

# ---------------------------------------------------------------- .venv

stamp() { { .venv/bin/python -V && cat "$1"; } | sha256sum; }

# Uses PyTorch's CPU build if pip finds one; PyPI's comes with the CUDA libraries.
torch_room() {
    local torch free
    torch=$(grep -om1 '^torch==[0-9.]*' requirements-test.txt)
    if .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" \
        2>/dev/null; then return; fi
    if pip_install --dry-run --no-deps "$torch+cpu" >/dev/null 2>&1; then
        say "$torch: pip found its CPU build"
        return
    fi
    free=$(($(df --output=avail -k . | tail -1) / 1000000))
    say "$torch: pip found no CPU build; installing PyPI's, 5 GB with its CUDA libraries ($free GB are free)"
    [ "$free" -ge 11 ] || stop "unpacking it needs 11 GB of free disk space. Make room, or install a CPU build:
  .venv/bin/pip install $torch+cpu --find-links FOLDER_WITH_THE_WHEEL"
}

# Installs a requirements file into .venv unless this very file was installed before.
install() {
    if [ "$(stamp "$1")" = "$(cat ".venv/$1.done" 2>/dev/null)" ]; then return; fi
    [ "$1" = requirements.txt ] || torch_room
    say "installing into .venv w$(sed -n '1s/^# W\(.*\)\.$/\1/p' "$1"): $(grep -o '^[a-z][A-Za-z0-9_-]*' "$1" | xargs)"
    pip_install -r "$1" || stop "pip could not install $1 (its message is above).
  The network or the package index may be down. Rerun this script to continue."
    stamp "$1" > ".venv/$1.done"
}

debian_packages
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv"
    python3 -m venv --clear .venv
fi
install requirements.txt
[ $tests = 0 ] || install requirements-test.txt
