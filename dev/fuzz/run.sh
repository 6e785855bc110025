#!/bin/sh
# dev/fuzz/run.sh SECONDS [TARGET...]   fuzzes the readers for SECONDS in all, divided among the targets
#
# Builds each dev/fuzz/fuzz_*.c (or the named ones) with clang, libFuzzer, AddressSanitizer and UBSan, together with the
# files in its line "// Sources:". Seeds come from seeds.py. New inputs are kept in build/fuzz/corpus, where the next
# run continues. The exit status is the verdict. To add a target, write fuzz_NAME.c with that line, and add its seeds to
# seeds.py.
set -eu
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
case ${1:-} in "" | 0* | *[!0-9]*)
    echo "dev/fuzz/run.sh: expected SECONDS, a whole number above 0, found \"${1:-}\" (--help)" >&2; exit 2 ;;
esac
seconds=$1
shift
CDPATH='' cd "$(dirname "$0")/../.."
command -v clang > /dev/null || { echo "dev/fuzz/run.sh: clang is not installed. Debian: apt install clang" >&2; exit 2; }
[ $# -gt 0 ] || set -- $(CDPATH='' cd dev/fuzz && ls fuzz_*.c | sed 's/\.c$//')
each=$((seconds / $# > 0 ? seconds / $# : 1))
out=build/fuzz
python3 dev/fuzz/seeds.py $out/corpus

for target; do
    mkdir -p $out/corpus/$target
    clang -std=gnu11 -O1 -g -I. -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -o $out/$target \
        dev/fuzz/$target.c $(sed -n 's|^// Sources: ||p' dev/fuzz/$target.c) -lcjson -lxxhash -lm
done

status=0
for target; do
    if $out/$target -max_total_time=$each -max_len=8192 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -dict=dev/fuzz/words.dict -artifact_prefix=$out/$target- $out/corpus/$target > $out/$target.log 2>&1; then
        echo "$target: $(awk '/^stat::number_of_executed_units/ { n = $2 } /cov: / { sub(/.*cov: /, ""); c = $1 }
            END { print n " executions, " c " edges covered, no finding" }' $out/$target.log)"
    else
        status=1
        tail -n 40 $out/$target.log
        echo "$target: FAILED. The input is the $out/$target-* named above; to repeat it: $out/$target FILE"
    fi
done
exit $status
