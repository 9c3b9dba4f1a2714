#!/bin/sh
# death.sh RANKS CASE LAUNCHER...: runs a case in which rank 1 dies; passes when all others end well by themselves.
ranks=$1 case=$2
shift 2
output=$("$@" --gtest_filter="Death.$case" 2>&1)
well=$(printf '%s\n' "$output" | grep -c 'rank [0-9]* is well')
if [ "$well" -ne $((ranks - 1)) ]; then
  printf '%s\n' "$output"
  echo "$well of $((ranks - 1)) survivors ended well"
  exit 1
fi
