#!/usr/bin/env bash
# clang-tidy over every source (or those named):  scripts/lint.sh [FILE ...]
# About 15 seconds of one core for each file. It rejects g++'s precompiled headers, so it has a build folder of its own, only configured.
# Tests go without clang's static analyzer, which would take four times as long for GoogleTest's macros; the sanitizers run them.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
log=$(cmake --preset lint -DLIBTORCH_ROOT="$LIBTORCH_ROOT" "${python_options[@]}" 2>&1) || {
  printf '%s\n' "$log" >&2
  exit 1
}
left_out=(':!examples' ':!cmake')
if [[ ${python_options[*]} == *=OFF ]]; then left_out+=(':!python'); fi
if (($# == 0)); then mapfile -t files < <(git ls-files '*.cpp' "${left_out[@]}"); else files=("$@"); fi
say "clang-tidy over ${#files[@]} files, $(job_count) at a time"
start=$SECONDS status=0
# Where clang-tidy is killed by a signal xargs would leave out the rest; hence the shell between them.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(job_count)" sh -c '
    case $0 in tests/*) set -- --checks=-clang-analyzer-* ;; esac
    clang-tidy-16 --quiet -p build/lint --extra-arg=-Wno-unknown-warning-option "$@" "$0" || exit 1' 2> >(grep -v 'warnings generated\|warnings treated\|Suppressed' >&2) || status=1
echo "clang-tidy: $((SECONDS - start)) s, $([[ $status == 0 ]] && echo clean || echo 'findings above')"
exit $status
