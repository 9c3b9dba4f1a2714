#!/bin/sh
# launch.sh RANKS PROGRAM ARGUMENT...: starts processes as torchrun does, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
# MASTER_ADDR and MASTER_PORT in their environment, but lets them end by themselves. What MASTER_PORT and the like hold
# already stays. Ends with the highest exit code of any; where it is killed, they are.
ranks=$1
shift
if [ -z "$MASTER_PORT" ]; then
  # One that nobody listens on now.
  seed=$$
  while
    MASTER_PORT=$((20000 + seed % 12000))
    grep -qi ":$(printf %04X "$MASTER_PORT") " /proc/net/tcp /proc/net/tcp6 2>/dev/null
  do
    seed=$((seed + 1237))
  done
fi
export MASTER_PORT MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" WORLD_SIZE="$ranks" LOCAL_WORLD_SIZE="$ranks"
pids=
trap 'kill -TERM $pids 2>/dev/null' TERM INT
rank=0
while [ "$rank" -lt "$ranks" ]; do
  RANK=$rank LOCAL_RANK=$rank setpriv --pdeathsig KILL "$@" &
  pids="$pids $!"
  rank=$((rank + 1))
done
worst=0
for pid in $pids; do
  # A signal ends a wait early.
  while :; do
    wait "$pid"
    code=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
