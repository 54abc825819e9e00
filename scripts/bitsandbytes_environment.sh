#!/usr/bin/env bash
# Installs bitsandbytes beside the environment of scripts/python_environment.sh, whose PyTorch and transformers it uses, for the test
# python_bitsandbytes_test (ctest -L peers): 60 MB, in a folder of its own, since peft imports bitsandbytes wherever it is.
#
#   scripts/bitsandbytes_environment.sh      prints the folder, which the test looks for
#
# The script keeps a folder that is already there; remove it to start afresh.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

folder=$libtorch_cache/bitsandbytes
package=bitsandbytes==0.50.2

if [[ ! -d $folder/bitsandbytes ]]; then
  base=$(scripts/python_environment.sh)
  say "Installing bitsandbytes to $folder" >&2
  "$base" -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps --target "$folder" "$package" >&2 ||
    die "pip could not install $package; run it again"
fi
echo "$folder"
