#!/usr/bin/env bash
# Runs the suite of one preset that is built:  scripts/test.sh PRESET [--short] [CTEST ARGUMENT ...]
#   --short   without the tests that have the label `long`
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, debug, asan, tsan, cuda}
shift
short=
if [[ ${1:-} == --short ]]; then
  short=1
  shift
fi
# run JOBS CTEST-ARGUMENT ...
run() {
  local jobs=$1
  shift
  ctest --preset "$preset" --no-tests=ignore --parallel "$jobs" "$@"
}
failed=0
# A test starts up to 4 ranks: half as many of these at once as there are cores. Those of one core come first.
run "$(nproc)" -L one_core ${short:+-LE long} "$@" || failed=1
run "$((($(nproc) + 1) / 2))" -LE "one_core${short:+|long}" "$@" || failed=1
exit $failed
