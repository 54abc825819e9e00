#!/bin/sh
# Runs a command, and all that it starts, under a hard limit of memory (page cache included), and says what it used:
#   benchmarks/limited.sh 6G build/release/zero train --model gpt2-xl ...
# Uses systemd-run where it works, else makes a memory cgroup itself (version 2 or 1; needs root).
set -eu
[ $# -ge 2 ] || { echo "usage: $0 BYTES COMMAND [ARGUMENT...] (BYTES as 6G)" >&2; exit 2; }
limit=$1
shift

if [ "$(id -u)" != 0 ] || { command -v systemd-run > /dev/null && [ -d /run/systemd/system ]; }; then
  exec systemd-run --user --scope --quiet -p MemoryMax="$limit" -p MemorySwapMax=0 -- "$@"
fi

name=libzero-limited-$$
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/$name
  mkdir "$group"
  echo "$limit" > "$group/memory.max"
  peak=$group/memory.peak
else
  group=/sys/fs/cgroup/memory/$name
  mkdir "$group"
  echo "$limit" > "$group/memory.limit_in_bytes"
  peak=$group/memory.max_usage_in_bytes
fi

status=0
sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" "$@" || status=$?
echo "limit $limit; most that was used, page cache included: $(($(cat "$peak") >> 20)) MiB" >&2
tries=0
until rmdir "$group" 2> /dev/null || [ $tries -ge 50 ]; do  # the last of its processes may still be going
  tries=$((tries + 1))
  sleep 0.1
done
exit $status
