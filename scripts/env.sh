# shellcheck shell=bash
# Sourced by the other scripts: where the sources and LibTorch are, and how many jobs fit in this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default_version=$(sed -n 's/^set(LibTorch_DEFAULT_VERSION \(.*\))$/\1/p' cmake/FindLibTorch.cmake)
LIBTORCH_VERSION=${LIBTORCH_VERSION:-$default_version}
libtorch_cache=${XDG_CACHE_HOME:-${HOME:?HOME is not set}/.cache}/libzero
# LIBTORCH=DIR: an existing LibTorch; nothing is downloaded.
LIBTORCH_ROOT=$(realpath -m "${LIBTORCH:-$libtorch_cache/libtorch-$LIBTORCH_VERSION}")
export LIBTORCH_ROOT

# A compiler needs up to 1.5 GB: jobs are the cores, or fewer where memory is short.
job_count() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
  echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

say() { printf '\n== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
