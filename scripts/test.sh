#!/usr/bin/env bash
# Runs the suite of one preset that is built:  scripts/test.sh PRESET [--short] [CTEST ARGUMENT ...]
#   --short   without the tests that have the label `long`
# Each test says how many cores it takes (PROCESSORS), and ctest runs as many at once as fit on this machine.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, debug, asan, tsan, cuda}
shift
short=()
if [[ ${1:-} == --short ]]; then
  short=(-LE '^long$')
  shift
fi
ctest --preset "$preset" --no-tests=ignore --parallel "$(nproc)" "${short[@]}" "$@"
