#!/usr/bin/env bash
# Stage 3 beside stage 0 on two local ranks, in alternating rounds: tokens/s of `sherd train` on a prepared dataset.
#
#   bench/train_stages.sh CONFIG DATA_PREFIX [ROUNDS] [STEPS]        (default 3 rounds of 6 steps)
#
# Prints one JSON line per run, and the ratio of the medians (stage 3 / stage 0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=${1:?usage: bench/train_stages.sh CONFIG DATA_PREFIX [ROUNDS] [STEPS]} data=${2:?the prefix of a prepared dataset}
rounds=${3:-3} steps=${4:-6} sherd=${SHERD:-build/sherd}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  "$sherd" train --config "$config" --ranks 2 --steps "$steps" --metrics "$work/m.jsonl" --set "data.path=$data" \
    --set "zero_optimization.stage=$1" --set training.eval_interval=0 --set 'data.split=[1.0,0.0]' >/dev/null 2>&1
  # The first step pays for first touches; the median of the rest counts.
  tail -n +2 "$work/m.jsonl" | sed -n 's/.*"tokens_per_s":\([0-9.eE+]*\).*/\1/p' | sort -g |
    awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'
}
median() { sort -g | awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'; }
for ((r = 0; r < rounds; ++r)); do
  for stage in 0 3; do
    rate=$(run "$stage")
    echo "{\"round\": $r, \"stage\": $stage, \"tokens_per_s\": $rate}"
    echo "$rate" >>"$work/stage$stage"
  done
done
zero=$(median <"$work/stage0") three=$(median <"$work/stage3")
awk -v a="$three" -v b="$zero" 'BEGIN {printf "{\"stage3_over_stage0\": %.3f}\n", a / b}'
