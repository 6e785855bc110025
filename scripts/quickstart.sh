#!/usr/bin/env bash
# From a fresh clone to a small GPT trained on Shakespeare: sets up, builds, prepares the text with a vocabulary of its
# own, trains for about a minute on two cores, validates, prints a sample and plots the loss curve.
#
#   scripts/quickstart.sh [--steps N]     N training steps (default: QUICKSTART_STEPS, or 500)
#
# It is safe to rerun: finished steps are skipped, and with a larger N training continues.
#
# Example: scripts/quickstart.sh --steps 1000
# See doc/training.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."
export PATH       # under env -i, bash sets it without exporting it
unset "${!PYTHON@}"    # for .venv only, as in setup.sh

steps=${QUICKSTART_STEPS:-500}
case "${1:-}" in
    "") ;;
    --steps) steps=${2:-} ;;
    --steps=*) steps=${1#--steps=} ;;
    *) echo "quickstart: $1: unknown flag; the only one is --steps N" >&2; exit 2 ;;
esac
[[ $steps =~ ^[1-9][0-9]*$ ]] || {
    echo "quickstart: --steps: expected a positive whole number, found \"$steps\"" >&2
    exit 2
}
run=out/quickstart
data=(--train-data 'data/shakespeare/*_train_*.bin' --val-data 'data/shakespeare/*_val_*.bin')
# A short run of a small model tolerates a high learning rate.
recipe=(--model layers=6,heads=6,channels=192,ffn=512,tied=1 --batch 8 --seq-len 128 --steps "$steps"
        --lr 2e-3 --warmup 50 --schedule cosine --val-every 100 --val-tokens 16384)

echo "== 1. setup"
scripts/setup.sh
echo "== 2. build"
make -j"$(nproc)"
echo "== 3. text: Shakespeare's works"
.venv/bin/python data/shakespeare.py --tokenizer own
setup=$SECONDS
echo "== 4. training, $steps steps"
./train_gpt2 "${data[@]}" "${recipe[@]}" --sample-every 200 --ckpt-every 200 --keep 1 --out $run --resume || {
    status=$?
    [ $status != 75 ] || echo "quickstart: stopped. Rerun the same command to resume." >&2
    exit $status
}
training=$((SECONDS - setup))
model=$(ls -d $run/ckpt/step-* | tail -1)
echo "== 5. a sample"
./sample_gpt2 --model "$model" --prompt "My lord," --max-new-tokens 120 --temperature 0.8 --top-k 50 --seed 1
echo "== 6. the loss curve"
.venv/bin/python scripts/plot.py $run

cat <<NEXT

Setup, build and text took $setup s, training $training s.
The model is in $model, its loss curve in $run/loss.png.

What to try next, after cd ${PWD@Q}:
  train longer                  scripts/quickstart.sh --steps $((2 * steps))
  your own prompt               ./sample_gpt2 --model $model --prompt "The king is" --max-new-tokens 200
  another attention normalizer  ./train_gpt2 --attn ssmax ${recipe[*]:0:8} \\
                                    ${recipe[*]:8} \\
                                    ${data[0]} '${data[1]}' ${data[2]} '${data[3]}' --out out/ssmax
  both in one plot              .venv/bin/python scripts/plot.py $run out/ssmax --out out/both.png
  your own text                 .venv/bin/python data/text.py --help
  every flag                    ./train_gpt2 --help
  every test                    scripts/test.sh
NEXT
