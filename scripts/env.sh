# shellcheck shell=bash
# Sourced by the other scripts: where the sources and LibTorch are, and how many jobs fit in this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default_version=$(sed -n 's/^set(LibTorch_DEFAULT_VERSION \(.*\))$/\1/p' cmake/FindLibTorch.cmake)
LIBTORCH_VERSION=${LIBTORCH_VERSION:-$default_version}
libtorch_cache=${XDG_CACHE_HOME:-${HOME:?HOME is not set}/.cache}/libzero
# CUDA=1: the LibTorch that has CUDA libraries too, in a folder of its own.
case ${CUDA:-0} in
  0) libtorch_name=libtorch-$LIBTORCH_VERSION ;;
  1) libtorch_name=libtorch-cuda-$LIBTORCH_VERSION ;;
  *)
    printf 'error: CUDA=%s: it may be 1, for a LibTorch with CUDA, or 0\n' "$CUDA" >&2
    exit 1
    ;;
esac
# LIBTORCH=DIR: an existing LibTorch; nothing is downloaded.
LIBTORCH_ROOT=$(realpath -m "${LIBTORCH:-$libtorch_cache/$libtorch_name}")
export LIBTORCH_ROOT
# The Python of scripts/python_environment.sh. The Python package is built for it where it has the torch of the LibTorch above.
python_environment=$libtorch_cache/python/bin/python
# shellcheck disable=SC2034
python_options=(-DZERO_BUILD_PYTHON=OFF)
if [[ -z ${LIBTORCH:-} ]] && compgen -G "$libtorch_cache/python/lib/python3*/site-packages/torch-$LIBTORCH_VERSION.dist-info" >/dev/null; then
  python_options=(-DZERO_BUILD_PYTHON=ON -DPython_EXECUTABLE="$python_environment")
fi

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
