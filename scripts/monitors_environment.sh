#!/usr/bin/env bash
# Installs the package `tensorboard`, with which a test reads the event files that `zero train` writes, into a virtual environment outside of
# the checkout: some 30 MB to download, without TensorFlow and without what only servers need.
#
#   scripts/monitors_environment.sh      prints the environment's Python
#
# What is there already is kept; remove the folder to start afresh.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

environment=$libtorch_cache/monitors
python=$environment/bin/python
packages=(tensorboard==2.21.0 protobuf==6.33.6 numpy==2.3.5 absl-py==2.5.1 packaging==26.3)
reader='from tensorboard.backend.event_processing import event_accumulator'

if ! "$python" -c "$reader" >/dev/null 2>&1; then
  say "Installing tensorboard to $environment" >&2
  python3 -m venv "$environment" || die "Python's module venv is missing: as root, run: apt-get install python3-venv"
  "$python" -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps "${packages[@]}" >&2 ||
    die "pip could not install it; run it again"
  "$python" -c "$reader" >&2 || die "tensorboard cannot be imported"
fi
echo "$python"
