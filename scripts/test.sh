#!/usr/bin/env bash
# Sets up, builds with warnings as errors, and tests.
#
#   scripts/test.sh                  what CI runs: 10 minutes on two cores of a Zen 4, after downloads
#   scripts/test.sh --all            all orders and shapes, mutations, and long fuzzing: hours
#   scripts/test.sh [--all] GROUP... only these groups; `scripts/test.sh --groups` lists them
#
# Without --all, the largest tests run only some of their cases, which the commit hash selects (dev/draw.py);
# DRAW=COMMIT repeats the draw of another commit. The last lines name the skipped tests and give the seconds of each
# group; the very last is "N passed, N failed". The exit status is 0 if none failed and some passed.
#
# Example: scripts/test.sh c
# See dev/notes/tests.md.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."
export PATH       # under env -i, bash sets it without exporting it
export WERROR=1    # for every make, including those that tests start, so that nothing is built twice
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}    # tests share the cores: a waiting thread leaves its core
PYTEST=(.venv/bin/python -m pytest -q -rs -p no:cacheprovider)
jobs=$(nproc)

# After FIRST, two lanes run in parallel: the Python tests in one, all other groups in the other.
FIRST="build format"
LANE_1="pytest flash soak"
LANE_2="c cuda san san_cuda races fuzz mutate variants san_pytest aarch64"

all=0 wanted=
for word; do
    case "$word" in
        --all) all=1 ;;
        --groups) echo "$FIRST $LANE_2 $LANE_1"; exit ;;
        -*) echo "test.sh: $word: unknown flag (--help)" >&2; exit 2 ;;
        *) [[ " $FIRST $LANE_2 $LANE_1 " == *" $word "* ]] || { echo "test.sh: $word: no such group (--groups)" >&2; exit 2; }
           wanted+=" $word" ;;
    esac
done
if [ $all = 1 ]; then
    unset DRAW
    export FLASH_ALL=1 CUDA_ON_CPU_LONG=1 MACHINES_LONG=1 VOCABULARIES_LONG=1 SOAK=21600 FOREIGN=all CONTAINER_LONG=1 \
        CUDA_BUILD=all GPU_REHEARSAL=1 LM_EVAL=1 LLAMA_CPP=${LLAMA_CPP:-build/llama_cpp/bin/python}
else
    export DRAW=${DRAW:-$(git rev-parse HEAD 2>/dev/null || echo none)}
    echo "cases drawn by $DRAW"
fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# ---------------------------------------------------------------- counting

# count GROUP PASSED FAILED SKIPPED: adds to the group's counts.
count() { echo "$2 $3 $4" >>"$logs/$1.count"; }

# Runs a command whose output has lines "N passed, N failed". A command that fails without such a line counts as one
# failed test.
c_tests() {
    local group=$1 status=0 p f s
    shift
    "$@" </dev/null >"$logs/$group.out" 2>&1 || status=$?
    cat "$logs/$group.out"
    read -r p f s < <(awk '/^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3 } /^left out: / { s++ }
                           END { print p + 0, f + 0, s + 0 }' "$logs/$group.out")
    [ "$status" = 0 ] || [ "$f" -gt 0 ] || f=1
    count "$group" "$p" "$f" "$s"
}

# Runs pytest. An error outside a test, such as a module that cannot be imported, counts as one failed test.
python_tests() {
    local group=$1 status=0 p f s
    shift
    "${PYTEST[@]}" --junitxml="$logs/$group.xml" "$@" </dev/null || status=$?
    read -r p f s < <(.venv/bin/python - "$logs/$group.xml" <<'PY'
import sys, xml.etree.ElementTree as xml
try:
    suites = list(xml.parse(sys.argv[1]).getroot())
except (OSError, xml.ParseError):
    suites = []
total, failures, errors, skipped = (sum(int(s.get(key)) for s in suites) for key in ("tests", "failures", "errors", "skipped"))
print(max(0, total - failures - errors - skipped), failures + errors, skipped)
PY
)
    [ "$status" = 0 ] || [ "$f" -gt 0 ] || f=1
    count "$group" "$p" "$f" "$s"
}

# Counts a command as one test, which passes if the exit code is 0.
one_test() { local group=$1; shift; if "$@" </dev/null; then count "$group" 1 0 0; else count "$group" 0 1 0; fi; }

# Runs each argument as a command line, and continues after a failure.
each() {
    local words status=0
    for words; do
        echo "== $words"
        env $words || { status=1; echo "to repeat: $words"; }
    done
    return $status
}

# ---------------------------------------------------------------- the groups

group_build() {
    local targets
    targets=(all $(make -s list_tests) test_gpt2 build/tests/logits build/faults/train_gpt2)
    # What compiles longest comes first, so that no core is idle in the end.
    [ -z "$cuda" ] || targets=(build/on_cpu/tests/test_{kernels,matmul,collective} {train,eval,test}_gpt2cu_on_cpu
                               build/on_cpu/flash.so "${targets[@]}")
    make -j"$jobs" "${targets[@]}" || return
    count build 1 0 0
}

group_format() {
    one_test format .venv/bin/clang-format --dry-run -Werror $(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')
}

group_c() { c_tests c make -j"$jobs" -O -s -k test_c; }

# Builds of other kinds, of which CI draws one: for one normalizer, which test_make_attn compares with the usual build;
# with a CBLAS; with neither library; with clang. test_gpt2 tests the last three on the small vocabulary.
make_attn=dev/tests/test_normalizers.py::test_make_attn
group_variants() {
    local name chosen="attn blas loops"
    ! echo '#include <omp.h>' | clang -fsyntax-only -x c - 2>/dev/null || chosen+=" clang"
    [ $all = 1 ] || chosen=$(dev/draw.py 1 $chosen)
    for name in $chosen; do
        if [ "$name" = attn ]; then python_tests variants "$make_attn"; else c_tests variants variant_"$name"; fi
    done
}
variant() {
    local build=build/$1
    shift
    echo "== test_gpt2 in $build ($*)"
    make -j"$jobs" BUILD="$build" "$@" "$build/test_gpt2" >/dev/null && each "$build/test_gpt2 v97" "$build/test_gpt2 matmul"
}
variant_blas() { variant blas ONEDNN=0 MPI=0; }
variant_loops() { variant plain ONEDNN=0 BLAS=0 MPI=0; }
variant_clang() {
    local targets=(all)
    [ $all = 0 ] || targets+=(attn_c)
    make -j"$jobs" CC=clang BUILD=build/clang "${targets[@]}" >/dev/null && variant clang CC=clang
}

group_san() { c_tests san sanitized; }
sanitized() {
    local tests="checkpoint metrics mixture normalizer options random safetensors schedule shards" programs
    export LSAN_OPTIONS="suppressions=$PWD/dev/faults/lsan.supp:print_suppressions=0"
    [ $all = 0 ] || export ASAN_OPTIONS=fast_unwind_on_malloc=0    # complete stacks, for test_process with Open MPI
    [ $all = 0 ] || tests+=" attention gradients memory process tokenizer vecmath"
    programs=($(printf 'build/san/tests/test_%s ' $tests))
    [ $all = 1 ] || programs=($(dev/draw.py 4 "${programs[@]}"))
    make -j"$jobs" SAN=1 build/san/test_gpt2 "${programs[@]}" &&
        each "build/san/test_gpt2 v97" "build/san/test_gpt2 matmul" "build/san/test_gpt2 kv_heads=1" "${programs[@]}"
}

# The trainer's tests, with the programs in build/san. CI runs this group or san_cuda.
group_san_pytest() {
    [ $all = 1 ] || [ -n "$wanted" ] || [ -z "$cuda" ] || [ "$(dev/draw.py 1 san_pytest san_cuda)" = san_pytest ] || return 0
    make -j"$jobs" SAN=1 build/san/{train_gpt2,sample_gpt2,tests/logits} || return
    DRAW_ONE_IN=5 TRAIN_GPT2=build/san/train_gpt2 python_tests san_pytest dev/tests/test_{errors,order,resume,sample,usage}.py -n 2 --dist loadfile \
        -k "not point and not 2_gib and not kill_9 and not eval_gpt2"
}

# The CUDA source on the CPU. Its programs take long to compile, so CI builds at most one of them.
group_san_cuda() {
    local name chosen="test_kernels test_matmul train_gpt2"
    [ -n "$cuda" ] || return 0
    [ $all = 1 ] || [ -n "$wanted" ] || [ "$(dev/draw.py 1 san_pytest san_cuda)" = san_cuda ] || return 0
    [ $all = 1 ] || chosen=$(dev/draw.py 1 $chosen)
    for name in $chosen; do
        case $name in test_*) c_tests san_cuda kernels_sanitized "$name" ;; *) trainer_sanitized ;; esac
    done
}
kernels_sanitized() { make -j"$jobs" SAN=1 "build/san/on_cpu/tests/$1" && each "build/san/on_cpu/tests/$1"; }
trainer_sanitized() {
    make -j"$jobs" SAN=1 INSTANCES="exp float" build/san/train_gpt2cu_on_cpu || return
    TRAIN_GPT2CU=build/san/train_gpt2cu_on_cpu python_tests san_cuda dev/tests/test_cuda.py -k "late or masks or recomputing"
}

# The CUDA source, run on the CPU by dev/cuda_on_cpu: all orders of threads, blocks and streams, and both times of a cp.async.
group_cuda() {
    local order copy orders=() words=(tied_v97_T33 softmax_gau_T33 lssar_gau_T33 T33_d48 T64_d) tests
    [ -n "$cuda" ] || return 0
    tests=(build/on_cpu/tests/test_kernels build/on_cpu/tests/test_matmul "./test_gpt2cu_on_cpu ssmax_tied_v97_T33")
    for order in forward reverse random greedy; do
        for copy in issue wait; do orders+=("$order,$copy"); done
    done
    if [ $all = 1 ]; then
        words=("")
    else
        orders=($(dev/draw.py 1 "${orders[@]}"))
        words=(T33_d48 T64_d $(dev/draw.py 2 $(cases _tied_v97_T33) $(cases _untied_v97_T33)) $(dev/draw.py 2 $(cases _gau_T33)))
    fi
    c_tests cuda each build/on_cpu/tests/test_{collective,kernels,matmul} "${words[@]/#/./test_gpt2cu_on_cpu }"
    for order in "${orders[@]}"; do
        c_tests cuda each "${tests[@]/#/CUDA_ON_CPU_ORDER=${order%,*} CUDA_ON_CPU_COPY=${order#*,} CUDA_ON_CPU_STREAMS=any }"
    done
}

# The names of the reference's cases that end so.
cases() { sed -nE "s/^case=(\w*$1) .*/\1/p" dev/reference/fixtures/cases.txt; }

group_races() {
    [ -n "$cuda" ] || return 0
    [ $all = 0 ] || { python_tests races dev/tests/test_races.py -n 2; return; }
    python_tests races dev/tests/test_races.py -k "$(dev/draw.py 1 test_kernels test_attention test_trainer)"
}

group_fuzz() {
    local drawn=()
    if command -v clang >/dev/null && ls "$(clang -print-resource-dir)"/lib/linux/libclang_rt.fuzzer-* >/dev/null 2>&1; then
        [ $all = 1 ] || drawn=($(dev/draw.py 4 $(cd dev/fuzz && ls fuzz_*.c | sed 's/\.c$//')))
        one_test fuzz dev/fuzz/run.sh $((all ? 900 : 7)) "${drawn[@]}"
    else
        echo "left out: fuzzing, because clang or its libFuzzer is missing (scripts/setup.sh --test installs it if it can)"
        count fuzz 0 0 1
    fi
}

# Only in the long run, or if they are named: mutations take most of an hour, and the other downloads a cross compiler.
group_mutate() { [ $all = 0 ] && [ -z "$wanted" ] || c_tests mutate dev/mutate/mutate.py --jobs "$jobs" --minutes 40; }
group_aarch64() { [ $all = 0 ] && [ -z "$wanted" ] || c_tests aarch64 dev/aarch64.sh; }

# The tests in Python, except those of races and variants. With --all, the fused attention and the soak are groups of their
# own. There are more processes than cores because many tests wait. dev/conftest.py orders the files.
group_pytest() {
    local apart=(--ignore=dev/tests/test_races.py --deselect="$make_attn")
    [ $all = 0 ] || apart+=(--ignore=dev/tests/test_{flash,soak}.py)
    python_tests pytest --durations=15 -n 4 --dist loadfile --no-loadscope-reorder dev/tests dev/cuda_on_cpu \
        "${apart[@]}"
}
group_flash() { [ $all = 0 ] && [ -z "$wanted" ] || python_tests flash dev/tests/test_flash.py -n 2 --dist worksteal; }
group_soak() { [ $all = 0 ] && [ -z "$wanted" ] || python_tests soak -s dev/tests/test_soak.py; }

# ---------------------------------------------------------------- the run

# Runs a group, and prints its output in one piece.
run_group() {
    local name=$1 start=$SECONDS status=0
    [ -z "$wanted" ] || [ "$name" = build ] || [[ "$wanted " == *" $name "* ]] || return 0
    group_"$name" >"$logs/$name.log" 2>&1 || status=$?
    [ $status = 0 ] || [ -e "$logs/$name.count" ] || count "$name" 0 1 0
    echo $((SECONDS - start)) >"$logs/$name.seconds"
    { echo "== $name"; grep -vE '^ +(CC|CXX|LD|NVCC) |^ok ' "$logs/$name.log"; } >"$logs/$name.shown"
    flock "$logs" cat "$logs/$name.shown"
    return $status
}

finish() {
    local name passed=0 failed=0 skipped=0 p f s seconds=
    cat "$logs"/*.log | grep -E '^SKIPPED|^left out: ' | sort -u
    for name in $FIRST $LANE_2 $LANE_1; do
        [ ! -e "$logs/$name.seconds" ] || seconds+=" $name $(cat "$logs/$name.seconds"),"
        [ -e "$logs/$name.count" ] || continue
        while read -r p f s; do passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s)); done <"$logs/$name.count"
        awk -v name="$name" '{ f += $2 } END { if (f) print "FAILED: " f " in the group " name }' "$logs/$name.count"
    done
    [ $((passed + failed)) -gt 0 ] || failed=1
    echo "seconds:$seconds in all $SECONDS"
    [ $all = 1 ] || echo "cases drawn by $DRAW"
    echo "$skipped skipped"
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
    exit
}

scripts/setup.sh --test || { count build 0 1 0; finish; }
scripts/setup_cuda.sh || count build 0 1 0            # CUDA's headers, for its source to run on the CPU
echo "set up in $SECONDS s"
SECONDS=0
cuda=$(make -s lacking | grep -qE 'toolkit|cublas' || echo 1)

for name in $FIRST; do run_group "$name" || [ "$name" != build ] || finish; done
set -m    # without job control, a shell's background job ignores Ctrl-C, and tests send that signal to programs
{ for name in $LANE_1; do run_group "$name"; done; } &
lane=$!
trap 'kill -- -$lane; exit 130' INT TERM
for name in $LANE_2; do run_group "$name"; done
wait $lane
finish
