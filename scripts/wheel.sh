#!/usr/bin/env bash
# Builds the wheel of the Python package into build/wheel:  scripts/wheel.sh
#   PYTHON=FILE     for this Python instead of the environment's (or python3 where there is none); it needs its headers and pip
#   LIBTORCH=DIR    for the torch in this folder (a site-packages) instead of the LibTorch that `make setup` installs
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
python=${PYTHON:-$python_environment}
command -v "$python" >/dev/null || python=python3
folder=build/wheel
# The compiler by the name that CMake finds it by: ccache then has what the release build compiled. (scikit-build-core prefers that of Python's build.)
export CXX=${CXX:-c++}
# Without the backend pip fetches it for this build.
options=()
if "$python" -c 'import scikit_build_core' 2>/dev/null; then options=(--no-build-isolation); fi

say "Building the wheel for $("$python" --version) with LibTorch in $LIBTORCH_ROOT" >&2
mkdir -p $folder
rm -f $folder/*.whl
CMAKE_BUILD_PARALLEL_LEVEL=$(job_count) "$python" -m pip wheel --quiet --progress-bar off --disable-pip-version-check --no-deps "${options[@]}" \
  --wheel-dir $folder ./python >&2 || die "the wheel was not built"
echo "$PWD"/$folder/*.whl
