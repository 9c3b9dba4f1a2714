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
# Speaks as a GoogleTest program does. A.poisoned fails where A.fails has run in the same process. Every other test goes to
# another process.
filter='*' list=0 poisoned=0 code=0
for word in "$@"; do
  [[ $word != --gtest_filter=* ]] || filter=${word#--gtest_filter=}
  [[ $word != --gtest_list_tests ]] || list=1
done
((list)) && echo "A."
for name in A.fails A.crashes A.poisoned A.skips A.ok; do
  IFS=: read -ra patterns <<< "$filter"
  wanted=0
  for pattern in "${patterns[@]}"; do
    # shellcheck disable=SC2053  # a pattern
    [[ $name != $pattern ]] || wanted=1
  done
  ((wanted)) || continue
  ((list)) && { echo "  ${name#A.}"; continue; }
  echo "[ RUN      ] $name"
  case $name in
    A.crashes) kill -ABRT $$ ;;
    A.skips) echo "[  SKIPPED ] $name (0 ms)" ;;
    A.fails) echo "[  FAILED  ] $name, where GetParam() = 3 (5 ms)"; poisoned=1 code=1 ;;
    A.poisoned) if ((poisoned)); then echo "[  FAILED  ] $name (1 ms)"; code=1; else echo "[       OK ] $name (1 ms)"; fi ;;
    *) echo "[       OK ] $name (1 ms)" ;;
  esac
done
((list)) && exit
((code)) && echo "[  FAILED  ] A.fails, where GetParam() = 3"
exit $code
PROGRAM
printf '#!/bin/sh\necho "{\\"kernel\\": \\"x\\"}"\necho "kernel x: 7 TFLOP/s"\necho "gpt, sherd / torch: 1.0, target 1.1: MISSED"\necho "gpt, torch: unavailable: no torch"\n' \
  > "$work/bench/bench_kernels"
chmod +x "$work/test_a" "$work/bench/bench_kernels"
card ", cuda 0 (A card)"; chmod +x "$work/sherd"

check 1 --part tests
expect "begin with --part build"

echo "a test_a" > "$work/gpu_tests.txt"
check 1 --part tests --copy-to "$work/out"
expect "tests of a +FAILED +1 passed, 2 failed, 1 crashed, 1 skipped \(1 of 3 pass alone\)"
expect "a A.poisoned +FAILED +passes alone"
expect "a A.fails +FAILED +fails alone too"
expect "a A.crashes +FAILED +fails alone too: \[CRASHED\]"
[[ -s $work/out/gpu-check.rows && -n $(compgen -G "$work/out/logs-*.tar.gz") ]] || fail "nothing was copied:"
[[ $(sort "$work/out/failed.txt" | paste -sd' ') == $'a\tA.crashes a\tA.fails a\tA.poisoned' ]] || fail "failed.txt has other tests:"

# Mended, but for one.
sed -i 's/A.fails) echo.*/A.fails) echo "[       OK ] $name (5 ms)" ;;/' "$work/test_a"
check 1 --part tests --rerun "$work/failed.txt"
expect "tests of a +FAILED +2 passed, 0 failed, 1 crashed, 0 skipped"
[[ $(< "$work/failed.txt") == $'a\tA.crashes' ]] || fail "failed.txt has other tests:"
check 1 --part tests --only ok  # what it leaves out stays failed
expect "a A.crashes +FAILED"
expect "tests of a +passed +1 passed, 0 failed"
sed -i 's/A.crashes) kill.*/A.crashes) sleep 0.1; echo "[       OK ] $name (5 ms)" ;;/' "$work/test_a"
check 0 --part tests --rerun "$work/failed.txt"
expect "a A.crashes +- +tried again"

# A program that cannot start.
printf 'a test_a\nb test_b\n' > "$work/gpu_tests.txt"
check 1 --part tests
expect "tests of b +FAILED +cannot list its tests"
expect "tests of a +passed +4 passed, 0 failed, 0 crashed, 1 skipped"
echo "a test_a" > "$work/gpu_tests.txt"
rm "$work/gpu-check.rows"

# Stopped, it prints the table and leaves nothing running.
sed -i "s/A.crashes) sleep 0.1/A.crashes) exec -a sleeps-for-$$ sleep 30/" "$work/test_a"
output=$(bash "$script" --build "$work" --part tests 2>&1 & pid=$!
         # The process of the sleeper has gone that far, and the other one is through with all of its tests.
         until pgrep -f "^sleeps-for-$$" > /dev/null && grep -q "OK . A.ok" "$work"/a.*.log; do sleep 0.1; done
         kill "$pid"; wait "$pid") && fail "no failure when stopped:"
expect "stopped"
expect "tests of a +FAILED .*2 were not run"  # it, and the one behind it
sleep 0.3
! pgrep -f "^sleeps-for-$$" > /dev/null || fail "a test is left running behind:"
sed -i "s/A.crashes) exec.* sleep 30;/A.crashes)/" "$work/test_a"

echo "no archive" > "$work/none.tar"
check 1 --bundle "$work/none.tar"
expect "bundle +FAILED +cannot unpack"
check 2 --bundle "$work/absent.tar"
rm "$work/gpu-check.rows"

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
