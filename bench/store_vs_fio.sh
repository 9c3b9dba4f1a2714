#!/bin/sh
# The offload store beside fio's io_uring on the same disk, at the same block size and depth, in alternating rounds.
# Prints a JSON object per mode: gigabytes per second of each round, and the median over rounds of store by fio.
# The store's buffers lie on huge pages, which virtual disks like; to give fio the same, set vm.nr_hugepages to 16 and
# FIO_OPTIONS=--mem=shmhuge.
#   bench/store_vs_fio.sh [BUILD_DIR] [FOLDER]      ROUNDS=7 SECONDS_EACH=3 MIB=1024 BLOCK=1048576 DEPTH=8 MODES="read write mixed"
set -eu
build=${1:-build} folder=${2:-${TMPDIR:-/tmp}}
program=$build/bench/bench_store
rounds=${ROUNDS:-7} seconds=${SECONDS_EACH:-3} mib=${MIB:-1024} block=${BLOCK:-1048576} depth=${DEPTH:-8}
[ -x "$program" ] || { echo "store_vs_fio.sh: no $program: build it with: cmake --build $build --target bench_store" >&2; exit 1; }
command -v fio >/dev/null || { echo "store_vs_fio.sh: no fio to compare with (on Debian: apt-get install fio)" >&2; exit 1; }

work=$(mktemp -d "$folder/store_vs_fio.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
file=$work/fio.data

# Bytes per second of reads and writes together.
run_fio() {
  fio --name=x --filename="$file" --size="${mib}m" --ioengine=io_uring --direct=1 --bs="$block" --iodepth="$depth" \
      --rw="$1" --time_based --runtime="$seconds" ${FIO_OPTIONS:-} --output-format=json 2>/dev/null |
    python3 -c 'import json,sys; t=sys.stdin.read(); j=json.loads(t[t.index("{"):])["jobs"][0]; print((j["read"]["bw_bytes"]+j["write"]["bw_bytes"])/1e9)'
}
run_store() {
  "$program" --folder "$work" --mode "$1" --seconds "$seconds" --mib "$mib" --block "$block" --depth "$depth" |
    python3 -c 'import json,sys; print(json.load(sys.stdin)["gb_per_s"])'
}

fio --name=layout --filename="$file" --size="${mib}m" --ioengine=io_uring --direct=1 --bs=1m --iodepth=8 --rw=write >/dev/null 2>&1
for mode in ${MODES:-read write mixed}; do
  case $mode in mixed) fio_mode=rw ;; *) fio_mode=$mode ;; esac
  store='' fio=''
  for round in $(seq "$rounds"); do
    # Who goes first changes, for a disk may favour either.
    if [ $((round % 2)) = 0 ]; then
      store="$store $(run_store "$mode")"; fio="$fio $(run_fio "$fio_mode")"
    else
      fio="$fio $(run_fio "$fio_mode")"; store="$store $(run_store "$mode")"
    fi
  done
  python3 - "$mode" "$block" "$depth" "$store" "$fio" <<'PYTHON'
import json, statistics, sys
mode, block, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store, fio = ([float(x) for x in text.split()] for text in sys.argv[4:6])
print(json.dumps({"mode": mode, "block_size": block, "queue_depth": depth, "store_gb_per_s": [round(x, 3) for x in store],
                  "fio_gb_per_s": [round(x, 3) for x in fio],
                  "store_by_fio": round(statistics.median(s / f for s, f in zip(store, fio)), 3)}))
PYTHON
done
