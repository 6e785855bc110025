#!/usr/bin/env bash
# Builds the CPU programs for aarch64 and tests them under qemu-user.
#
#   dev/aarch64.sh    the quick C tests, test_gpt2's small cases with T = 33, a run that resumes
#
# Nothing is installed: Debian's cross compiler, qemu and the libraries for arm64 are unpacked into build/aarch64/root
# (0.6 GB, of which 0.1 GB are downloaded, once). The programs have neither oneDNN nor MPI.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."
out=$PWD/build/aarch64 root=$PWD/build/aarch64/root
PACKAGES="gcc-12-aarch64-linux-gnu cpp-12-aarch64-linux-gnu binutils-aarch64-linux-gnu libgcc-12-dev-arm64-cross
    libgcc-s1-arm64-cross libgomp1-arm64-cross libc6-dev-arm64-cross libc6-arm64-cross linux-libc-dev-arm64-cross
    qemu-user-static libcjson-dev:arm64 libcjson1:arm64 libxxhash-dev:arm64 libxxhash0:arm64"
TESTS="metrics mixture normalizer options random rope safetensors schedule shards vecmath"

# apt with an architecture and lists of its own, so that the system's stay as they are.
download() {
    local apt=$out/apt
    mkdir -p "$apt"/{state/lists/partial,cache/archives/partial,debs}
    touch "$apt/status"
    cat > "$apt/apt.conf" <<CONF
Dir::State "$apt/state"; Dir::State::status "$apt/status"; Dir::Cache "$apt/cache";
APT::Architectures { "amd64"; "arm64"; }; APT::Sandbox::User "";
CONF
    (cd "$apt/debs" && export APT_CONFIG=$apt/apt.conf && apt-get -qq update && apt-get -qq download $PACKAGES)
    for deb in "$apt"/debs/*.deb; do dpkg-deb -x "$deb" "$root.part"; done
    mv "$root.part" "$root"
    rm -rf "$apt"
}

# make for aarch64. The cross assembler's own libraries lie in the root, too.
cross_make() {
    local cc="$root/usr/bin/aarch64-linux-gnu-gcc-12 --sysroot=$root -isystem $root/usr/include"
    LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu make -s -j"$(nproc)" WERROR=1 BUILD=build/aarch64 MARCH=armv8-a \
        MPI=0 ONEDNN=0 BLAS=0 CC="$cc -L$root/usr/lib/aarch64-linux-gnu" "$@"
}

# Runs a program for aarch64.
emulate() {
    echo "== $*"
    OMP_NUM_THREADS=2 "$root/usr/bin/qemu-aarch64-static" -L "$root/usr/aarch64-linux-gnu" \
        -E LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu" "$@"
}

# Ten steps and ten more end with the bits of twenty.
resume() {
    local data=$out/run flags
    rm -rf "$data"
    mkdir -p "$data"
    .venv/bin/python - "$data" <<'PY'
import pathlib, sys
sys.path.insert(0, "dev/tests")
import trainer
trainer.make_data(pathlib.Path(sys.argv[1]))
PY
    flags="--train-data $data/*_train_*.bin --model layers=2,heads=2,channels=16,ffn=24,vocab=97 --attn ssmax"
    flags+=" --seq-len 8 --warmup 5"
    set -f    # the trainer expands the pattern
    emulate "$out/train_gpt2" $flags --steps 20 --out "$data/whole" > "$data/log"
    emulate "$out/train_gpt2" $flags --steps 10 --out "$data/parts" >> "$data/log"
    emulate "$out/train_gpt2" $flags --steps 20 --out "$data/parts" --resume >> "$data/log"
    set +f
    if cmp "$data"/{whole,parts}/ckpt/step-00000020/model.safetensors; then echo "1 passed, 0 failed"
    else echo "0 passed, 1 failed"; return 1; fi
}

[ -d "$root" ] || download
# gcc 12 ends with an internal error where it vectorizes the largest of several fmax(), which only test_gpt2 does.
cross_make OPT='-O3 -fno-tree-vectorize' BUILD=build/aarch64/plain build/aarch64/plain/test_gpt2
status=0
cross_make build/aarch64/train_gpt2 $(printf 'build/aarch64/tests/test_%s ' $TESTS)
for test in $TESTS; do emulate "$out/tests/test_$test" || status=1; done
emulate build/aarch64/plain/test_gpt2 tied_v97_T33 || status=1
resume || status=1
exit $status
