#!/bin/sh
# mpi_death.sh MPIRUN RANKS PROGRAM CASE: runs a case in which rank 1 dies; passes when all others end well by themselves.
mpirun=$1 ranks=$2 program=$3 case=$4
output=$("$mpirun" --enable-recovery --oversubscribe --bind-to none -n "$ranks" "$program" --gtest_filter="MpiDeath.$case" 2>&1)
well=$(printf '%s\n' "$output" | grep -c 'rank [0-9]* is well')
if [ "$well" -ne $((ranks - 1)) ]; then
  printf '%s\n' "$output"
  echo "$well of $((ranks - 1)) survivors ended well"
  exit 1
fi
