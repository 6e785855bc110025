#!/usr/bin/env bash
# Tests and times the CUDA programs on a GPU, part by part. Each part adds a section to one report; a part that ran out
# of time resumes in the next call. doc/gpu_check.md has the commands for a quarter of an hour on a GPU, with the
# seconds for each.
#
#   scripts/gpu_check.sh [PART[=SECONDS]...]
#   scripts/gpu_check.sh --help
#
# Without PART: all of these but pack and several, in this order. Repeat the call while the exit code is 75.
# =SECONDS caps a part's time in this call.
#
#   pack          on a machine with a network: collects in DEPS what the GPU machine may lack, and builds the programs
#   probe         what this machine has and lacks: GPU, driver, nvcc, libraries, Python packages, profilers. 10 s
#   build         unpacks in PROGRAMS the programs that pack has built from these sources for this GPU, or builds them
#   tests         compares the wrappers of cuda/gpu.cuh and cuda/hopper.cuh, every kernel, cuBLASLt, the model, and attention under
#                 every normalizer with their references
#   determinism   checks that two runs and a resumed one agree to the last bit
#   train         compares training losses in float32 and in bf16 with the CPU's
#   attention     times attention: softmax at T = 1k to 16k against PyTorch's, every normalizer at 4k against softmax
#   step          times the training step at 124M against PyTorch's, and shows where the time goes
#   evaluation    compares eval_gpt2cu with eval_gpt2, task by task, and times it at 124M next to the trainer
#   memory        measures a step's memory at T = 1k to 16k
#   shapes        times attention with heads of 128 and 48, grouped heads, a gated unit's head, and in float32
#   others        times every normalizer against PyTorch's methods to compute it, T = 4k first
#   package       compares attn_c, the PyTorch package, on the GPU with itself on the CPU, and times it beside SDPA
#   counters      shows the time and memory traffic of each kernel of a step at 124M, by ncu
#   sanitizer     runs compute-sanitizer's memcheck, racecheck and synccheck on our kernels, but not on cuBLASLt's
#   larger        times the training step at 162M against PyTorch's
#   several       tests two ranks with a GPU each, with MPI and NCCL: sums, and a run compared with that of one rank
#
#   BUDGET=N      seconds that this call may take (570). What does not fit is listed and left for the next call
#   OUT=DIR       where report.json, report.md, log and loss.png go (build/gpu_check)
#   REPORT=DIR    an earlier call's OUT, which this call continues (build/gpu_check)
#   FRESH=1       repeats the named parts instead of resuming them
#   DEPS=DIR      what pack has collected (build/deps)
#   PROGRAMS=DIR  where the programs are built or unpacked (build/gpu_programs)
#   GPUS=N        compute capability without its dot (this GPU's, or 90)
#   DATA=DIR      shards to train on (data/shakespeare; without it, this project's own text)
#   DEVICE=cpu    a dry run: the emulated programs, or TRAIN=PROGRAM, and PyTorch on the CPU, with tiny shapes
#
# Exit codes: 0 everything is done and passed; 1 something failed, and the report says what; 2 wrong usage,
# or OUT cannot be written; 75 time ran out: call again; 77 no GPU: nothing was measured.
#
# Example: BUDGET=900 scripts/gpu_check.sh probe build tests
# See doc/gpu_check.md.
set -uo pipefail
CDPATH='' cd "$(dirname "$0")/.."

ALL="probe build tests determinism train attention step evaluation memory shapes others package counters sanitizer larger"
PARTS="pack $ALL several"
FAILED=1 UNFINISHED=75 NO_GPU=77
# In seconds. KILL_AFTER: from SIGTERM to SIGKILL for a program whose time is up. RESERVE: at the end of a call, for
# that and for the report. SMOKE_LIMIT: to build and run a small kernel. ASK_LIMIT: for an answer from nvidia-smi, which
# hangs if the driver does.
KILL_AFTER=5 RESERVE=$((KILL_AFTER + 2)) SMOKE_LIMIT=30 ASK_LIMIT=10
# How many checks that time nothing run side by side: 8, or as many as there are cores if that is fewer, but at least 2.
AT_ONCE=$(nproc)
[ "$AT_ONCE" -le 8 ] || AT_ONCE=8
[ "$AT_ONCE" -ge 2 ] || AT_ONCE=2
out=${OUT:-build/gpu_check} earlier=${REPORT:-build/gpu_check} budget=${BUDGET:-570}
deps=$(realpath -m "${DEPS:-build/deps}")
LOG_BYTES=8000000
dry=0
[ "${DEVICE:-cuda}" = cpu ] && dry=1
where=cuda suffix=cu
[ $dry = 1 ] && where=on_cpu suffix=cu_on_cpu
# A dry run uses the programs that `make` has built, unless PROGRAMS names other ones.
build=${PROGRAMS:-$([ $dry = 1 ] && echo build || echo build/gpu_programs)}
bin=$([ "$build" = build ] && echo . || echo "$build")
packed=$deps/programs
train=${TRAIN:-$bin/train_gpt2$suffix}
evaluate=$bin/eval_gpt2$suffix
tests=$build/$where/tests
flash=${FLASH_LIBRARY:-$build/$where/flash.so}

say() { echo "gpu_check: $*"; }
stop() { echo "gpu_check: $2" >&2; exit "$1"; }
report() { python3 dev/bench/gpu_report.py "$out" "$@"; }
# The seconds left for the current part.
left() { echo $((part_end - SECONDS)); }

# Prints the comment at the top.
usage() { sed -n '1d; /^#/!q; s/^# \{0,1\}//p' scripts/gpu_check.sh; }

smi() { timeout -k $KILL_AFTER $ASK_LIMIT nvidia-smi "$@" 2>/dev/null; }

# The Python that has PyTorch.
find_python() {
    local p
    for p in ${PYTHON:-} python3 .venv/bin/python; do
        python=$p
        if has_module torch; then return; fi
    done
    python=python3
}

has_module() {
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null
}

# Prefers what pack has collected to what is installed.
use_deps() {
    [ -d "$deps" ] || return 0
    export CPATH=$deps/include${CPATH:+:$CPATH} LIBRARY_PATH=$deps/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    export LD_LIBRARY_PATH=$deps/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$deps/python
}

# ---------------------------------------------------------------- checks

# The variables that check() passes on to a function of this script, which it runs in a shell of its own.
VARIABLES="data dry train evaluate deps packed use_pack out part python bin build suffix where flash tests gpus"
VARIABLES+=" make_flags"

# check NAME NEED LIMIT command...: runs the command (a program, or a function of this script) for at most LIMIT
# seconds, unless fewer than NEED seconds are left or it passed in an earlier call. Its verdict, time and last line of
# output go into the report, its whole output into the log. Exit code 75 means that the command ran out of time.
check() {
    margin=0 check_aside "$@"
    conclude_all
}

# check_aside NAME NEED LIMIT command...: the same, beside up to AT_ONCE - 1 other checks. Each verdict is recorded as
# soon as a check ends, so that a killed call keeps what is done; conclude_all waits for those that still run.
check_aside() {
    # All may have to be killed at the end, and recording their verdicts takes a few seconds.
    local name=$1 need=$2 limit=$3 margin=${margin:-$((KILL_AFTER + 5))} cut
    shift 3
    # A dry run has tiny shapes, but may run on a slow machine, so it gets a generous limit.
    [ $dry = 0 ] || { need=$((need / 6)); limit=3600; }
    if grep -qxF -e "$name" <<<"$passed"; then echo "  $name: passed in an earlier call"; return; fi
    conclude_ended
    while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do wait_for_one; done
    need=$((need + margin)) cut=$(($(left) - margin))
    if [ "$(left)" -lt "$need" ]; then leave "$name" "needs $need s, but only $(left) s are left"; return; fi
    cut=$((cut < limit ? cut : limit))
    aside=${aside:-$(mktemp -d)} runs=$((${runs:-0} + 1))
    printf '\n== %s: %s: %s\n' "$part" "$name" "$*" >"$aside/$runs.head"
    # shellcheck disable=SC2086
    if declare -F "$1" >/dev/null; then
        set -- bash -c "$(declare -f); $(declare -p $VARIABLES 2>/dev/null); \"\$@\"" - "$@"
    fi
    run_aside "$aside/$runs" "$name" "$@" &
}

# Writes the command's output into FILE, then its exit code and what conclude_ended needs into FILE.status.
run_aside() {      # FILE NAME command...
    local file=$1 name=$2 start=$SECONDS
    shift 2
    timeout -k $KILL_AFTER "$cut" "$@" >"$file" 2>&1 </dev/null
    echo "$? $((SECONDS - start)) $cut $limit ${informational:-0} $name" >"$file.new"
    mv "$file.new" "$file.status"
}

wait_for_one() { wait -n; conclude_ended; }

conclude_ended() {
    local file status seconds cut limit informational name
    [ -n "${aside:-}" ] || return
    for file in "$aside"/*.status; do
        [ -e "$file" ] || continue
        read -r status seconds cut limit informational name <"$file"
        rm "$file"
        file=${file%.status}
        cat "$file.head" "$file" >>"$out/log"
        conclude_timed "$name" "$status" "$seconds" "$cut" "$limit" "$file"
    done
}

conclude_all() {
    while [ -n "$(jobs -rp)" ]; do wait_for_one; done
    conclude_ended
    [ -z "${aside:-}" ] || rm -rf "$aside"
    aside=""
}

# timed_out STATUS SECONDS CUT: true if `timeout` stopped a command because its CUT seconds were over. A program that is
# killed for lack of memory also has status 137, but ends sooner.
timed_out() { [ "$1" = 124 ] || { [ "$1" = 137 ] && [ "$2" -ge "$3" ]; }; }

# conclude_timed NAME STATUS SECONDS CUT LIMIT FILE: as conclude; a command that was stopped before its LIMIT is left
# for the next call.
conclude_timed() {
    local status=$2
    if timed_out "$2" "$3" "$4"; then
        status="timed out after $5 s"
        if [ "$4" -lt "$5" ]; then
            leave "$1" "stopped after $4 s, at the end of this call's time"
            rm -f "$6"
            return
        fi
    fi
    conclude "$1" "$status" "$3" "$6"
}

# conclude NAME STATUS SECONDS FILE: records the verdict on a command whose output is in FILE.
conclude() {
    local verdict="FAILED ($2)" detail
    detail=$(grep -v '^[[:space:]]*$' "$4" | tail -1)
    if [ "$2" = $UNFINISHED ]; then leave "$1" "$detail"; rm -f "$4"; return; fi
    [ "$2" = 0 ] && verdict=ok
    [ "$2" = $NO_GPU ] && verdict=info
    [ "$verdict" = ok ] || [ "${informational:-0}" = 0 ] || verdict=info
    report check "$part" "$1" "$verdict" "$3" "$detail"
    echo "  $1: $verdict, $3 s${detail:+: ${detail:0:140}}"
    [ "$2" = 0 ] || tail -25 "$4" | sed 's/^/    | /'
    rm -f "$4"
}

# leave NAME WHY: leaves a check for the next call.
leave() {
    report check "$part" "$1" left 0 "$2"
    echo "  $1: left for the next call: $2"
}

# Adds lines to the part's section of the report.
fact() { report fact "$part" "$@"; printf '  %s\n' "$@"; }

# lacks NAME CONSEQUENCE: something that the part needs is missing. That counts as a failure: a check that cannot run
# has not passed.
lacks() {
    report check "$part" "$1" FAILED 0 "$1 is missing: $2"
    echo "  FAILED: $1 is missing: $2"
    return 1
}

# ---------------------------------------------------------------- pack

# Packs each item separately, so that one that is unavailable does not hide the others.
part_pack() {
    local thing not_packed=()
    mkdir -p "$deps"/{include,lib,python,cublas}
    for thing in libraries cudart cublas python text curve programs; do
        if "pack_$thing"; then say "packed: $thing"; else not_packed+=("$thing"); fi
    done
    say "$deps: $(du -sh "$deps" | cut -f1). Copy it together with the sources ($(sources_size))," \
        "without .git, .venv, .cuda, built programs and the rest of build"
    [ ${#not_packed[@]} = 0 ] ||
        stop $FAILED "pack: could not pack ${not_packed[*]}. See above for why, and for what the GPU machine then needs"
}

lacked() { echo "gpu_check: pack: $*" >&2; return 1; }

# cJSON and xxHash: this machine's, or else Debian's or Ubuntu's packages; unpacking them needs no root.
pack_libraries() {
    local root="" name packages="libcjson1 libcjson-dev libxxhash0 libxxhash-dev"
    if ! compile_test cjson/cJSON.h || ! compile_test xxhash.h; then
        root=$(mktemp -d)
        # shellcheck disable=SC2086
        (cd "$root" && apt-get download -q $packages >/dev/null && for name in *.deb; do dpkg -x "$name" .; done) ||
            { lacked "cJSON and xxHash are not installed here, and apt-get cannot download them: install $packages"; return 1; }
    fi
    for name in cjson xxhash.h; do cp -rL "$root/usr/include/$name" "$deps/include/" || return 1; done
    # Copies the files behind symbolic links, which might get lost on the way: the linker looks for .so, the loader for
    # .so.N.
    for name in libcjson libxxhash; do cp -L "$root"/usr/lib/*/"$name".so* "$deps/lib/" || return 1; done
    [ -z "$root" ] || rm -rf "$root"
}

compile_test() { echo "#include <$1>" | gcc -fsyntax-only -x c - 2>/dev/null; }

make_variable() { make -s --eval="show-it: ; @echo \$($1)" MAKECMDGOALS=help show-it 2>/dev/null | tail -1; }

pack_cudart() {
    local library
    library=$(find_cudart)
    [ -n "$library" ] || { lacked "libcudart_static.a is missing here: scripts/setup_cuda.sh installs it"; return 1; }
    [ "$library" -ef "$deps/lib/libcudart_static.a" ] || cp -L "$library" "$deps/lib/"
}

find_cudart() {
    local cuda
    cuda=$(make_variable CUDA)
    find ${cuda:+"$cuda/"} "$deps/lib" -name libcudart_static.a 2>/dev/null | head -1
}

pack_cublas() {
    local cublas
    cublas=$(make_variable CUBLAS)
    [ -f "$cublas/include/cublasLt.h" ] ||
        { lacked "cublasLt.h is missing here: scripts/setup_cuda.sh installs it"; return 1; }
    rm -rf "$deps/cublas/include"
    cp -rL "$cublas/include" "$deps/cublas/include"
}

# pytest, and its plugins for several processes (xdist), any of which may crash or hang (timeout); tqdm, which the scripts
# in data/ import. They are pure Python and work with any version.
pack_python() {
    local p new=$deps/python.new packages="pytest pytest-xdist pytest-timeout tqdm"
    local flags="-q --disable-pip-version-check --no-user --prefix= --root=/ --only-binary :all: --no-compile"
    for p in .venv/bin/python python3; do
        "$p" -m pip --version >/dev/null 2>&1 || continue
        rm -rf "$new"
        # shellcheck disable=SC2086
        "$p" -m pip install $flags --target "$new" $packages || continue
        rm -rf "$deps/python"
        mv "$new" "$deps/python"
        return
    done
    lacked "pip is missing or cannot download $packages. The GPU machine needs them to test attention and evaluation"
}

# Shards to train on: those in DATA, or this project's own text, one token per byte.
pack_text() {
    local from=${DATA:-data/shakespeare}
    rm -rf "$deps/text"
    mkdir -p "$deps/text"
    if has_shards "$from"; then cp "$from"/*_train_*.bin "$deps/text/"; else python3 dev/bench/gpu_text.py "$deps/text"; fi
}

has_shards() { set -- "$1"/*_train_*.bin; [ -e "$1" ]; }

# The CPU's losses, and the recipe that produced them.
pack_curve() {
    make -j"$(nproc)" train_gpt2 >/dev/null ||
        { lacked "train_gpt2 cannot be built here, so the GPU machine must do the CPU run (minutes)"; return 1; }
    data=$deps/text
    rm -rf "$deps/fp32_on_cpu"
    run_cpu ./train_gpt2 "$deps/fp32_on_cpu" >/dev/null || { lacked "the CPU run failed"; return 1; }
    rm -rf "$deps/fp32_on_cpu/ckpt"
}

# Flags for programs that run on another machine: with no library that it may lack, and with the instructions of every
# server of the last ten years.
portable_flags() { echo "GPUS=$gpus MARCH=x86-64-v3 MPI=0 ONEDNN=0 BLAS=0 NCCL=0"; }

packed_sources() { report version build && portable_flags; }

# The programs, and the PyTorch package, for one GPU generation.
pack_programs() {
    local folder=build/packed made more
    [ $dry = 1 ] || [ -n "$(make_variable CUDA)" ] ||
        { lacked "nvcc is missing here, so the GPU machine must build the programs (half a minute on 16 cores):" \
            "scripts/setup_cuda.sh installs it"; return 1; }
    rm -rf "$packed"
    mkdir -p "$packed"
    made=$(packed_sources)
    more="BUILD=$folder BIN=$folder TORCH_CUDA=$((1 - dry)) attn_c"
    # shellcheck disable=SC2046,SC2086
    make -j"$(nproc)" $(portable_flags) $more $(programs_in $folder) >"$packed/log" ||
        { tail -25 "$packed/log"; lacked "the programs cannot be built here, so the GPU machine must do it"; return 1; }
    [ "$(packed_sources)" = "$made" ] || { lacked "the programs' sources changed while they were built"; return 1; }
    compress "$packed/programs.tar.xz" $folder || { lacked "the programs cannot be compressed"; return 1; }
    rm "$packed/log"
    echo "$made" >"$packed/sources"
}

# Most of each CUDA program is the same kernels. A dictionary that is longer than a program makes the archive of all
# hardly larger than that of one.
compress() {       # archive folder
    # shellcheck disable=SC2046
    python3 - "$1" "$2" $(programs_in "$2") "$2/python" <<'PY'
import lzma, os, sys, tarfile
archive, folder, *names = sys.argv[1:]
filters = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 512 << 20}]
with lzma.open(archive, "w", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as tar:
    for name in names:
        tar.add(name, os.path.relpath(name, folder))
PY
}

sources_size() {
    local files=(git ls-files)
    git rev-parse --git-dir >/dev/null 2>&1 || files=(find . -type f -not -path './build/*')
    "${files[@]}" | tr '\n' '\0' | du -cb --files0-from=- 2>/dev/null | awk 'END { printf "%.1f MB", $1 / 1e6 }'
}

# ---------------------------------------------------------------- probe

# found NAME VALUE CONSEQUENCE [needed]: adds the value to `facts`, or if it is empty, the consequence and the remedy.
# `needed`: every program needs it.
found() {
    if [ -n "$2" ]; then facts+=("$1: $2")
    elif [ "${4:-}" = needed ] && [ $dry = 0 ]; then lacks "$1" "$3"
    else facts+=("$1: missing: $3"); fi
}

free_in() { df -h --output=avail "$1" 2>/dev/null | tail -1 | xargs; }

first_line() { "$@" 2>/dev/null | head -1; }

part_probe() {
    local name value cuda release smoke="" facts=() by_pack="scripts/gpu_check.sh pack provides it" to_build=needed
    settle_tools
    if has_pack; then to_build="" facts+=("programs: pack's, built from these sources for this GPU"); fi
    cuda=$(make_variable CUDA)
    if [ $dry = 0 ] && [ -n "$cuda" ] && has_gpu; then
        smoke=$(mktemp -d)
        smoke_test "$cuda" "$smoke" &
    fi
    found GPU "${GPU_CHECK_DEVICE#CPU}" "nothing can be measured"
    release=$(smi | grep -o 'CUDA Version: [0-9.]*')
    found "driver for CUDA" "${release#*: }" "the driver must support CUDA 13"
    found make "$(first_line make --version)" "install make" $to_build
    found g++ "$(first_line g++ --version)" "install g++" $to_build
    release=$(timeout -k $KILL_AFTER $ASK_LIMIT "$cuda/bin/nvcc" --version 2>/dev/null | grep release)
    found nvcc "${cuda:+$cuda, ${release#*release }}" "scripts/setup_cuda.sh installs it; it needs a network" $to_build
    found libcudart_static.a "$(find_cudart)" "$by_pack" $to_build
    found cublasLt.h "$(ls "$cublas/include/cublasLt.h" 2>/dev/null)" "$by_pack" $to_build
    found libcublasLt "$(cublas_library)" "it comes with PyTorch for CUDA 13" needed
    for name in cjson/cJSON.h xxhash.h; do found "$name" "$(compile_test $name && echo yes)" "$by_pack" $to_build; done
    found Python "$("$python" --version 2>&1), $(command -v "$python")" "install Python 3"
    while read -r name value; do found "Python's $name" "$value" "$(without "$name")"; done < <(python_packages)
    for name in ncu compute-sanitizer; do found $name "$(command -v $name)" "$(without $name)"; done
    found mpirun "$(command -v mpirun)" "needed only by the part 'several'"
    facts+=("CPU: $(nproc) cores, $(awk '/MemTotal/ { printf "%.0f GB", $2 / 1e6 }' /proc/meminfo) of memory")
    facts+=("free disk: $(free_in .) here, $(free_in /dev/shm) in /dev/shm" "text to train on: $data, $curve")
    fact "${facts[@]}"
    wait
    [ -z "$smoke" ] || conclude_smoke "$smoke"
    has_gpu || end="not measured: no GPU"
}

# Prints one line per package: its name, and its version if it is installed.
python_packages() {
    "$python" - torch triton numpy pytest pytest-xdist pytest-timeout tqdm matplotlib <<'PY'
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name)
PY
}

without() {
    case $1 in
        torch) echo "attention, shapes, step, memory, others and package cannot run, and attention is not tested" ;;
        triton) echo "PyTorch cannot compile, so step, memory and others cannot run" ;;
        numpy) echo "attention and evaluation are not tested, and sanitizer and counters cannot run attention's kernels" ;;
        pytest) echo "attention and evaluation are not tested; scripts/gpu_check.sh pack provides it" ;;
        pytest-xdist | pytest-timeout)
            echo "one crash ends the tests of attention or evaluation; scripts/gpu_check.sh pack provides it" ;;
        tqdm) echo "evaluation cannot run; scripts/gpu_check.sh pack provides it" ;;
        matplotlib) echo "no picture of the losses" ;;
        ncu) echo "counters cannot run" ;;
        compute-sanitizer) echo "sanitizer cannot run" ;;
    esac
}

# Builds and runs a small kernel in the background; conclude_smoke records the verdict.
smoke_test() {
    cat >"$2/smoke.cu" <<'CUDA'
#include <stdio.h>
__global__ void add(int *x) { atomicAdd(x, 1); }
int main(void) {
    int *x, got = 0;
    cudaMalloc(&x, 4);
    cudaMemset(x, 0, 4);
    add<<<2, 64>>>(x);
    cudaMemcpy(&got, x, 4, cudaMemcpyDeviceToHost);
    printf("a kernel computed %d (expected 128), %s\n", got, cudaGetErrorString(cudaGetLastError()));
    return got != 128;
}
CUDA
    local start=$SECONDS
    # shellcheck disable=SC2016
    timeout -k $KILL_AFTER $SMOKE_LIMIT bash -c '"$1/bin/nvcc" -arch="sm_$2" -o "$3/smoke" "$3/smoke.cu" && "$3/smoke"' \
        - "$1" "$gpus" "$2" >"$2/text" 2>&1
    echo "$? $((SECONDS - start))" >"$2/status"
}

conclude_smoke() {
    local status seconds
    read -r status seconds <"$1/status"
    cat "$1/text" >>"$out/log"
    conclude_timed "a kernel for sm_$gpus" "$status" "$seconds" $SMOKE_LIMIT $SMOKE_LIMIT "$1/text"
    rm -rf "$1"
}

# ---------------------------------------------------------------- build

# Sets `cublas`, and make's flags for what the Makefile does not find by itself: headers and libcudart_static.a from
# pack, and the cuBLASLt library that came with PyTorch or that the system has.
settle_tools() {
    local library lacking cudart
    make_flags=(GPUS="$gpus" BUILD="$build" BIN="$bin")
    cudart=$(find_cudart)
    [[ $cudart != $deps/* ]] || make_flags+=(CUDART="$cudart")
    cublas=$(make_variable CUBLAS)
    lacking=" $(make -s lacking 2>/dev/null) "
    if [[ $lacking != *" cublas "* ]] && [ -n "$(compgen -G "$cublas/lib*/libcublasLt.so*")" ]; then return; fi
    library=$(cublas_libraries | first_file)
    [ -n "$library" ] && [ -f "$deps/cublas/include/cublasLt.h" ] || return
    ln -sfn "$(dirname "$library")" "$deps/cublas/lib"
    cublas=$deps/cublas
    make_flags+=(CUBLAS="$cublas")
}

cublas_libraries() {
    "$python" -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null | sed 's|$|/*/lib/libcublasLt.so.13|'
    echo '/usr/local/cuda*/lib64/libcublasLt.so.13'
    ldconfig -p | sed -n 's/.*libcublasLt.so.13.* => //p'
}

first_file() { while read -r glob; do compgen -G "$glob"; done | head -1; }

cublas_library() { { cublas_libraries; echo "$cublas/lib*/libcublasLt.so*"; } | first_file; }

programs_in() {    # folder
    local name
    for name in {train,test,eval}_gpt2$suffix {train,eval}_gpt2 $where/tests/test_{kernels,matmul} $where/flash.so; do
        echo "$1/$name"
    done
}

# Identifies the sources of the programs by their contents, because copying may have changed their times.
sources() { report version build && echo "${make_flags[*]}"; }

# shellcheck disable=SC2046
products() { cat $(programs_in "$build") 2>/dev/null | sha256sum; }

has_same_sources() { [ "$(sources)" = "$(cat "$build/sources" 2>/dev/null)" ]; }

# True if the programs in $build are pack's.
is_unpacked() { [ $use_pack = 1 ] && [ "$(packed_sources)" = "$(cat "$build/sources" 2>/dev/null)" ]; }

# True if pack has built the programs from these sources for this GPU.
has_pack() { [ $use_pack = 1 ] && [ "$(packed_sources)" = "$(cat "$packed/sources" 2>/dev/null)" ]; }

is_built() {
    local file
    for file in $(programs_in "$build"); do [ -e "$file" ] || return 1; done
    { has_same_sources || is_unpacked; } && [ "$(products)" = "$(cat "$build/products" 2>/dev/null)" ]
}

make_programs() {
    # shellcheck disable=SC2046
    make -j"$(nproc)" "${make_flags[@]}" $(programs_in "$build") && products >"$build/products"
}

part_build() {
    settle_tools
    [ "$build" != build ] || stop 2 "build: make builds in the folder build; set PROGRAMS to another one"
    if is_built; then
        report check "$part" "make, sm_$gpus" ok 0 "the programs in $build are built from these sources"
        echo "  nothing to do"
    elif has_same_sources && [ ! -e "$build/products" ]; then
        say "resuming an unfinished build in $build"
        find "$build" -type f -exec touch {} +                # these objects match the sources, whatever the times say
        build_here
    else
        [ ! -d "$build" ] || say "$build holds programs built from other sources or with other flags; rebuilding them"
        take_pack || { rm -rf "$build"; build_here; }
    fi
}

build_here() {
    mkdir -p "$build"
    sources >"$build/sources"
    fact "$(nproc) cores; cuBLASLt $cublas"
    check "make, sm_$gpus" 20 3600 make_programs
}

# Unpacks the programs that pack has built, if they suit these sources and this GPU, and start on this machine.
take_pack() {
    [ $use_pack = 1 ] && [ -e "$packed/sources" ] || return
    has_pack || { fact "pack's programs were built from other sources or for another GPU: not used"; return 1; }
    find_cublas
    informational=1 check "pack's programs, sm_$gpus" 5 60 unpack
    is_built || { fact "pack's programs cannot be used here"; return 1; }
}

unpack() {
    rm -rf "$build"
    mkdir -p "$build"
    python3 -m tarfile -e "$packed/programs.tar.xz" "$build" && programs_start || return 1
    products >"$build/products"
    cp "$packed/sources" "$build/sources"
    echo "built from these sources, and they start here"
}

# True if the loader finds the libraries of every program, in versions that are new enough, and the processor has the
# instructions that they use.
programs_start() {
    local program
    for program in $(programs_in "$build"); do
        if ldd "$program" 2>&1 | grep -m3 "not found"; then return 1; fi
        case $program in
            */train_* | */eval_*) "$program" --help >/dev/null || { echo "$program --help: exit code $?"; return 1; } ;;
        esac
    done
}

# Programs that were linked here know the folder of cuBLASLt's library; pack's do not.
find_cublas() {
    local library
    library=$(cublas_library)
    [ -z "$library" ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${library%/*}
}

# Builds the programs, which a fresh machine lacks, for a part that needs them.
ensure_built() {
    [ $dry = 1 ] && [ "$build" = build ] && return
    [ -z "${ready:-}" ] || return "$ready"
    settle_tools
    is_built || build_for "$part"
    is_built && ready=0 || ready=1
    [ $ready = 1 ] || ! is_unpacked || find_cublas
    return $ready
}

build_for() {      # part
    local part=build passed=""
    echo "== build (for $1)"
    report forget build
    report begin build
    part_build
    report end build ""
}

# ---------------------------------------------------------------- tests

KERNELS="wrappers phi rmsnorm rope bias qk_norm scores swiglu gau embedding classifier adamw muon norms refused peak"
PRODUCTS="layers plans shapes measured workspace repeated stored"
MODELS="tied_v97 tied_v50257 _llama_ _gau_ _h4_kv2_T _kv1_d24 _qk_norm_T _bias_T _d48 _d64 _d128"

# Every group runs in a process of its own, so that a kernel that crashes ends only its group.
part_tests() {
    local group
    check "kernels: wrappers" 10 90 "$tests/test_kernels" wrappers
    try_wgmma
    for group in ${KERNELS#wrappers }; do check_aside "kernels: $group" 10 90 "$tests/test_kernels" "$group"; done
    for group in $PRODUCTS; do check_aside "cuBLASLt: $group" 10 60 "$tests/test_matmul" "$group"; done
    # Sizes and calls that the trainer never uses: the library's answers are only informational.
    for group in unaligned orders refused; do
        informational=1 check_aside "cuBLASLt, not needed: $group" 10 60 "$tests/test_matmul" "$group"
    done
    for group in $(model_groups); do check_aside "the model: $group" 10 120 "$bin/test_gpt2$suffix" "$group"; done
    conclude_all
    has_module torch && has_module pytest || { lacks "PyTorch or pytest" "attention is not tested"; return 1; }
    check "attention, a selection" 25 180 test_attention 0
    [ $dry = 1 ] || check "attention, every normalizer" 25 300 test_attention 1
}

# Attention's kernels for compute capability 9.0, before everything that uses them: if they hang, each check would take
# all of its time. If they fail, all that follows runs with the kernels for 8.0, in later calls too.
WGMMA="attention with wgmma and TMA"

try_wgmma() {
    [ "$gpus" = 90 ] && has_module torch && has_module pytest || return 0
    check "$WGMMA" 30 60 test_wgmma
    avoid_wgmma
}

test_wgmma() {
    FLASH_SO=$(realpath "$flash") run_pytest dev/tests/test_flash.py -k "kinds and bf16 and not sm80"
}

avoid_wgmma() {
    report failed tests "$WGMMA" || return 0
    export FLASH90=0
    fact "with FLASH90=0, because $WGMMA failed: attention runs with mma.sync"
}

model_groups() { if [ $dry = 1 ]; then echo softmax_tied_v97_T33; else tr ' ' '\n' <<<"$MODELS"; fi; }

test_attention() {
    export FLASH_ALL=$1 FLASH_SO
    FLASH_SO=$(realpath "$flash")
    run_pytest dev/tests/test_flash.py
}

run_pytest() {
    local flags=(-q -p no:cacheprovider --maxfail=15) processes
    processes=$((dry ? 2 : ($(nproc) * 3 + 3) / 4))
    has_module xdist && flags+=(-n "$processes" --max-worker-restart=15)
    has_module pytest_timeout && flags+=(--timeout=60 --timeout-method=thread)
    OMP_NUM_THREADS=1 "$python" -m pytest "${flags[@]}" "$@"
}

# ---------------------------------------------------------------- runs on text

# The same small model for all runs: heads of 64, 2 M parameters plus the embedding.
recipe() {
    local vocab=${VOCAB:+,vocab=$VOCAB}
    if [ $dry = 1 ]; then
        echo "--model layers=1,heads=2,channels=96,ffn=64$vocab --batch 2 --seq-len 16 --steps ${STEPS:-4} --warmup 2 --lr 1e-3"
    else
        echo "--model layers=4,heads=4,channels=256,ffn=688$vocab --batch 8 --seq-len 256 --steps ${STEPS:-120} --warmup 20 --lr 3e-4"
    fi
}

run() {            # program folder flags...
    local program=$1 folder=$2
    shift 2
    # shellcheck disable=SC2046
    "$program" --train-data "$data/*_train_*.bin" $(recipe) --sample-every 0 --val-every 0 --ckpt-every 0 \
        --out "$folder" "$@"
}

# Trains on the CPU, and records beside the run which recipe and text it used.
run_cpu() { run "$1" "$2" --dtype fp32 && curve_of >"$2/recipe"; }
curve_of() { recipe && cat "$data"/*_train_*.bin | sha256sum; }

find_data() {
    local folder
    curve="without the CPU's losses, so the CPU run takes minutes here (scripts/gpu_check.sh pack provides them)"
    [ -z "${DATA:-}" ] || has_shards "$DATA" || stop 2 "DATA=$DATA: no *_train_*.bin in this folder"
    for folder in ${DATA:-} "$deps/text" data/shakespeare; do
        if has_shards "$folder"; then data=$folder; break; fi
    done
    if [ -z "${data:-}" ]; then
        data=build/gpu_text
        python3 dev/bench/gpu_text.py "$data" >/dev/null ||
            stop $FAILED "no text to train on: set DATA to a folder of shards"
    fi
    if [ "$(cat "$deps/fp32_on_cpu/recipe" 2>/dev/null)" = "$(curve_of)" ]; then
        curve="with the CPU's losses, from pack"
        packed_curve=1
    fi
}

part_train() {
    local folder
    folder=$(mktemp -d)
    if [ -n "${packed_curve:-}" ]; then
        cp -r "$deps/fp32_on_cpu" "$folder/"
        fact "the CPU's losses are pack's"
        check "the same losses on CPU and GPU" 15 180 curves_beside "$folder"
    else
        check "the same losses on CPU and GPU" 60 480 curves_beside "$folder"
    fi
    rm -rf "$folder"
}

curves_beside() {  # folder
    local status=0
    if [ ! -e "$1/fp32_on_cpu" ]; then
        [ $dry = 1 ] || make -j"$(nproc)" train_gpt2 || return 1
        run_cpu ./train_gpt2 "$1/fp32_on_cpu" || return 1
    fi
    run "$train" "$1/bf16" --dtype bf16 >"$1/said" 2>&1 &
    run "$train" "$1/fp32" --dtype fp32 || status=1
    wait $! || status=1
    cat "$1/said"
    [ $status = 0 ] || return 1
    "$python" scripts/plot.py "$1/fp32_on_cpu" "$1/fp32" "$1/bf16" --out "$out/loss.png" || echo "no picture"
    report curves "$part" "$1/fp32_on_cpu" "$1/fp32" "$1/bf16"
}

part_determinism() {
    local dtype
    for dtype in bf16 fp32; do
        check_aside "$dtype: two runs, one resumed half-way, and one without graphs agree" 15 200 same_runs $dtype
    done
    check_aside "bf16 with Muon and z-loss: the same" 15 200 same_runs bf16 --optimizer muon --z-loss 1e-4
    check_aside "bf16, --deterministic 0, and its matmul algorithms in two runs" 15 90 free_run
}

same_runs() {      # dtype, flags...
    local folder deterministic="--deterministic 1" graphs="--graphs 0" status=0 name dtype=$1
    shift
    # The CPU trainer, which a dry run uses, has no such flags and is always deterministic.
    [[ $("$train" --help) == *--deterministic* ]] || deterministic=--shuffle graphs=''
    folder=$(mktemp -d)
    export STEPS=$((dry ? 4 : 30))
    # shellcheck disable=SC2086
    set -- --dtype "$dtype" $deterministic "$@"
    for name in a b; do run "$train" "$folder/$name" "$@" || status=1; done
    run "$train" "$folder/c" "$@" --steps $((STEPS / 2)) || status=1
    run "$train" "$folder/c" "$@" --resume || status=1
    # shellcheck disable=SC2086
    run "$train" "$folder/d" "$@" $graphs || status=1
    for name in b c d; do python3 dev/bench/gpu_report.py compare same "$folder/a" "$folder/$name" || status=1; done
    rm -rf "$folder"
    return $status
}

free_run() {
    local folder free="--deterministic 0" stored name
    folder=$(mktemp -d)
    stored="--matmuls $folder/matmuls"
    [[ $("$train" --help) == *--deterministic* ]] || free='' stored=''
    export STEPS=$((dry ? 4 : 30))
    # shellcheck disable=SC2086
    run "$train" "$folder/free" --dtype bf16 $free $stored || return 1
    # shellcheck disable=SC2086
    for name in stored again; do run "$train" "$folder/$name" --dtype bf16 $stored || return 1; done
    python3 dev/bench/gpu_report.py compare same "$folder/stored" "$folder/again" || return 1
    rm -rf "$folder"
}

# scripts/launch.sh, as a program for run().
two_ranks() { scripts/launch.sh 2 "$train" "$@"; }

# Both runs see the same batches, so their losses differ only by the order of sums.
part_several() {
    local word zero
    if [ $dry = 0 ] && [ "$(smi -L | wc -l)" -lt 2 ]; then
        end="not measured: fewer than two GPUs"
        fact "fewer than two GPUs: not measured"
        return
    fi
    [ $dry = 1 ] || check "make test_collective" 30 200 make -j"$(nproc)" "${make_flags[@]}" "$tests/test_collective"
    for word in sums bf16; do
        check "sums of two ranks: $word" 15 60 scripts/launch.sh 2 "$tests/test_collective" "$word"
    done
    for zero in 0 1; do check "losses of two ranks, --zero $zero" 30 240 two_beside_one $zero; done
}

two_beside_one() { # --zero's value
    local folder status=0 batch=$((dry ? 1 : 4))
    folder=$(mktemp -d)
    export STEPS=$((dry ? 4 : 10))
    run "$train" "$folder/one" --dtype fp32 && run two_ranks "$folder/two" --dtype fp32 --batch $batch --zero "$1" &&
        python3 dev/bench/gpu_report.py compare close 1e-5 "$folder/one" "$folder/two" || status=1
    rm -rf "$folder"
    return $status
}

# ---------------------------------------------------------------- timings

# timing NEED MODULE program flags...: runs a program of dev/bench, which resumes by itself and starts no case that
# would not fit into the time left.
timing() {
    local need=$1 module=$2 program=$3 flags=()
    shift 3
    [ $dry = 1 ] && flags=(--dry-run)
    has_module "$module" || [ $dry = 1 ] || { lacks "Python's $module" "$(without "$module")"; return 1; }
    # shellcheck disable=SC2086
    check "$part" "$need" 3600 "$python" "dev/bench/$program" "$out" "$part" --budget $(($(left) - 15)) "${flags[@]}" "$@" \
        ${TIMING_FLAGS:-}
}

# Short measurements, each the median of at least 12 passes: there are more than thirty normalizers.
part_attention() { short_timing 60; }
part_shapes() { short_timing 30; }

short_timing() {   # NEED
    local flags=(--lengths 4096 --seconds 0.06)
    [ $dry = 0 ] || flags=()
    timing "$1" torch attention_gpu.py --library "$flash" "${flags[@]}"
}

part_others() { timing 75 triton attention_gpu.py --library "$flash"; }
part_step() { timing 60 triton gpu_step.py --ours "$train"; }
part_memory() { timing 45 triton gpu_step.py --ours "$train"; }
part_larger() { timing 45 triton gpu_step.py --ours "$train"; }

part_evaluation() {
    check "the same results as eval_gpt2" 25 300 test_evaluation
    timing 30 tqdm gpu_eval.py --train "$train" --evaluate "$evaluate"
}

# The CPU's programs are in $bin too.
test_evaluation() {
    local some=()
    [ $dry = 0 ] || some=(-k "loss and gau")
    TRAIN_GPT2=$bin/train_gpt2 EVAL_GPT2CU=$evaluate run_pytest "${some[@]}" dev/tests/test_eval_cuda.py
}

part_package() {
    has_module torch || [ $dry = 1 ] || { lacks "Python's torch" "$(without torch)"; return 1; }
    check "attn_c: every normalizer on the GPU and on the CPU" 35 300 test_package
}

test_package() {
    is_unpacked || make -s -j"$(nproc)" "${make_flags[@]}" TORCH_CUDA=$((1 - dry)) attn_c || return 1
    PYTHONPATH=$build/python "$python" dev/bench/torch_gpu.py --device "$([ $dry = 1 ] && echo cpu || echo cuda)"
}

part_counters() {
    local missing=""
    [ $dry = 0 ] || missing="a dry run has no kernels that ncu can observe"
    command -v ncu >/dev/null || missing="ncu is missing"
    if [ -n "$missing" ]; then
        report check "$part" counters info 0 "$missing"
        echo "  $missing: nothing was counted"
        return
    fi
    check "a step by kernel" 25 120 "$python" dev/bench/gpu_kernels.py step "$out" "$train"
}

# ---------------------------------------------------------------- sanitizer

# One of each kind of attention kernel, following the rows of attention/flash_instances.h. Columns: dtype, --attn, T,
# head size, size of the values.
attention_kinds() {
    cat <<'TABLE'
bf16 softmax 96 64 64
bf16 softmax 300 64 64
bf16 softmax 300 128 128
bf16 softmax-recentered 96 64 64
bf16 softmax-recentered-l1 96 64 64
bf16 softplus-l1 96 64 64
bf16 lssar 96 64 64
bf16 sigmoid 96 64 64
bf16 identity 96 64 64
bf16 relu-l1 96 64 64
bf16 relu2-n 96 64 64
bf16 gelu-l1 96 64 64
bf16 relu6-l1 96 64 64
bf16 relu6-l1 300 128 128
bf16 mish-l1 96 64 64
bf16 ssmax-pn 96 64 64
bf16 softpick 96 64 64
bf16 mish-l1+post=recenter 96 64 64
bf16 sigmoid-logn-l1+post=reweight:15 96 64 64
fp32 softmax-sink 96 64 64
fp32 softmax-recentered 96 64 64
fp32 lssar 96 64 64
bf16 ssmax-bias 96 48 48
bf16 relu2-T 65 128 192
bf16 lssar 65 128 192
TABLE
}

# Prints lines `NAME|COMMAND`, one per check. memcheck comes first, for all kernels.
sanitizer_runs() {
    local tool group dtype attn T HS VS tools="memcheck racecheck synccheck"
    [ $dry = 1 ] && tools=none
    for tool in $tools; do
        for group in $KERNELS; do
            case $group in refused | peak) ;; *) echo "$tool, kernels: $group|$tests/test_kernels $group" ;; esac
        done
        while read -r dtype attn T HS VS; do
            printf '%s, %s %s at %s, heads of %s, values of %s|' "$tool" "$dtype" "$attn" "$T" "$HS" "$VS"
            echo "$python dev/bench/gpu_kernels.py run $flash $dtype $attn $T $HS $VS"
            # The kernels for compute capability 8.0, which this GPU would not choose.
            [ "$tool,$dtype" = memcheck,bf16 ] || continue
            printf '%s, mma.sync: %s %s at %s, heads of %s, values of %s|' "$tool" "$dtype" "$attn" "$T" "$HS" "$VS"
            echo "env FLASH90=0 $python dev/bench/gpu_kernels.py run $flash $dtype $attn $T $HS $VS"
        done < <(attention_kinds)
    done
}

part_sanitizer() {
    local name command prefix
    if [ $dry = 0 ] && ! command -v compute-sanitizer >/dev/null; then
        lacks compute-sanitizer "it comes with the CUDA Toolkit"
        return 1
    fi
    while IFS='|' read -r name command; do
        prefix=""
        [ $dry = 1 ] || prefix="compute-sanitizer --tool ${name%%,*} --error-exitcode 9 --print-limit 20"
        # shellcheck disable=SC2086
        check_aside "$name" 30 240 $prefix $command
    done < <(sanitizer_runs)
}

# ---------------------------------------------------------------- main

has_gpu() { [ $dry = 1 ] || [ "$GPU_CHECK_DEVICE" != CPU ]; }

run_part() {
    local start=$SECONDS end="" state passed
    part=${1%%=*} part_end=$((budget - RESERVE))
    [[ $1 != *=* ]] || part_end=$((SECONDS + 10#${1#*=} < part_end ? SECONDS + 10#${1#*=} : part_end))
    echo "== $part"
    if [ "$part" = pack ]; then part_pack; return; fi
    case $part:${FRESH:-} in probe:* | build:* | *:1) report forget "$part" ;; esac
    if [ "$part" != build ] && [ "$part" != probe ] && ! has_gpu; then
        report begin "$part"
        report end "$part" "not measured: no GPU"
        echo "gpu_check: $part: no GPU: not measured"
        return
    fi
    state=$(report state "$part")
    case $state:$named in
        done:* | failed:0) echo "  $state in an earlier call (FRESH=1 scripts/gpu_check.sh $part repeats it)"; return ;;
    esac
    report begin "$part"
    passed=$(report passed "$part")
    [ $dry = 0 ] || fact "a dry run on the CPU, which measures nothing"
    avoid_wgmma
    case $part in
        probe | build) "part_$part" ;;
        *) if ensure_built; then "part_$part"
           elif [ "$(report state build)" = failed ]; then lacks programs "the part build failed"
           else leave programs "the build is unfinished"; fi ;;
    esac
    conclude_all
    echo "  $part: $((SECONDS - start)) s"
    report took "$part" $((SECONDS - start))
    report end "$part" "$end"
}

shorten_log() {
    [ "$(stat -c %s "$out/log" 2>/dev/null || echo 0)" -le $LOG_BYTES ] && return
    tail -c $LOG_BYTES "$out/log" >"$out/log.new" && mv "$out/log.new" "$out/log"
}

# Copies the report of an earlier call if this call writes to another folder.
continue_report() {
    local name
    { mkdir -p "$out" && echo >"$out/writable" && rm "$out/writable"; } 2>/dev/null ||
        stop 2 "OUT=$out: cannot be created or written to"
    if [ -e "$out/report.json" ] || [ ! -e "$earlier/report.json" ]; then return; fi
    for name in report.json log loss.png; do
        [ ! -e "$earlier/$name" ] || cp "$earlier/$name" "$out/"
    done
}

case ${1:-} in -h | --help | help) usage; exit 0 ;; esac
for word in "$@"; do
    [[ " $PARTS " == *" ${word%%=*} "* ]] || stop 2 "${word%%=*}: no such part. The parts are: $PARTS"
    [[ $word != *=* || $word =~ ^[a-z]+=[0-9]{1,6}$ ]] || stop 2 "$word: expected PART=SECONDS"
done
[[ $budget =~ ^[0-9]{1,6}$ ]] || stop 2 "BUDGET=$budget: expected seconds, a whole number of at most six digits"
budget=$((10#$budget))
named=1
[ $# -gt 0 ] || { named=0; set -- $ALL; }
# Two ranks need MPI and NCCL, which pack's programs do not have.
only_pack=1 use_pack=1 wanted=()
for word in "$@"; do
    [ "${word%%=*}" != several ] || use_pack=0
    [ "${word%%=*}" = pack ] || { only_pack=0; wanted+=("${word%%=*}"); }
done

[ $only_pack = 1 ] || { use_deps; continue_report; }
find_python
unset GPU_CHECK_DEVICE
GPU_CHECK_DEVICE=$(report device)
export GPU_CHECK_DEVICE
capability=$(smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d . | grep -x '[0-9]*')
gpus=${GPUS:-${capability:-90}}
[ $only_pack = 1 ] || find_data
while [ $# -gt 0 ]; do
    # A part takes a second or more even to say that there is no time.
    if [ $((budget - SECONDS)) -lt $((RESERVE + 3)) ] && [ "$1" != pack ]; then
        report postpone "${@%%=*}"
        say "no time is left for ${*%%=*}"
        break
    fi
    word=$1
    shift
    run_part "$word"
    if [ "${word%%=*}" = probe ] && [ $# -gt 0 ]; then
        has_gpu || stop $NO_GPU "there is no GPU. The other parts were not started"
        [ "$(report state probe)" != failed ] ||
            stop $FAILED "this machine lacks what the build needs: see above. The other parts were not started"
    fi
done
[ $only_pack = 0 ] || exit 0
shorten_log
report status "${wanted[@]}"
status=$?
sed -n '3,/^$/p' "$out/report.md"
report summary
say "$out/report.md; $SECONDS s of $budget"
[ $status != $UNFINISHED ] || say "time ran out: call again to continue, with the report in $earlier or REPORT=DIR"
exit $status
