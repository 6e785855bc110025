#!/usr/bin/env bash
# Fine-tunes a checkpoint to answer questions about its context, after [SSMax] Appendix C: ten epochs of SQuAD in steps
# of 131,072 tokens, one example a row, with a loss on the answers alone. eval_gpt2 then finds needles with --chat squad.
#
#   MODEL=out/softmax/ckpt/step-00200000 scripts/squad_sft.sh [flags]                  with the checkpoint's normalizer
#   MODEL=out/softmax/ckpt/step-00200000 scripts/squad_sft.sh --attn ssmax [flags]     with another ([SSMax] model (e))
#
# Flags override those below; --dry-run only prints the plan. Steps and warmup follow from the number of examples: ten
# epochs and one, which are 6,783 and 678 steps for the 86,820 examples of SQuAD 2.0. Rerun it to resume from the newest
# checkpoint. Environment variables: MODEL (a checkpoint or a Hugging Face folder), GPUS (1), DATA, OUT and PROGRAM (see
# below); paths are relative to the repository's root. PROGRAM=./train_gpt2 runs the same training on a CPU.
#
# Data    .venv/bin/python data/squad.py; with a tokenizer other than GPT-2's, pass --tokenizer MODEL/tokenizer.json
# Memory  9 GB per GPU for 162M. The batch of all GPUs together must divide the step's 128 sequences
# Time    estimated, not measured: 0.85 GFLOP per token for 162M (6 · parameters without the input embedding
#         + 12 · layers · channels · T), 7.6e17 in all. At 400 TFLOP/s per GPU that is 32 minutes on one
#
# Example: MODEL=out/softmax/ckpt/step-00200000 scripts/squad_sft.sh --attn ssmax --dry-run
# See doc/data.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

[ -n "${MODEL:-}" ] || {
    echo "squad_sft.sh: name the checkpoint to start from: MODEL=FOLDER scripts/squad_sft.sh" >&2
    exit 2
}
data=${DATA:-data/squad} validation=()
found=("$data"/*_val_*.bin)
[ ! -e "${found[0]}" ] || validation=(--val-data "$data/*_val_*.bin")
read -ra launch <<< "${LAUNCH:-scripts/launch.sh ${GPUS:-1}}"    # scripts/run_multi_node.sbatch sets LAUNCH

command=("${launch[@]}" "${PROGRAM:-./train_gpt2cu}"
    --train-data "$data/*_train_*.bin" "${validation[@]}" --out "${OUT:-out/squad_sft}" --resume
    --init-from "$MODEL" --pack example --dtype bf16 --batch 16 --seq-len 1024 --total-batch-tokens 131072
    --lr 2e-5 --schedule cosine --min-lr-frac 0 --weight-decay 0 --beta1 0.9 --beta2 0.999 --grad-clip 1
    --ckpt-every 500)

# steps EPOCHS: the number of steps, rounded, from the lines "data ... 86,820 windows of 1024 ..." and "step 131,072 tokens ..."
plan=$("${command[@]}" "$@" --steps 1000000000 --dry-run) || exit
steps() {
    awk -v epochs="$1" '{ gsub(",", "") }
        $1 == "data" { for (i = 2; i < NF; i++) if ($i == "windows") tokens = $(i - 1) * $(i + 2) }
        $1 == "step" { steps = int(epochs * tokens / $2 + 0.5); print (steps > 1 ? steps : 1); exit }' <<< "$plan"
}
last=$(steps 10)
exec "${command[@]}" --steps "$last" --warmup "$(steps 1)" --val-every "$((last < 100 ? last : 100))" "$@"
