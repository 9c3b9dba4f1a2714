#!/usr/bin/env bash
# scripts/gpu-check over stand-ins for the programs that it builds: what it makes of tests that fail, crash and spoil the process
# for others, and of what benchmarks say.   gpu_check_test.sh SCRIPT
set -euo pipefail
script=${1:?the script to test}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bench"

fail() { printf 'FAILED: %s\n%s\n' "$1" "$output" >&2; exit 1; }
expect() { [[ $output =~ $1 ]] || fail "no '$1' in:"; }
check() {  # expected exit code, words...
  local expected=$1 code=0
  shift
  output=$(bash "$script" --build "$work" "$@" 2>&1) || code=$?
  [[ $code == "$expected" ]] || fail "exit code $code instead of $expected after $*:"
}
card() { printf '#!/bin/sh\necho "CUDA             built with 13.0"\necho "devices          cpu%s"\n' "$1" > "$work/sherd"; }

cat > "$work/test_a" << 'PROGRAM'
#!/usr/bin/env bash
# Speaks as a GoogleTest program does. A.poisoned fails where A.fails has run in the same process.
for word in "$@"; do [[ $word != --gtest_filter=* ]] || filter=${word#--gtest_filter=}; done
positive=${filter%%-*} negative=:${filter#"${filter%%-*}"}: poisoned=0 code=0
negative=${negative/:-/:}
for name in A.ok A.crashes A.skips A.fails A.poisoned; do
  # shellcheck disable=SC2053  # a pattern
  [[ $name == $positive && $negative != *:$name:* ]] || continue
  echo "[ RUN      ] $name"
  case $name in
    A.crashes) kill -ABRT $$ ;;
    A.skips) echo "[  SKIPPED ] $name (0 ms)" ;;
    A.fails) echo "[  FAILED  ] $name, where GetParam() = 3 (5 ms)"; poisoned=1 code=1 ;;
    A.poisoned) if ((poisoned)); then echo "[  FAILED  ] $name (1 ms)"; code=1; else echo "[       OK ] $name (1 ms)"; fi ;;
    *) echo "[       OK ] $name (1 ms)" ;;
  esac
done
((code)) && echo "[  FAILED  ] A.fails, where GetParam() = 3"
exit $code
PROGRAM
printf '#!/bin/sh\necho "{\\"kernel\\": \\"x\\"}"\necho "kernel x: 7 TFLOP/s"\necho "gpt, sherd / torch: 1.0, target 1.1: MISSED"\necho "gpt, torch: unavailable: no torch"\n' \
  > "$work/bench/bench_kernels"
chmod +x "$work/test_a" "$work/bench/bench_kernels"
card ", cuda 0 (A card)"; chmod +x "$work/sherd"

check 1 --part tests
expect "begin with --part build"

echo "a $work/test_a" > "$work/gpu_tests.txt"
check 1 --part tests --copy-to "$work/out"
expect "tests of a +FAILED +1 passed, 2 failed, 1 crashed, 1 skipped \(1 of 3 pass alone\): A.crashes A.fails A.poisoned"
[[ -s $work/out/gpu-check.rows && -s $work/out/gpu-check.tar.gz ]] || fail "nothing was copied:"

check 1 --part tests --only skips
expect "tests of a +skipped"
expect "none ran"

rm "$work/gpu-check.rows"
check 0 --part tests --only ok
expect "tests of a +passed +1 passed, 0 failed"

check 0 --part bench --bench kernels
expect "kernel x +measured +7 TFLOP/s"
expect "gpt, sherd / torch +missed"
expect "gpt, torch +absent"
expect "tests of a +passed"  # of the command before
expect "nothing failed, 1 of the targets missed"

printf '#!/bin/sh\necho "the card is on fire" >&2\nexit 1\n' > "$work/bench/bench_kernels"
check 1 --part bench --bench kernels
expect "bench kernels +FAILED +the card is on fire"

card " (no GPU: no driver)"
check 1 --part tests
expect "devices +FAILED +cpu \(no GPU"
echo "gpu-check does what it says"
