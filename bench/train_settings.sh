#!/usr/bin/env bash
# Two settings of a configuration beside each other on two local ranks, in alternating rounds: tokens/s of `sherd train`
# on a prepared dataset.
#
#   bench/train_settings.sh CONFIG DATA_PREFIX A B [ROUNDS] [STEPS]        (default 3 rounds of 6 steps)
#
# A and B: what `--set` takes, several with spaces between, as "zero_optimization.stage=0" "zero_optimization.stage=3", or
# with configs/moe_8x.json "parallel.expert=1" "parallel.expert=2". Prints one JSON line per run, and the ratio of the
# medians (B / A).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage='usage: bench/train_settings.sh CONFIG DATA_PREFIX A B [ROUNDS] [STEPS]'
config=${1:?$usage} data=${2:?$usage} settings=("${3:?$usage}" "${4:?$usage}")
rounds=${5:-3} steps=${6:-6} sherd=${SHERD:-build/sherd}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run() {
  local options=() setting
  for setting in $1; do options+=(--set "$setting"); done
  "$sherd" train --config "$config" --ranks 2 --steps "$steps" --metrics "$work/m.jsonl" --set "data.path=$data" \
    --set training.eval_interval=0 --set 'data.split=[1.0,0.0]' "${options[@]}" >/dev/null 2>"$work/errors" ||
    { cat "$work/errors" >&2; return 1; }
  # The first step pays for first touches; the median of the rest counts.
  tail -n +2 "$work/m.jsonl" | sed -n 's/.*"tokens_per_s":\([0-9.eE+]*\).*/\1/p' | sort -g |
    awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'
}
median() { sort -g | awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'; }
for ((r = 0; r < rounds; ++r)); do
  for i in 0 1; do
    rate=$(run "${settings[i]}")
    echo "{\"round\": $r, \"setting\": \"${settings[i]}\", \"tokens_per_s\": $rate}"
    echo "$rate" >>"$work/rates$i"
  done
done
awk -v a="$(median <"$work/rates0")" -v b="$(median <"$work/rates1")" 'BEGIN {printf "{\"b_over_a\": %.3f}\n", b / a}'
