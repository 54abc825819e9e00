#!/usr/bin/env bash
# clang-tidy over every source (or those named):  scripts/lint.sh [FILE ...]
# About 10 seconds of one core for each file. It rejects g++'s precompiled headers, so it has a build folder of its own, only configured.
# The first time it installs the release below beside LibTorch, in an environment of its own: earlier ones read system headers, too, three
# times as long. Tests go without clang's static analyzer, which takes most of the time for GoogleTest's macros; the sanitizers run them.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
release=22.1.8
tools=$libtorch_cache/clang-tidy-$release
if [[ ! -x $tools/bin/clang-tidy ]]; then
  say "Installing clang-tidy $release to $tools"
  python3 -m venv "$tools" || die "Python's module venv is missing: as root, run: apt-get install python3-venv"
  "$tools/bin/pip" install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps "clang-tidy==$release" ||
    die "pip could not install clang-tidy; run it again"
fi
omp=$(compgen -G '/usr/lib/llvm-*/lib/clang/*/include/omp.h' | tail -1) || die "omp.h for clang is missing: run scripts/setup.sh lint"
log=$(cmake --preset lint -DLIBTORCH_ROOT="$LIBTORCH_ROOT" "${python_options[@]}" 2>&1) || {
  printf '%s\n' "$log" >&2
  exit 1
}
left_out=(':!examples' ':!cmake')
if [[ ${python_options[*]} == *=OFF ]]; then left_out+=(':!python'); fi
grep -q plugins/cuda build/lint/compile_commands.json || left_out+=(':!plugins/cuda')
if (($# == 0)); then mapfile -t files < <(git ls-files '*.cpp' "${left_out[@]}"); else files=("$@"); fi
say "clang-tidy over ${#files[@]} files, $(job_count) at a time"
start=$SECONDS status=0
export tidy="$tools/bin/clang-tidy --quiet --experimental-custom-checks -p build/lint --extra-arg=-Wno-unknown-warning-option --extra-arg=-idirafter${omp%/omp.h}"
# xargs would leave out the rest if a signal killed clang-tidy, so a shell stands between them.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(job_count)" sh -c '
    case $0 in tests/*) set -- --checks=-clang-analyzer-* ;; esac
    $tidy "$@" "$0" || exit 1' 2> >(grep -v 'warnings generated\|warnings treated\|Suppressed' >&2) || status=1
echo "clang-tidy: $((SECONDS - start)) s, $([[ $status == 0 ]] && echo clean || echo 'findings above')"
exit $status
