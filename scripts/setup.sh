#!/usr/bin/env bash
# Installs what building and testing need, and only what is missing: packages of Debian 12 or Ubuntu 24.04 by apt, LibTorch from PyPI.
#   scripts/setup.sh [lint] [asan] [mpi]
#                                  lint: also clang-format, and the omp.h that clang-tidy reads; asan: also clang, its sanitizers and its
#                                  fuzzer; mpi: also OpenMPI and MPICH with their headers, for rails over them and their tests
#   CUDA=1                         LibTorch with its CUDA libraries, beside that for CPUs: 3.6 GB on disk
#   LIBTORCH=DIR                   use this LibTorch (official archive, or the folder of a pip-installed torch); no download
#   LIBTORCH_VERSION=2.15.0        another release of which scripts/ has a libtorch-VERSION.txt
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

packages=(
  g++ cmake ninja-build pkg-config ccache                                  # tools
  ca-certificates python3-pip unzip                                        # to fetch LibTorch
  libcli11-dev libfmt-dev libhwy-dev libpcre2-dev libprotozero-dev liburing-dev libsentencepiece-dev libutf8proc-dev libutfcpp-dev
  libxxhash-dev nlohmann-json3-dev
  libgmock-dev libgtest-dev openmpi-bin python3-venv                       # tests and benchmarks
  python3-dev                                                              # the Python package
  bible-kjv                                                                # the text of `make demo`
)
for more in "$@"; do
  case $more in
    lint) packages+=(clang-format-14 libomp-16-dev) ;;
    asan) packages+=(clang-16 libclang-rt-16-dev) ;;
    mpi) packages+=(libopenmpi-dev libmpich-dev mpich) ;;
    *) die "'$more' is no set of packages: there are lint, asan and mpi" ;;
  esac
done

install_packages() {
  command -v dpkg-query >/dev/null || {
    echo "No dpkg on this machine: the equivalents of these packages are needed: ${packages[*]}"
    return
  }
  local missing=() package as_root=()
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then return; fi
  if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || die "neither root nor sudo; as root, run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "Installing ${#missing[@]} system packages: ${missing[*]}"
  "${as_root[@]}" apt-get -qq update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "${missing[@]}" >/dev/null ||
    die "apt could not install: ${missing[*]}"
}

# Downloads three wheels (550 MB), keeps the headers and the CPU libraries (500 MB); with CUDA=1 fifteen, and all libraries. All in a
# temporary folder that is renamed at the end: what stands under the final name is whole.
install_libtorch() {
  if [[ -d $LIBTORCH_ROOT ]]; then return; fi
  if [[ -n ${LIBTORCH:-} ]]; then die "LIBTORCH=$LIBTORCH is not a folder"; fi
  local requirements=scripts/$libtorch_name.txt known prefix=${libtorch_name%"$LIBTORCH_VERSION"}
  known=$(printf '%s\n' "scripts/$prefix"[0-9]*.txt | sed "s/.*$prefix\(.*\)\.txt/\1/" | paste -sd ' ')
  [[ -f $requirements ]] || die "LIBTORCH_VERSION=$LIBTORCH_VERSION is not pinned${prefix#libtorch}; known: $known (or LIBTORCH=DIR for one of your own)"
  [[ $(uname -m) == x86_64 ]] || die "the pinned LibTorch is for x86_64, this machine is $(uname -m): set LIBTORCH=DIR"

  say "Installing LibTorch $LIBTORCH_VERSION to $LIBTORCH_ROOT"
  mkdir -p "$libtorch_cache"
  find "$libtorch_cache" -maxdepth 1 -name '.incomplete-*' -mmin +120 -exec rm -rf {} +  # of a set-up that was killed
  if [[ ${CUDA:-0} == 1 ]]; then
    local free
    free=$(($(df --output=avail -k "$libtorch_cache" | tail -n 1) / 1000000))
    ((free >= 8)) || die "LibTorch with CUDA needs 8 GB of room to be installed, and $libtorch_cache has $free GB left: free some, or set XDG_CACHE_HOME"
  fi
  temporary=$(mktemp -d "$libtorch_cache/.incomplete-XXXXXX")
  trap 'rm -rf "$temporary"' EXIT
  # pip's own temporary files go there too: /tmp may be small. The wheel of any Python will do. That of this machine's has the files of the
  # torch that scripts/python_environment.sh installs, which can then be on the disk once; not each has a hash in $requirements.
  local python
  python=$(python3 -c 'import sys; print("{}.{}".format(*sys.version_info))')
  grep -q "^# Python:.* $python\>" "$requirements" || python=3.12
  TMPDIR=$temporary python3 -m pip download --quiet --progress-bar off --no-cache-dir --no-deps --only-binary=:all: \
    --python-version "$python" --require-hashes --requirement "$requirements" --dest "$temporary/wheels" ||
    die "pip could not download LibTorch; run it again, or set LIBTORCH=DIR"
  local lib=torch/lib libraries=() wheel
  if [[ ${CUDA:-0} == 1 ]]; then
    libraries=("$lib"/lib{torch_cuda,torch_cuda_linalg,torch_nvshmem,c10_cuda,caffe2_nvrtc}.so)
    unzip -qo "$temporary"/wheels/nvidia_nccl_*.whl 'nvidia/nccl/include/*' -d "$temporary/libtorch"
    for wheel in "$temporary"/wheels/nvidia_*.whl; do
      unzip -qo "$wheel" 'nvidia/*/lib/lib*.so*' -d "$temporary/libtorch"
      rm "$wheel"
    done
  else
    unzip -qo "$temporary"/wheels/nvidia_cuda_runtime-*.whl 'nvidia/*/lib/libcudart.so*' -d "$temporary/libtorch"
    unzip -qo "$temporary"/wheels/nvidia_cuda_cupti-*.whl 'nvidia/*/lib/libcupti.so*' -d "$temporary/libtorch"
  fi
  unzip -qo "$temporary"/wheels/torch-*.whl 'torch/include/*' $lib/libtorch_cpu.so $lib/libc10.so $lib/libgomp.so.1 "${libraries[@]}" \
    -d "$temporary/libtorch"
  chmod 755 "$temporary/libtorch"
  mv -T "$temporary/libtorch" "$LIBTORCH_ROOT" 2>/dev/null ||
    [[ -d $LIBTORCH_ROOT ]] || die "could not write $LIBTORCH_ROOT"  # else another set-up was faster
}

install_packages
install_libtorch
