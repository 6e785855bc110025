#!/bin/sh
# dev/fuzz/run.sh SECONDS [TARGET...]   fuzzes the readers for SECONDS in all, divided among the targets
#
# Builds each dev/fuzz/fuzz_*.c (or the named ones) with clang, libFuzzer, AddressSanitizer and UBSan. Seeds come from
# seeds.py. New inputs are kept in build/fuzz/corpus, where the next run continues. The exit status is the verdict. To
# add a target, write fuzz_NAME.c, add its seeds to seeds.py, and add the sources that it needs to the list below.
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

# Each source is compiled once; a target takes what it needs from the archive.
flags="-std=gnu11 -O1 -g1 -I. -Wall -Wextra -fsanitize=address,undefined -fno-sanitize-recover=all"
rm -rf $out/objects
for source in attention/list.c attention/normalizer.c data/shards.c math/random.c model/*.c run/metrics.c text/*.c \
    runtime/activity.c runtime/error.c runtime/file.c runtime/human.c runtime/json.c runtime/number.c runtime/own.c \
    runtime/spelling.c runtime/utf8.c; do
    mkdir -p $out/objects/${source%/*}
    echo $source
done | xargs -P "$(nproc)" -I SOURCE clang $flags -fsanitize=fuzzer-no-link -c -o $out/objects/SOURCE.o SOURCE
ar rcs $out/objects/library.a $out/objects/*/*.o
for target; do
    mkdir -p $out/corpus/$target
    echo $target
done | xargs -P "$(nproc)" -I TARGET clang $flags -fsanitize=fuzzer -o $out/TARGET dev/fuzz/TARGET.c $out/objects/library.a -lcjson -lxxhash -lm

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
