#!/usr/bin/env bash
# What only a GPU can show, in parts, each of which can be called alone and adds its section to one report.
#
#   scripts/gpu_check.sh [PART...]     without one: build tests sanitizer determinism train attention, under 10 minutes on an H100 with 16 cores
#
#   pack          on the machine that has a network: gathers in DEPS what the GPU's machine may lack
#   build         everything for sm_90 (GPUS), by make -j
#   tests         the wrappers of kernels/gpu.cuh, every kernel, cuBLASLt, attention under every normaliser, the whole model, against their references
#   sanitizer     compute-sanitizer's memcheck, racecheck and synccheck on small shapes, each kind of attention
#   determinism   two runs and a resumed one, bit for bit
#   several       two processes with a GPU each, by MPI and NCCL: sums, and a run beside one of one process
#   train         a run on Shakespeare in float32 and in bf16 beside the CPU's
#   attention     attention's time: softmax at T = 1k to 16k beside PyTorch's, every normaliser at 1k and 4k beside our softmax
#   step          the training step at 124M and 162M beside PyTorch's, and where the time goes
#   memory        a step's memory at T = 1k to 16k
#   others        every normaliser beside PyTorch's ways, which are compiled first: long. Called again, it goes on where it was, as step and memory do
#
#   OUT=DIR       where report.json, report.md and log go (build/gpu_check). A report there is added to. With another DIR than that one, a report in
#                 build/gpu_check is taken over first
#   DEPS=DIR      what pack has gathered (build/deps)
#   TARGETS=WORDS what build makes (all that the parts need)
#   BUDGET=N      seconds after which attention, step, memory and others begin no new case (500)
#   DATA=DIR      Shakespeare's shards (data/shakespeare)
#   VERSION=TEXT  what the report calls this version, where there is no git
#   DEVICE=cpu    a dry run: the emulated programs, or TRAIN=PROGRAM, PyTorch on the CPU, tiny shapes. It shows that the parts run, and measures nothing
#
# Exit codes: 0 all is well; 1 something failed, and the report says what; 2 wrong usage; 77 no GPU: not measured.
set -uo pipefail
cd "$(dirname "$0")/.."

DEFAULT_PARTS="build tests sanitizer determinism train attention"
PARTS="pack build tests sanitizer determinism several train attention step memory others"
NO_GPU=77
home=build/gpu_check
out=${OUT:-$home} deps=$(realpath -m "${DEPS:-build/deps}") data=${DATA:-data/shakespeare} budget=${BUDGET:-500} gpus=${GPUS:-90}
dry=0
[ "${DEVICE:-cuda}" = cpu ] && dry=1
where=cuda suffix=cu
[ $dry = 1 ] && where=on_cpu suffix=cu_on_cpu
train=${TRAIN:-./train_gpt2$suffix}
tests=build/$where/tests

say() { echo "gpu_check: $*"; }
stop() { echo "gpu_check: $2" >&2; exit "$1"; }
report() { python3 dev/bench/gpu_report.py "$out" "$@"; }

# The Python that has PyTorch, and pytest where pack brought it.
find_python() {
    local p
    for p in ${PYTHON:-} python3 .venv/bin/python; do
        if "$p" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then python=$p; return; fi
    done
    python=python3
}

# What pack gathered comes before what the system has.
use_deps() {
    [ -d "$deps" ] || return 0
    export CPATH=$deps/include${CPATH:+:$CPATH} LIBRARY_PATH=$deps/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    export LD_LIBRARY_PATH=$deps/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$deps/python
}

# ---------------------------------------------------------------- checks

# check NAME LIMIT command...: runs it for at most LIMIT seconds; its verdict, time and last line go into the report, all of it into the log.
check() {
    local name=$1 limit=$2 start=$SECONDS status=0 verdict=ok text
    shift 2
    text=$(mktemp)
    printf '\n== %s: %s: %s\n' "$part" "$name" "$*" >>"$out/log"
    timeout "$limit" "$@" >"$text" 2>&1 </dev/null || status=$?
    cat "$text" >>"$out/log"
    conclude "$name" "$status" $((SECONDS - start)) "$text" "$limit"
}

# conclude NAME STATUS SECONDS FILE LIMIT
conclude() {
    local verdict=ok detail
    detail=$(grep -v '^[[:space:]]*$' "$4" | tail -1)
    [ "$2" = 0 ] || verdict="FAILED ($2)"
    [ "$2" != 124 ] || verdict="FAILED: no end within $5 s"
    report check "$part" "$1" "$verdict" "$3" "$detail"
    echo "  $1: $verdict, $3 s${detail:+: ${detail:0:140}}"
    [ "$2" = 0 ] || tail -25 "$4" | sed 's/^/    | /'
    rm -f "$4"
    [ "$2" = 0 ]
}

fact() { report fact "$part" "$1"; echo "  $1"; }

# What a part cannot do without: a check that cannot be made has failed.
missing() { report check "$part" "$1" FAILED 0 "$1 is not here"; echo "  FAILED: $1 is not here"; return 1; }

# ---------------------------------------------------------------- pack, build

# On a machine with a network: headers and libraries of cJSON and xxHash, cuBLAS's headers, pytest, the text, and the CPU's loss curve.
part_pack() {
    local new=$deps.new root=$deps.new/root
    rm -rf "$new"
    mkdir -p "$root" "$new/include" "$new/lib" "$new/python" "$new/cublas"
    (cd "$root" && apt-get download -q libcjson1 libcjson-dev libxxhash0 libxxhash-dev >/dev/null &&
        for deb in *.deb; do dpkg -x "$deb" .; done) || stop 1 "pack: apt-get could not download cJSON and xxHash"
    cp -rL "$root"/usr/include/* "$new/include/"
    cp -L "$root"/usr/lib/*/lib*.so* "$new/lib/"              # copies in the place of links, which may not travel
    "$(pip_python)" -m pip install -q --disable-pip-version-check --only-binary :all: --target "$new/python" pytest || stop 1 "pack: pip could not fetch pytest"
    local cublas
    cublas=$(make -s --eval='where-cublas: ; @echo $(CUBLAS)' where-cublas 2>/dev/null)
    [ -f "$cublas/include/cublasLt.h" ] || stop 1 "pack: no cublasLt.h here: scripts/setup_cuda.sh brings it"
    cp -r "$cublas/include" "$new/cublas/include"
    rm -rf "$root" "$deps"
    mv "$new" "$deps"
    [ -d "$data" ] || .venv/bin/python data/shakespeare.py || stop 1 "pack: no text in $data"
    make -j"$(nproc)" train_gpt2 || stop 1 "pack: train_gpt2 cannot be built"
    run_cpu "$deps/fp32_on_cpu" || stop 1 "pack: the CPU's run failed"
    rm -rf "$deps/fp32_on_cpu/ckpt"
    say "$deps: $(du -sh "$deps" | cut -f1). To carry: $(realpath --relative-to=. "$deps") and $data ($(du -sh "$data" | cut -f1))"
}

pip_python() {
    local p
    for p in .venv/bin/python python3; do "$p" -m pip --version >/dev/null 2>&1 && echo "$p" && return; done
    stop 1 "pack: no pip here"
}

# cuBLASLt's headers and library, where make finds none: pack's headers, and the library that PyTorch came with or that the system knows.
settle_cublas() {
    make_flags=(GPUS="$gpus")
    case " $(make -s lacking 2>/dev/null) " in *" toolkit "*) stop 1 "build: no nvcc here: scripts/setup_cuda.sh brings one" ;; *" cublas "*) ;; *) return ;; esac
    local library
    library=$({ python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null | sed 's|$|/*/lib/libcublasLt.so.13|'
                echo '/usr/local/cuda*/lib64/libcublasLt.so.13'; ldconfig -p | sed -n 's/.*libcublasLt.so.13.* => //p'; } |
              while read -r glob; do compgen -G "$glob"; done | head -1)
    [ -n "$library" ] && [ -f "$deps/cublas/include/cublasLt.h" ] || stop 1 "build: no cuBLASLt here (make help); headers come by pack, its library with PyTorch"
    ln -sfn "$(dirname "$library")" "$deps/cublas/lib"
    make_flags+=(CUBLAS="$deps/cublas")
}

part_build() {
    local targets=(./train_gpt2$suffix ./test_gpt2$suffix "$tests/test_kernels" "$tests/test_matmul" "$tests/test_collective" build/$where/flash.so ./train_gpt2)
    [ -z "${TARGETS:-}" ] || read -ra targets <<<"$TARGETS"
    settle_cublas
    fact "$(nproc) cores; $(make -s --eval='where: ; @echo Toolkit $(CUDA), cuBLASLt $(CUBLAS), NCCL $(or $(USE_NCCL),none)' "${make_flags[@]}" where)"
    fact "$("$(make -s --eval='where-cuda: ; @echo $(CUDA)' where-cuda)"/bin/nvcc --version | tail -2 | head -1)"
    check "make -j$(nproc), sm_$gpus" 420 make -j"$(nproc)" "${make_flags[@]}" "${targets[@]/#.\//}"
}

# Other parts need the programs; a fresh machine has none.
ensure_built() {
    [ $dry = 1 ] && return
    [ -x ./train_gpt2cu ] && [ -f build/cuda/flash.so ] && return
    say "nothing is built here yet"
    local caller=$part
    run_part build || stop 1 "the build failed: see $out/report.md"
    part=$caller
}

# ---------------------------------------------------------------- tests, sanitizer

part_tests() {
    check "wrappers of kernels/gpu.cuh" 60 "$tests/test_kernels" wrappers
    check "kernels" 180 "$tests/test_kernels"
    check "cuBLASLt" 120 "$tests/test_matmul"
    check "the model, every normaliser" 180 ./test_gpt2$suffix
    FLASH_ALL=$((1 - dry)) FLASH_SO=$PWD/build/$where/flash.so check "attention, every normaliser" 300 "$python" -m pytest -q -x -p no:cacheprovider dev/tests/test_flash.py
}

# What each kind of kernel runs in: dtype, model, --attn. One for each row of attention/flash_instances.h, and one for each size of head and block.
small_runs() {
    local two="layers=1,heads=2,channels=128,ffn=96"
    while read -r dtype model attn; do echo "$dtype ${model/TWO/$two} $attn"; done <<'TABLE'
bf16 TWO softmax
bf16 TWO softmax-recentered
bf16 TWO softmax-recentered-l1
bf16 TWO softplus-l1
bf16 TWO lssar
bf16 TWO sigmoid
bf16 TWO identity
bf16 TWO relu-l1
bf16 TWO relu2-n
bf16 TWO gelu-l1
bf16 TWO ssmax-pn
bf16 TWO softpick
bf16 TWO mish-l1+post=recenter
bf16 TWO sigmoid-logn-l1+post=reweight:15
fp32 TWO softmax-sink
fp32 TWO softmax-recentered
fp32 TWO lssar
bf16 layers=1,heads=2,channels=96,ffn=96 ssmax-bias
bf16 layers=1,heads=1,channels=128,ffn=96 softmax
bf16 layers=1,channels=64,block=gau relu2-T
bf16 layers=1,channels=64,block=gau lssar
TABLE
}

# The vocabulary that the shards need; the preset's own (GPT-2's) where they are Shakespeare's.
vocab() { echo "${VOCAB:+,vocab=$VOCAB}"; }

small_run() {      # tool dtype model attn
    local tool=() steps=2
    [ "$1" = none ] || tool=(compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20)
    "${tool[@]}" "$train" --train-data "$data/*_train_*.bin" --dtype "$2" --model "$3$(vocab)" --attn "$4" --batch 2 --seq-len $((dry ? 16 : 96)) \
        --steps $steps --warmup 1
}

part_sanitizer() {
    local tools="memcheck racecheck synccheck" tool dtype model attn folder i names=()
    [ $dry = 1 ] && tools=none
    [ $dry = 1 ] || command -v compute-sanitizer >/dev/null || { missing compute-sanitizer; return 1; }
    folder=$(mktemp -d)
    for tool in $tools; do
        while read -r dtype model attn; do
            while [ "$(jobs -rp | wc -l)" -ge 8 ]; do wait -n; done
            i=${#names[@]} names+=("$tool $dtype $attn ($model)")
            { start=$SECONDS; timeout 240 bash -c "$(declare -f small_run vocab); train='$train' data='$data' dry=$dry; small_run $tool $dtype $model $attn" \
                >"$folder/$i" 2>&1 </dev/null; echo "$? $((SECONDS - start))" >"$folder/$i.status"; } &
        done < <(small_runs)
        [ $dry = 1 ] || check "$tool of the wrappers" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 "$tests/test_kernels" wrappers
    done
    wait
    for i in "${!names[@]}"; do
        printf '\n== %s: %s\n' "$part" "${names[$i]}" >>"$out/log"
        cat "$folder/$i" >>"$out/log"
        read -r status seconds <"$folder/$i.status"
        conclude "${names[$i]}" "$status" "$seconds" "$folder/$i" 240
    done
    rm -rf "$folder"
}

# ---------------------------------------------------------------- runs on text

# The same small model everywhere: heads of 64, 2 M parameters and the embedding.
recipe() {
    if [ $dry = 1 ]; then echo "--model layers=1,heads=2,channels=96,ffn=64$(vocab) --batch 2 --seq-len 16 --steps ${STEPS:-4} --warmup 2 --lr 1e-3"
    else echo "--model layers=4,heads=4,channels=256,ffn=688$(vocab) --batch 8 --seq-len 256 --steps ${STEPS:-120} --warmup 20 --lr 1e-3"; fi
}

run() {            # program folder flags...
    local program=$1 folder=$2
    shift 2
    # shellcheck disable=SC2046
    "$program" --train-data "$data/*_train_*.bin" $(recipe) --sample-every 0 --val-every 0 --ckpt-every 0 --out "$folder" "$@"
}

# The CPU's run, with its recipe beside it.
run_cpu() { run ./train_gpt2 "$1" --dtype fp32 && recipe >"$1/recipe"; }

in_shell() { declare -f; echo "data='$data' dry=$dry train='$train'"; }

part_train() {
    local folder cpu
    folder=$(mktemp -d)
    cpu="$deps/fp32_on_cpu"
    if [ "$(cat "$cpu/recipe" 2>/dev/null)" = "$(recipe)" ]; then
        cp -r "$cpu" "$folder/"
        fact "the CPU's run was made by pack"
    else
        check "float32 on the CPU" 400 bash -c "$(in_shell); run_cpu '$folder/fp32_on_cpu'"
    fi
    check "float32 by ${train##*/}" 120 bash -c "$(in_shell); run '$train' '$folder/fp32' --dtype fp32"
    check "bf16 by ${train##*/}" 120 bash -c "$(in_shell); run '$train' '$folder/bf16' --dtype bf16"
    report curves "$part" "$folder/fp32_on_cpu" "$folder/fp32" "$folder/bf16"
    "$python" scripts/plot.py "$folder/fp32_on_cpu" "$folder/fp32" "$folder/bf16" --out "$out/loss.png" >>"$out/log" 2>&1 || fact "no picture: matplotlib is not here"
    rm -rf "$folder"
}

part_determinism() {
    local folder dtype flag deterministic="--deterministic 1" free="--deterministic 0"
    [[ $("$train" --help) == *--deterministic* ]] || deterministic=--shuffle free=      # the CPU's trainer, in a dry run, is deterministic as it is
    folder=$(mktemp -d)
    export STEPS=$((dry ? 4 : 30))
    for dtype in bf16 fp32; do
        for flag in a b; do
            check "$dtype, run $flag" 60 bash -c "$(in_shell); run '$train' '$folder/$dtype $flag' --dtype $dtype $deterministic"
        done
        report same "$part" "$dtype: two runs" "$folder/$dtype a" "$folder/$dtype b"
        check "$dtype, half a run" 60 bash -c "$(in_shell); run '$train' '$folder/$dtype c' --dtype $dtype $deterministic --steps $((STEPS / 2))"
        check "$dtype, the rest" 60 bash -c "$(in_shell); run '$train' '$folder/$dtype c' --dtype $dtype $deterministic --resume"
        report same "$part" "$dtype: resumed half-way" "$folder/$dtype a" "$folder/$dtype c"
    done
    check "bf16, --deterministic 0" 60 bash -c "$(in_shell); run '$train' '$folder/free' --dtype bf16 $free"
    fact "with --deterministic 0 a step takes $(step_ms "$folder/free") ms, without it $(step_ms "$folder/bf16 a") ms (medians of small steps)"
    unset STEPS
    rm -rf "$folder"
}

# scripts/launch.sh, as a program for run().
two_processes() { scripts/launch.sh 2 "$train" "$@"; }

# The same batches, so the same losses but for the order of sums.
part_several() {
    local folder word zero batch=$((dry ? 1 : 4))
    if [ $dry = 0 ] && [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then end="not measured: fewer than two GPUs"; fact "fewer than two GPUs: not measured"; return; fi
    for word in sums bf16; do check "sums of two processes: $word" 60 scripts/launch.sh 2 "$tests/test_collective" "$word"; done
    folder=$(mktemp -d)
    export STEPS=$((dry ? 4 : 10))
    check "one process" 120 bash -c "$(in_shell); run '$train' '$folder/one' --dtype fp32"
    for zero in 0 1; do
        check "two processes, --zero $zero" 120 bash -c "$(in_shell); run two_processes '$folder/zero $zero' --dtype fp32 --batch $batch --zero $zero"
        report close "$part" "losses, --zero $zero" 1e-5 "$folder/one" "$folder/zero $zero"
    done
    unset STEPS
    rm -rf "$folder"
}

step_ms() { python3 -c 'import json, statistics, sys; print(round(statistics.median(json.loads(line)["ms"] for line in open(sys.argv[1])), 2))' "$1/metrics.jsonl"; }

# ---------------------------------------------------------------- timings

timing() {         # program of dev/bench, its flags
    local flags=()
    [ $dry = 1 ] && flags=(--dry-run)
    check "$part" $((budget + 90)) "$python" "dev/bench/$1" "$out" "$part" --budget "$budget" "${flags[@]}" "${@:2}"
}

part_attention() { timing attention_gpu.py ${FLASH_LIBRARY:+--library "$FLASH_LIBRARY"} ${TIMING_FLAGS:-}; }
part_others() { timing attention_gpu.py ${FLASH_LIBRARY:+--library "$FLASH_LIBRARY"} ${TIMING_FLAGS:-}; }
part_step() { timing gpu_step.py --ours "$train" ${TIMING_FLAGS:-}; }
part_memory() { timing gpu_step.py --ours "$train" ${TIMING_FLAGS:-}; }

# ---------------------------------------------------------------- main

has_gpu() { [ $dry = 1 ] || nvidia-smi -L >/dev/null 2>&1; }

run_part() {
    local start=$SECONDS end=done
    part=$1
    echo "== $part"
    if [ "$part" = pack ]; then part_pack; return; fi
    report begin "$part"
    if [ "$part" != build ] && ! has_gpu; then
        report end "$part" "not measured: no GPU"
        echo "gpu_check: $part: no GPU: not measured"
        return
    fi
    [ $dry = 0 ] || fact "a dry run on the CPU, which measures nothing"
    [ "$part" = build ] || ensure_built
    part_"$part" || end=failed
    fact "$part took $((SECONDS - start)) s"
    report end "$part" "$end"
    report status "$part"
}

for word in "$@"; do
    case " $PARTS " in *" $word "*) ;; *) stop 2 "$word: no such part; there are $PARTS" ;; esac
done
[ $# -gt 0 ] || set -- $DEFAULT_PARTS

mkdir -p "$out"
if [ "$out" != "$home" ] && [ ! -e "$out/report.json" ] && [ -e "$home/report.json" ]; then cp "$home/report.json" "$out/"; fi
[ "$*" = pack ] || use_deps
find_python
for word in "$@"; do run_part "$word"; done
ran=$(printf '%s\n' "$@" | grep -vx pack)
[ -n "$ran" ] || exit 0
# shellcheck disable=SC2086
report status $ran
status=$?
sed -n '3,/^$/p' "$out/report.md"
say "$out/report.md"
exit $status
