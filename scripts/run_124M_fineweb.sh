#!/usr/bin/env bash
# Trains 124M parameters on 10 billion tokens of FineWeb: 19,073 steps of 524,288 tokens, with cosine decay of the
# learning rate to 0.
#
#   scripts/run_124M_fineweb.sh [flags]      on one GPU; flags override those below. --dry-run only prints the plan
#   GPUS=8 OUT=out/lssar scripts/run_124M_fineweb.sh --attn lssar
#
# Rerun it to resume from the newest checkpoint. Environment variables: GPUS (1), DATA, OUT and PROGRAM (see below);
# paths are relative to the repository's root. PROGRAM=./train_gpt2 runs the same training on a CPU.
#
# Data    .venv/bin/python data/fineweb.py --version 10B, 20 GB on disk
# Memory  24 GB per GPU, 8 GB with --batch 16. The batch of all GPUs together must divide the step's 512 sequences
# Time    4.6 hours on one H200, at the 600 k tokens/s that its steps were measured at; eight GPUs are not measured
#
# Example: GPUS=8 scripts/run_124M_fineweb.sh --attn ssmax --dry-run
# See doc/gpu.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

data=${DATA:-data/fineweb-10B}
read -ra launch <<< "${LAUNCH:-scripts/launch.sh ${GPUS:-1}}"    # scripts/run_multi_node.sbatch sets LAUNCH

exec "${launch[@]}" "${PROGRAM:-./train_gpt2cu}" \
    --train-data "$data/*_train_*.bin" --val-data "$data/*_val_*.bin" --out "${OUT:-out/124M_fineweb}" --resume \
    --model 124M --attn softmax --dtype bf16 --batch 64 --seq-len 1024 --total-batch-tokens 524288 --steps 19073 \
    --lr 6e-4 --warmup 700 --schedule cosine --min-lr-frac 0 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --grad-clip 1 \
    --val-every 250 --sample-every 1000 --ckpt-every 1000 "$@"
