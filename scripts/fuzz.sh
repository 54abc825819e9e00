#!/usr/bin/env bash
# Builds the fuzzers of tests/fuzz under AddressSanitizer and UBSan and runs each, two at a time:  scripts/fuzz.sh [SECONDS] [NAME ...]
# Prints for each: inputs tried, crashes. Inputs that crash stay in build/asan/tests/fuzz/crashes,
# those that reach new code in .../corpus.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
seconds=${1:-60}
shift || true
names=("$@")
if ((${#names[@]} == 0)); then names=(config pt safetensors text tokenizer tokens); fi
scripts/build.sh asan "${names[@]/#/fuzz_}"

folder=build/asan/tests/fuzz
TMPDIR=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)  # inputs that are files
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
say "Fuzzing ${names[*]}, $seconds s each"
run() {
  local name=$1 program=$folder/fuzz_$1 status=0
  mkdir -p "$folder/corpus/$name" "$folder/crashes/$name"
  "$program" seeds "$folder/corpus/$name"
  "$program" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$folder/crashes/$name/" "$folder/corpus/$name" >"$folder/$name.log" 2>&1 || status=1
  echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$folder/$name.log") inputs tried, $status crashes"
  if ((status != 0)); then tail -n 60 "$folder/$name.log"; fi
  return $status
}
failed=0 pids=()
for name in "${names[@]}"; do
  while (($(jobs -pr | wc -l) >= 2)); do sleep 1; done
  run "$name" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed
