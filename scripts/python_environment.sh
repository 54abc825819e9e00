#!/usr/bin/env bash
# Installs PyTorch (the release of the LibTorch that libzero is built with), Hugging Face's transformers, peft and accelerate, lightning and scikit-build-core,
# into a virtual environment outside of the checkout, for tests/python and scripts/wheel.sh: 3 GB to download and 5 GB on disk, since
# PyTorch's wheel brings its CUDA libraries, which are not used.
#
#   scripts/python_environment.sh      prints the environment's Python
#
# The script keeps an environment that is already there; remove the folder to start afresh. Files that are equal to those of the LibTorch of
# scripts/setup.sh become links to them, so that the disk holds them once.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

environment=$libtorch_cache/python
requirements=scripts/python-environment.txt
pinned=$(sed -n 's/^torch==//p' $requirements)
[[ -z ${LIBTORCH:-} && $LIBTORCH_VERSION == "$pinned" ]] ||
  die "the tests of the Python package need torch $pinned, and this is another LibTorch: they are left out (scripts/wheel.sh builds the package for it)"
# Not by imports, which take seconds.
missing='
import sys
from importlib.metadata import PackageNotFoundError, version
for line in open(sys.argv[1]):
    name, _, pinned = line.partition("#")[0].strip().partition("==")
    try:
        if name and version(name) != pinned: print(name)
    except PackageNotFoundError:
        print(name)'

if [[ ! -x $python_environment || -n $("$python_environment" -c "$missing" $requirements) ]]; then
  say "Installing PyTorch and transformers to $environment" >&2
  python3 -m venv "$environment" || die "Python's module venv is missing: as root, run: apt-get install python3-venv"
  # All are named, so that nothing is looked for; pip's own temporary files go there too: /tmp may be small.
  mkdir -p "$environment/tmp"
  TMPDIR=$environment/tmp "$python_environment" -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps \
    --requirement $requirements >&2 || die "pip could not install them; run it again"
  rmdir "$environment/tmp"
  [[ -z $("$python_environment" -c "$missing" $requirements) ]] || die "not all of $requirements is installed in $environment"
fi

# Replaces headers and libraries of torch by links to those of LibTorch, if they are equal byte for byte.
share_torch() {
  local site file
  site=$(printf '%s\n' "$environment"/lib/python3*/site-packages)
  [[ -d $LIBTORCH_ROOT/torch && ! $site/torch/lib/libc10.so -ef $LIBTORCH_ROOT/torch/lib/libc10.so ]] || return 0
  while IFS= read -r -d '' file; do
    if [[ -f $site/$file && ! -L $site/$file ]] && cmp -s "$LIBTORCH_ROOT/$file" "$site/$file"; then
      ln -f "$LIBTORCH_ROOT/$file" "$site/$file" || return 0 # other file systems
    fi
  done < <(cd "$LIBTORCH_ROOT" && find torch nvidia -type f ! -name libc10.so -print0)
  # The last one: it says that all is done.
  cmp -s {"$LIBTORCH_ROOT","$site"}/torch/lib/libc10.so && ln -f {"$LIBTORCH_ROOT","$site"}/torch/lib/libc10.so
}
share_torch || true
echo "$python_environment"
