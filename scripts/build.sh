#!/usr/bin/env bash
# Configures and builds one preset:  scripts/build.sh PRESET [TARGET ...]
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, debug, asan, tsan, fuzz}
shift
say "Building preset $preset with LibTorch in $LIBTORCH_ROOT"
log=$(cmake --preset "$preset" -DLIBTORCH_ROOT="$LIBTORCH_ROOT" 2>&1) || {
  printf '%s\n' "$log" >&2
  exit 1
}
cmake --build "build/$preset" --parallel "$(job_count)" ${1:+--target "$@"}
