#!/bin/sh
# Collectives beside memcpy over local ranks, and beside memcpy and OpenMPI's own over MPI's, 64 MiB of fp32. Prints
# a JSON object per run.
#   bench/comm.sh [BUILD_DIR] [--mib N] [--rounds N]
set -e
build=${1:-build}
[ $# -gt 0 ] && shift
program=$build/bench/bench_comm
[ -x "$build/sherd" ] || { echo "comm.sh: no $build/sherd: build it with: cmake --build $build" >&2; exit 1; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for ranks in 2 4; do
  "$build/sherd" bench comm --json --ranks "$ranks" "$@"
  if command -v mpirun >/dev/null && [ -x "$program" ]; then
    mpirun --oversubscribe --bind-to none -n "$ranks" "$program" "$@"
  else
    echo "comm.sh: no mpirun or no $program: the mpi backend is left out" >&2
  fi
done
