#!/bin/bash
# Cuts the link of a host, in network namespaces of its own: all ranks of the other hosts must say the same, and name the host.
#   failure_link.sh WORKER      the program comm_watch_worker
# Three hosts of two ranks. As root; elsewhere it says what it leaves out.
set -u
worker=$1
name=failure$$
ports=f$$
folder=$(mktemp -d)
if ! ip netns add "$name-0" 2>/dev/null; then
  echo "left out: cut links need root and network namespaces"
  rmdir "$folder"
  exit 0
fi
ip netns del "$name-0"
declare -A pids=()

down() {
  local pid host
  for pid in "${pids[@]}"; do
    kill -KILL "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
  done
  pids=()
  for host in 0 1 2; do ip netns del "$name-$host" 2>/dev/null; done
  ip netns del "$name-switch" 2>/dev/null
  rm -rf "${folder:?}"/*
}
trap 'down; rm -rf "$folder"' EXIT

# A namespace for the switch too, so that nothing is left on the machine's own network.
up() {
  local host rank
  ip netns add "$name-switch"
  ip -n "$name-switch" link add bridge type bridge
  ip -n "$name-switch" link set bridge up
  for host in 0 1 2; do
    ip netns add "$name-$host"
    ip -n "$name-switch" link add "$ports$host" type veth peer name eth0 netns "$name-$host"
    ip -n "$name-switch" link set "$ports$host" master bridge
    ip -n "$name-switch" link set "$ports$host" up
    ip -n "$name-$host" addr add "10.78.0.$((host + 1))/24" dev eth0
    ip -n "$name-$host" link set eth0 up
    ip -n "$name-$host" link set lo up
  done
  for rank in 0 1 2 3 4 5; do
    ip netns exec "$name-$((rank / 2))" "$worker" $rank 6 2 "$folder" "10.78.0.$((rank / 2 + 1))" 30000 &
    pids[$rank]=$!
  done
  for rank in 0 1 2 3 4 5; do await "$folder/here.$rank"; done
  touch "$folder/go"
  for rank in 0 1 2 3 4 5; do await "$folder/up.$rank"; done
}

await() {
  for _ in $(seq 6000); do
    [ -e "$1" ] && return
    sleep 0.01
  done
  echo "FAILED: $1 does not come" >&2
  exit 1
}

now() { echo $(($(cut -d. -f1 /proc/uptime) * 1000 + 10#$(cut -d. -f2 /proc/uptime | cut -c1-2) * 10)); }

# says RANKS TEXT: all of RANKS say TEXT
says() {
  local rank at told origin text
  for rank in $1; do
    await "$folder/result.$rank"
    read -r at told origin text < "$folder/result.$rank"
    if [ "$text" != "$2" ] || [ "$told" != 1 ]; then
      echo "FAILED: rank $rank was told $told times: $text" >&2
      echo "        instead of once: $2" >&2
      exit 1
    fi
    echo "  rank $rank, origin $origin, after $((at - since)) ms: $text"
  done
}

cut_link() { ip -n "$name-switch" link set "$ports$1" "$2"; }

for host in 0 1 2; do
  up
  echo "the link of host $host is cut"
  since=$(now)
  cut_link $host down
  case $host in
    0)
      says "2 3 4 5" "Host a has been silent for 4 s: ranks 0-1."
      says "0 1" "Hosts b and c have been silent for 4 s: ranks 2-5. Those are all the others: is the link of host a cut?" ;;
    1)
      says "0 1 4 5" "Host b has been silent for 4 s: ranks 2-3."
      says "2 3" "Hosts a and c have been silent for 4 s: ranks 0-1, 4-5. Those are all the others: is the link of host b cut?" ;;
    2)
      says "0 1 2 3" "Host c has been silent for 4 s: ranks 4-5."
      says "4 5" "Host c has heard nothing from hosts a and b for 4 s: is its link cut?" ;;
  esac
  down
done

up
echo "the links of all hosts are cut for two seconds, one after the other"
for host in 0 1 2; do
  cut_link $host down
  sleep 2
  cut_link $host up
  sleep 3  # what was lost is sent again within a second or two, and every rank has heard every other one
done
for rank in 0 1 2 3 4 5; do echo end > "$folder/do.$rank"; done
since=$(now)
for rank in 0 1 2 3 4 5; do
  await "$folder/result.$rank"
  read -r _ _ _ text < "$folder/result.$rank"
  if [ "$text" != ok ]; then
    echo "FAILED: rank $rank says: $text" >&2
    exit 1
  fi
done
echo "  nobody was named"
