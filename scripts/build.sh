#!/usr/bin/env bash
# Configures and builds one preset:  scripts/build.sh PRESET [--configure | [--keep-going] [TARGET ...]]
#   --configure    only configures
#   --keep-going   builds what it can when a file does not compile
# The presets release and cuda have the Python package too, where scripts/python_environment.sh has made the environment for it.
if [[ ${1:-} == cuda ]]; then export CUDA=1; fi
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, cuda, debug, asan, tsan}
shift
if [[ $preset != release && $preset != cuda ]]; then python_options=(-DZERO_BUILD_PYTHON=OFF); fi
say "Building preset $preset with LibTorch in $LIBTORCH_ROOT"
# CMake cannot go from one compiler to another in a folder; the sanitizers' was g++ once.
if [[ $preset == [at]san ]] && ! grep -q '^CMAKE_CXX_COMPILER:.*clang' "build/$preset/CMakeCache.txt" 2>/dev/null; then fresh=(--fresh); fi
log=$(cmake --preset "$preset" -DLIBTORCH_ROOT="$LIBTORCH_ROOT" "${python_options[@]}" "${fresh[@]}" 2>&1) || {
  printf '%s\n' "$log" >&2
  exit 1
}
if [[ ${1:-} == --configure ]]; then exit; fi
keep_going=()
if [[ ${1:-} == --keep-going ]]; then
  keep_going=(-- -k 0)
  shift
fi
cmake --build "build/$preset" --parallel "$(job_count)" ${1:+--target "$@"} "${keep_going[@]}"
