#!/usr/bin/env bash
# Trains 162M parameters with scalable softmax on SlimPajama, after [SSMax] Tables 1 and 2: 200,000 steps of 2,097,152
# tokens, 419 billion in all, with a constant learning rate after 1,000 steps.
#
#   scripts/run_162M_slimpajama_ssmax.sh [flags]      on eight GPUs; flags override those below
#                                                     (--dry-run only prints the plan)
#   OUT=out/162M_slimpajama_softmax scripts/run_162M_slimpajama_ssmax.sh --attn softmax
#                                                     the softmax counterpart, for scripts/switch_to_ssmax.sh
#
# Rerun it to resume from the newest checkpoint. Environment variables: GPUS (8), DATA, OUT and PROGRAM (see below);
# paths are relative to the repository's root. PROGRAM=./train_gpt2 runs the same training on a CPU.
#
# Data    .venv/bin/python data/slimpajama.py --chunks 1-10, about 1.3 TB on disk; with fewer chunks the text repeats
# Memory  25 GB per GPU, 9 GB with --batch 16. The batch of all GPUs together must divide the step's 2,048 sequences
# Time    24 hours on eight H200s, if each runs at the 600 k tokens/s that one was measured at
#
# Example: GPUS=8 scripts/run_162M_slimpajama_ssmax.sh --dry-run
# See doc/gpu.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

data=${DATA:-data/slimpajama}
read -ra launch <<< "${LAUNCH:-scripts/launch.sh ${GPUS:-8}}"    # scripts/run_multi_node.sbatch sets LAUNCH

exec "${launch[@]}" "${PROGRAM:-./train_gpt2cu}" \
    --train-data "$data/*_train_*.bin" --val-data "$data/*_val_*.bin" --out "${OUT:-out/162M_slimpajama_ssmax}" --resume \
    --model 162M --attn ssmax --dtype bf16 --batch 64 --seq-len 1024 --total-batch-tokens 2097152 --steps 200000 \
    --lr 6e-4 --warmup 1000 --schedule constant --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --grad-clip 1 \
    --val-every 250 --sample-every 1000 --ckpt-every 1000 "$@"
