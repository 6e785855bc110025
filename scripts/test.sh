#!/usr/bin/env bash
# Sets up, builds with warnings as errors and runs every test. The last line is "N passed, N failed", all tests together;
# the exit status is 0 when none failed and some passed.
set -uo pipefail
cd "$(dirname "$0")/.."
export WERROR=1    # of every make, those of tests too: what is built is not built again
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

passed=0 failed=0
add() { passed=$((passed + $1)) failed=$((failed + $2)); }

finish() {
    [ $((passed + failed)) -gt 0 ] || failed=1
    echo
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
    exit
}

# Adds up the log's lines "N passed, N failed", one a test program. A command that failed without saying so counts as one.
count_c() {
    local status=$1 p f
    read -r p f < <(awk '/^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3 } END { print p + 0, f + 0 }' "$2")
    [ "$status" = 0 ] || [ "$f" -gt 0 ] || f=1
    add "$p" "$f"
}

# Reads pytest's report. An error outside a test (a module that cannot be imported) counts as a failed one.
count_pytest() {
    local status=$1 p f
    read -r p f < <(.venv/bin/python - "$2" <<'PY'
import sys, xml.etree.ElementTree as xml
try:
    suites = list(xml.parse(sys.argv[1]).getroot())
except (OSError, xml.ParseError):
    suites = []
total, failures, errors, skipped = (sum(int(s.get(key)) for s in suites) for key in ("tests", "failures", "errors", "skipped"))
print(max(0, total - failures - errors - skipped), failures + errors)
PY
)
    [ "$status" = 0 ] || [ "$f" -gt 0 ] || f=1
    add "$p" "$f"
}

scripts/setup.sh --test || { add 0 1; finish; }
scripts/setup_cuda.sh || add 0 1            # CUDA's headers, for its source to run on the CPU

echo "== make WERROR=1"
make -j"$(nproc)" || { add 0 1; finish; }

echo "== make test"
make -k -j"$(nproc)" test </dev/null 2>&1 | tee "$logs/c"
count_c "${PIPESTATUS[0]}" "$logs/c"

# test_gpt2 on the small vocabulary, built in another way: `variant NAME make-flags...`
variant() {
    local build=build/$1
    shift
    echo "== test_gpt2 in $build ($*)"
    make -j"$(nproc)" BUILD="$build" "$@" "$build/test_gpt2" </dev/null >"$logs/c" 2>&1 &&
        "$build/test_gpt2" v97 >>"$logs/c" 2>&1 && "$build/test_gpt2" matmul >>"$logs/c" 2>&1
    count_c $? "$logs/c"
    grep -E "FAILED|rror|passed, " "$logs/c"
}
variant blas ONEDNN=0 MPI=0
variant plain ONEDNN=0 BLAS=0 MPI=0
variant san SAN=1

echo "== the quick C tests, and those of the kernels, in build/san (SAN=1)"
sanitized() {
    local status=0 name programs=()
    for name in attention checkpoint metrics normalizer options random safetensors schedule shards; do programs+=("build/san/tests/test_$name"); done
    programs+=(build/san/on_cpu/tests/test_kernels build/san/on_cpu/tests/test_matmul)
    make -j"$(nproc)" SAN=1 "${programs[@]}" || return
    for name in "${programs[@]}"; do
        echo "== $name"
        ASAN_OPTIONS=fast_unwind_on_malloc=0 LSAN_OPTIONS="suppressions=$PWD/dev/faults/lsan.supp:print_suppressions=0" "$name" || status=1
    done
    return $status
}
sanitized </dev/null >"$logs/c" 2>&1
count_c $? "$logs/c"
grep -E "^== |FAILED|rror|passed, " "$logs/c"

echo "== dev/fuzz/run.sh 30"
if command -v clang >/dev/null && ls "$(clang -print-resource-dir)"/lib/linux/libclang_rt.fuzzer-* >/dev/null 2>&1; then
    dev/fuzz/run.sh 30 </dev/null && add 1 0 || add 0 1
else
    echo "clang or its libFuzzer is missing, so nothing was fuzzed (scripts/setup.sh --test installs it if it can)"
fi

echo "== dev/mutate/mutate.py --draw 3"
env -u WERROR dev/mutate/mutate.py --draw 3 </dev/null 2>&1 | tee "$logs/c"
count_c "${PIPESTATUS[0]}" "$logs/c"

# The CUDA programs' own source, run on the CPU by dev/cuda_on_cpu.
echo "== the CUDA source on the CPU"
cuda() {
    local status=0 words order copy test
    make -j"$(nproc)" train_gpt2cu_on_cpu test_gpt2cu_on_cpu build/on_cpu/flash.so || return
    for words in tied_v97_T33 softmax_gau_T33 lssar_gau_T33 T33_d48 T64_d; do ./test_gpt2cu_on_cpu "$words" || status=1; done
    make -k test_on_cpu || status=1
    for order in forward reverse random greedy; do      # of threads, blocks and streams, and both times of a cp.async
        for copy in issue wait; do
            for test in "build/on_cpu/tests/test_kernels" "build/on_cpu/tests/test_matmul" "./test_gpt2cu_on_cpu ssmax_tied_v97_T33"; do
                echo "== $order $copy $test"
                CUDA_ON_CPU_ORDER=$order CUDA_ON_CPU_COPY=$copy CUDA_ON_CPU_STREAMS=any $test || status=1
            done
        done
    done
    return $status
}
cuda </dev/null >"$logs/c" 2>&1
count_c $? "$logs/c"
grep -E "^== |FAILED|rror:|passed, " "$logs/c"

echo "== the program's tests in build/san (SAN=1)"
make -j"$(nproc)" SAN=1 build/san/train_gpt2 build/san/sample_gpt2 </dev/null &&
    TRAIN_GPT2=build/san/train_gpt2 .venv/bin/python -m pytest -q --junitxml="$logs/pytest.xml" dev/tests/test_errors.py dev/tests/test_order.py \
        dev/tests/test_resume.py dev/tests/test_sample.py -n 2 --dist loadfile -k "not point and not 2_gib and not by_fault and not kill_9" </dev/null
count_pytest $? "$logs/pytest.xml"

echo "== the CUDA trainer in build/san/softmax (SAN=1 ATTN=softmax)"
make -j"$(nproc)" SAN=1 ATTN=softmax build/san/softmax/train_gpt2cu_on_cpu </dev/null &&
    TRAIN_GPT2CU=build/san/softmax/train_gpt2cu_on_cpu .venv/bin/python -m pytest -q --junitxml="$logs/pytest.xml" dev/tests/test_cuda.py \
        -n 2 -k "late or masks or recomputing" </dev/null
count_pytest $? "$logs/pytest.xml"

echo "== dev/tests/test_races.py"          # alone: its tests take long, and one process would have them all
make -j"$(nproc)" TSAN=1 build/tsan/on_cpu/tests/test_kernels build/tsan/test_gpt2cu_on_cpu build/tsan/train_gpt2cu_on_cpu </dev/null
.venv/bin/python -m pytest -q -n 2 --junitxml="$logs/pytest.xml" dev/tests/test_races.py </dev/null
count_pytest $? "$logs/pytest.xml"

echo "== pytest"
make -j"$(nproc)" build/tests/logits </dev/null && make -j"$(nproc)" FAULTS=1 build/faults/train_gpt2 </dev/null
.venv/bin/python -m pytest -q -rs --durations=10 -n 2 --dist loadfile --junitxml="$logs/pytest.xml" dev/tests dev/cuda_on_cpu \
    --ignore dev/tests/test_races.py </dev/null
count_pytest $? "$logs/pytest.xml"
finish
