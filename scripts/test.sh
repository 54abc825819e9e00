#!/usr/bin/env bash
# Runs the suite of one preset that is built:  scripts/test.sh PRESET [--short] [CTEST ARGUMENT ...]
#   --short   without the tests that have the label `long`
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, debug, asan, tsan, cuda}
shift
without=()
if [[ ${1:-} == --short ]]; then
  without=(long)
  shift
fi
# run JOBS CTEST-ARGUMENT ...
run() {
  local jobs=$1
  shift
  ctest --preset "$preset" --no-tests=ignore --parallel "$jobs" "$@"
}
excluded() {
  local IFS='|'
  echo "$*"
}
failed=0
# A test starts up to 4 ranks: half as many of these at once as there are cores. Those of one core come first.
run "$(nproc)" -L one_core ${without[0]:+-LE "$(excluded "${without[@]}")"} "$@" || failed=1
run "$((($(nproc) + 1) / 2))" -LE "$(excluded one_core "${without[@]}")" "$@" || failed=1
exit $failed
