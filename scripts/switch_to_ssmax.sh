#!/usr/bin/env bash
# Continues a softmax run from its newest checkpoint with scalable softmax instead ([SSMax] model (f)): weights,
# moments, step and data position stay, each head gets its s, and the learning-rate warmup restarts.
#
#   OUT=out/softmax scripts/switch_to_ssmax.sh [flags]                switches at the step of the newest checkpoint
#   OUT=out/softmax STEP=175000 scripts/switch_to_ssmax.sh [flags]    continues with softmax until that step
#
# Rerun it to resume; it does not switch twice. The run keeps its own flags (OUT/run.json). [flags] may change what
# --resume may change, such as --steps, which a finished run needs. --dry-run only prints the plan. Environment
# variables: GPUS (8), OUT, STEP and PROGRAM; paths are relative to the repository's root. To keep the softmax run as
# it is, copy its folder first.
#
# Example: OUT=out/softmax scripts/switch_to_ssmax.sh --dry-run
# See doc/training.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

out=${OUT:-out/162M_slimpajama_softmax}
newest=
[ ! -d "$out/ckpt" ] || newest=$(find "$out/ckpt" -maxdepth 1 -name 'step-*' | sort | tail -1)
[ -n "$newest" ] || {
    echo "switch_to_ssmax.sh: $out/ckpt: no checkpoint to continue from. Name the run with OUT=FOLDER." >&2
    exit 2
}

switch=(--attn-switch "${STEP:-$((10#${newest##*/step-}))}:ssmax")
! grep -q "\"attn-switch\":[[:space:]]*\"${STEP:-[0-9]*}:ssmax\"" "$out/run.json" || switch=()    # a resume reads run.json
read -ra launch <<< "${LAUNCH:-scripts/launch.sh ${GPUS:-8}}"    # scripts/run_multi_node.sbatch sets LAUNCH

exec "${launch[@]}" "${PROGRAM:-./train_gpt2cu}" --out "$out" --resume "${switch[@]}" "$@"
