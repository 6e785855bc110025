#!/usr/bin/env bash
# A recipe on several machines by mpirun and ssh, one process for each GPU:
#
#   HOSTFILE=hosts scripts/run_multi_node_mpi.sh scripts/run_162M_slimpajama_ssmax.sh [flags]
#   HOSTFILE=hosts OUT=/shared/out/a scripts/run_multi_node_mpi.sh scripts/run_124M_fineweb.sh --batch 32
#
# HOSTFILE has a line a machine, `name slots=K`, K its GPUs, as many on each. ssh must reach each without a password, and all must see the
# program, the data and OUT under the same paths. Ctrl-C or SIGTERM here saves a checkpoint and ends the run, and the same command goes on
# from it.
#
# NCCL finds the network by itself. Where it takes a wrong one: NCCL_SOCKET_IFNAME=eth0 names the interface, NCCL_IB_HCA=mlx5 InfiniBand's
# cards; NCCL_DEBUG=INFO shows which ones it took. OMPI_MCA_btl_tcp_if_include=eth0 is Open MPI's own. All machines get these variables.
set -euo pipefail

usage() { echo "run_multi_node_mpi.sh: $1" >&2; echo "  Usage: HOSTFILE=file scripts/run_multi_node_mpi.sh recipe [flags]" >&2; exit 2; }
[ $# -ge 1 ] || usage "which recipe? For example scripts/run_162M_slimpajama_ssmax.sh."
[ -r "${HOSTFILE:-}" ] || usage "HOSTFILE=${HOSTFILE:-}: expected a file with a line a machine: name slots=K."

machines=$(grep -cvE '^[[:space:]]*(#|$)' "$HOSTFILE" || true)
slots=$(sed -nE '/^[[:space:]]*#/d; s/.*[[:space:]]slots=([0-9]+).*/\1/p' "$HOSTFILE")
[ "$(wc -w <<< "$slots")" = "$machines" ] && [ "$(sort -u <<< "$slots" | wc -l)" = 1 ] && [ "$machines" -gt 0 ] ||
    usage "$HOSTFILE: expected slots=K on each line, the same number of GPUs on each machine."

HOSTFILE=$(realpath "$HOSTFILE") GPUS=$((machines * ${slots%%$'\n'*})) exec "$@"
