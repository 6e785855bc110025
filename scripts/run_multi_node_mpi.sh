#!/usr/bin/env bash
# Runs a recipe or a command on several machines with mpirun and ssh, one rank per GPU:
#
#   HOSTFILE=hosts scripts/run_multi_node_mpi.sh scripts/run_162M_slimpajama_ssmax.sh [flags]
#   HOSTFILE=hosts scripts/run_multi_node_mpi.sh ./train_gpt2cu --train-data 'data/books/*_train_*.bin' --out out/books
#   HOSTFILE=hosts OUT=/shared/out/a scripts/run_multi_node_mpi.sh scripts/run_124M_fineweb.sh --batch 32
#
# HOSTFILE has one line `name slots=K` per machine, where K is its number of GPUs, the same on each, or K lines `name`,
# as in $PBS_NODEFILE. ssh must reach each machine without a password, and all must see the program, the data and OUT
# under the same paths. Ctrl-C or SIGTERM saves a checkpoint and ends the run; rerun the same command to resume.
#
# NCCL finds the network by itself. If it picks the wrong one, set NCCL_SOCKET_IFNAME=eth0 (the interface) or
# NCCL_IB_HCA=mlx5 (the InfiniBand adapters); NCCL_DEBUG=INFO shows which ones it picked. Open MPI has
# OMPI_MCA_btl_tcp_if_include=eth0. All machines receive these variables (scripts/launch.sh --help lists all).
#
# Example: HOSTFILE=hosts scripts/run_multi_node_mpi.sh scripts/run_124M_fineweb.sh --batch 32
# See doc/many_gpus.md.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac

usage() { echo "run_multi_node_mpi.sh: $1" >&2; echo "  Usage: HOSTFILE=file scripts/run_multi_node_mpi.sh recipe|program [flags]" >&2; exit 2; }
[ $# -ge 1 ] || usage "expected a recipe, for example scripts/run_162M_slimpajama_ssmax.sh, or a program."
[ -r "${HOSTFILE:-}" ] ||
    usage "HOSTFILE=${HOSTFILE:-}: expected a readable file with one line per machine: name slots=K."

# The GPUs of each machine: slots=K, or the number of its lines.
gpus=$(awk '/^[[:space:]]*(#|$)/ { next }
            { slots = match($0, /[[:space:]]slots *= *[0-9]+/) ? substr($0, RSTART, RLENGTH) : 1
              sub(/.*=/, "", slots)
              n[$1] += slots }
            END { for (name in n) print n[name] }' "$HOSTFILE")
[ "$(sort -u <<< "$gpus" | grep -c .)" = 1 ] ||
    usage "$HOSTFILE: expected slots=K on each line, with the same number of GPUs on each machine."

HOSTFILE=$(realpath "$HOSTFILE") GPUS=$(($(paste -sd+ <<< "$gpus")))
export HOSTFILE GPUS
case $1 in *.sh) exec "$@" ;; *) exec "$(dirname "$0")/launch.sh" "$GPUS" "$@" ;; esac
