#!/bin/sh
# Runs a command, and all that it starts, under a hard limit of memory (page cache included, no swap), and says what it used:
#   benchmarks/limited.sh 6G build/release/zero train --model gpt2-xl ...
# Uses systemd-run where systemd runs, else makes a memory cgroup itself (version 2 or 1; needs root).
set -eu
[ $# -ge 2 ] || { echo "usage: $0 BYTES COMMAND [ARGUMENT...] (BYTES as 6G)" >&2; exit 2; }
limit=$1
shift

# $1: the cgroup's folder. $2: what the limit was.
report='
peak=$(cat "$1/memory.peak" 2> /dev/null || cat "$1/memory.max_usage_in_bytes" 2> /dev/null) &&
  echo "limit $2; most that was used, page cache included: $((peak >> 20)) MiB" >&2 || true'

if command -v systemd-run > /dev/null && [ -d /run/systemd/system ]; then
  user=$([ "$(id -u)" = 0 ] || echo --user)
  # The scope is gone when its last process is, which therefore reports.
  exec systemd-run $user --scope --quiet -p MemoryMax="$limit" -p MemorySwapMax=0 -- sh -c '
    limit=$0 report=$1
    shift
    status=0
    "$@" || status=$?
    group=$(sed -n "s|^[0-9]*:memory:|/sys/fs/cgroup/memory|p; s|^0::|/sys/fs/cgroup|p" /proc/self/cgroup | head -n 1)
    sh -c "$report" sh "$group" "$limit"
    exit $status' "$limit" "$report" "$@"
fi

name=libzero-limited-$$
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/$name
  mkdir "$group"
  echo "$limit" > "$group/memory.max"
  swap=$group/memory.swap.max most=0
else
  group=/sys/fs/cgroup/memory/$name
  mkdir "$group"
  echo "$limit" > "$group/memory.limit_in_bytes"
  swap=$group/memory.memsw.limit_in_bytes most=$limit  # of memory and swap together
fi
[ ! -e "$swap" ] || echo "$most" > "$swap"  # absent where the kernel does not count swap

status=0
sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" "$@" || status=$?
sh -c "$report" sh "$group" "$limit"
tries=0
until rmdir "$group" 2> /dev/null || [ $tries -ge 50 ]; do  # the last of its processes may still be going
  tries=$((tries + 1))
  sleep 0.1
done
exit $status
