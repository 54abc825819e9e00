#!/usr/bin/env bash
# Runs the suite of one preset that is built:  scripts/test.sh PRESET [CTEST ARGUMENT ...]
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
preset=${1:?a preset: release, cuda, debug, asan, tsan}
shift
# A test starts up to 4 ranks: half as many tests at once as there are cores.
ctest --preset "$preset" --parallel "$((($(nproc) + 1) / 2))" "$@"
