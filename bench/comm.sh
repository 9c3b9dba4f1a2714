#!/bin/sh
# Collectives over both backends beside memcpy and OpenMPI, 64 MiB of fp32. Prints a JSON object per run.
#   bench/comm.sh [BUILD_DIR] [options of bench_comm]
set -e
build=${1:-build}
[ $# -gt 0 ] && shift
program=$build/bench/bench_comm
[ -x "$program" ] || { echo "comm.sh: no $program: build it with: cmake --build $build --target bench_comm" >&2; exit 1; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for ranks in 2 4; do
  "$program" --ranks "$ranks" "$@"
  if command -v mpirun >/dev/null; then
    mpirun --oversubscribe --bind-to none -n "$ranks" "$program" "$@"
  else
    echo "comm.sh: no mpirun: the mpi backend is left out" >&2
  fi
done
