#!/usr/bin/env bash
# Goes on with a run that was trained with softmax, from its newest checkpoint and with scalable softmax in its place ([SSMax] model (f)):
# weights, moments, step and place in the data stay, each head gets its s, and the learning rate warms up again.
#
#   OUT=out/softmax scripts/switch_to_ssmax.sh [flags]                switches at the step of the newest checkpoint
#   OUT=out/softmax STEP=175000 scripts/switch_to_ssmax.sh [flags]    goes on with softmax until that step
#
# Started again, it goes on without a second switch. The run's own flags hold (OUT/run.json); [flags] may change what --resume may change,
# such as --steps, which a run that has reached its own needs. --dry-run prints the plan and ends. From the environment: GPUS (8), OUT, STEP and PROGRAM; paths start at the
# repository's root. To keep the run with softmax as it is, copy its folder before.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-out/162M_slimpajama_softmax}
newest=$(find "$out/ckpt" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -1 || true)
[ -n "$newest" ] || { echo "switch_to_ssmax.sh: $out/ckpt: no checkpoint to go on from. OUT=FOLDER names the run." >&2; exit 2; }

switch=(--attn-switch "${STEP:-$((10#${newest##*/step-}))}:ssmax")
! grep -q "\"attn-switch\":[[:space:]]*\"${STEP:-[0-9]*}:ssmax\"" "$out/run.json" || switch=()    # --resume knows it from there
read -ra launch <<< "${LAUNCH:-scripts/launch.sh ${GPUS:-8}}"    # LAUNCH: scripts/run_multi_node.sbatch has another

exec "${launch[@]}" "${PROGRAM:-./train_gpt2cu}" --out "$out" --resume "${switch[@]}" "$@"
