#!/usr/bin/env bash
# Configures and builds one preset:  scripts/build.sh PRESET [TARGET ...]
# The release preset has the Python package too, where scripts/python_environment.sh has made the environment for it.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, debug, asan, tsan, fuzz}
shift
if [[ $preset != release ]]; then python_options=(-DZERO_BUILD_PYTHON=OFF); fi
say "Building preset $preset with LibTorch in $LIBTORCH_ROOT"
log=$(cmake --preset "$preset" -DLIBTORCH_ROOT="$LIBTORCH_ROOT" "${python_options[@]}" 2>&1) || {
  printf '%s\n' "$log" >&2
  exit 1
}
cmake --build "build/$preset" --parallel "$(job_count)" ${1:+--target "$@"}
