#!/usr/bin/env bash
# clang-format over the C++ files that git knows:  scripts/format.sh [check]     check: change nothing, fail on a difference
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mode=(-i)
if [[ ${1:-} == check ]]; then mode=(--dry-run --Werror); fi
# One release, since their results differ.
command -v clang-format-14 >/dev/null || die "clang-format-14 is missing: scripts/setup.sh lint installs it"
git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 --no-run-if-empty clang-format-14 "${mode[@]}"
