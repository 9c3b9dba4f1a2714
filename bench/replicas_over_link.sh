#!/usr/bin/env bash
# Two replicas of one core each, which a slow link joins: AdamW, whose replicas reduce gradients, beside 1-bit Adam, whose
# replicas exchange compressed momentum, in alternating rounds of bench_train_step. GPT-2 small, 512 tokens each.
#
#   bench/replicas_over_link.sh [RATE...]        (default: 200mbit 1gbit, as tc writes them)
#
# The link is a pair of virtual interfaces between two network namespaces, shaped by a token bucket in both directions; no
# other interface is touched, and all of it goes when the script ends. Needs root, ip and tc. ROUNDS (3), STEPS (5), BUILD
# (build) and LIMIT (900: seconds that one run may take) are taken from the environment.
# Prints a JSON line per run, and per rate the median seconds of a step and their ratio.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rates=("$@")
((${#rates[@]})) || rates=(200mbit 1gbit)
rounds=${ROUNDS:-3} steps=${STEPS:-5} bench=$PWD/${BUILD:-build}/bench/bench_train_step limit=${LIMIT:-900}
config=$PWD/configs/gpt2_small_on_device.json
[[ -x $bench ]] || { echo "there is no $bench: build with SHERD_BUILD_BENCH=ON" >&2; exit 1; }
((EUID == 0)) || { echo "network namespaces take root" >&2; exit 1; }
here=replicas-$$ work=$(mktemp -d)

clean() {
  local side
  for side in 0 1; do ip netns pids "$here-$side" 2>/dev/null | xargs -r kill 2>/dev/null || true; done
  for side in 0 1; do ip netns del "$here-$side" 2>/dev/null || true; done
  rm -rf "$work"
}
trap clean EXIT

for side in 0 1; do ip netns add "$here-$side"; done
ip link add link0 netns "$here-0" type veth peer name link1 netns "$here-1"
for side in 0 1; do
  ip -n "$here-$side" addr add "10.213.0.$((side + 1))/24" dev "link$side"
  ip -n "$here-$side" link set "link$side" up
  ip -n "$here-$side" link set lo up
done

shape() {
  local side
  for side in 0 1; do
    ip netns exec "$here-$side" tc qdisc replace dev "link$side" root tbf rate "$1" burst 256kb latency 50ms
  done
}

# One rank in its namespace, on a core of its own, on a machine of its own as far as its ranks can tell.
rank() {
  local side=$1 port=$2
  shift 2
  ip netns exec "$here-$side" unshare --uts bash -c "hostname replica$side; exec \"\$@\"" - \
    env RANK="$side" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.213.0.1 MASTER_PORT="$port" OMP_NUM_THREADS=1 \
    taskset -c "$side" timeout "$limit" "$bench" --config "$config" --ranks 2 --warmup 2 --steps "$steps" "$@"
}

run() {
  local keys=(--set model.seq_length=512 --set train_micro_batch_size_per_gpu=1 --set gradient_accumulation_steps=1
    --set device.threads_per_rank=1 --set parallel.shard_size=1 --set zero_optimization.stage=1 --set "optimizer.type=$1")
  [[ $1 == OneBitAdam ]] && keys+=(--set optimizer.params.freeze_step=1)
  local port=$((20000 + RANDOM % 10000))
  rank 1 "$port" "${keys[@]}" >"$work/1.out" 2>"$work/1.err" &
  rank 0 "$port" "${keys[@]}" 2>"$work/0.err" | sed -n 's/.*"step_s": \([0-9.eE+-]*\).*/\1/p' >"$work/step"
  wait $!
  [[ -s $work/step ]] || { cat "$work"/*.err >&2; exit 1; }
  cat "$work/step"
}

median() { sort -g | awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'; }

for rate in "${rates[@]}"; do
  shape "$rate"
  rm -f "$work"/*.steps
  for ((r = 0; r < rounds; ++r)); do
    for type in AdamW OneBitAdam; do
      seconds=$(run "$type")
      echo "{\"rate\": \"$rate\", \"round\": $r, \"optimizer\": \"$type\", \"step_s\": $seconds}"
      echo "$seconds" >>"$work/$type.steps"
    done
  done
  exact=$(median <"$work/AdamW.steps") one_bit=$(median <"$work/OneBitAdam.steps")
  awk -v rate="$rate" -v a="$exact" -v b="$one_bit" \
    'BEGIN {printf "{\"rate\": \"%s\", \"adamw_s\": %s, \"one_bit_s\": %s, \"ratio\": %.2f}\n", rate, a, b, a / b}'
done
