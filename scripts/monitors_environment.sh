#!/usr/bin/env bash
# Installs the packages `tensorboard` and `wandb`, with which tests read the files that `zero train` writes for them, into a virtual
# environment outside of the checkout: some 50 MB to download, without TensorFlow and without what only servers need.
#
#   scripts/monitors_environment.sh      prints the environment's Python
#
# What is there already is kept; remove the folder to start afresh.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

environment=$libtorch_cache/monitors
python=$environment/bin/python
packages=(tensorboard==2.21.0 protobuf==6.33.6 numpy==2.3.5 absl-py==2.5.1 packaging==26.3
  wandb==0.22.3 click==8.5.1 GitPython==3.2.1 gitdb==4.0.12 smmap==5.0.3 platformdirs==4.14.8 pydantic==2.14.4
  pydantic_core==2.50.5 annotated-types==0.8.0 typing_extensions==4.16.0 typing-inspection==0.4.5 PyYAML==6.0.4
  requests==2.34.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.19.post1 charset-normalizer==3.5.2 sentry-sdk==2.75.0)
# The reader of event files, and that of offline runs, which later releases of wandb lack.
readers='from tensorboard.backend.event_processing import event_accumulator; from wandb.sdk.internal import datastore'

if ! "$python" -c "$readers" >/dev/null 2>&1; then
  say "Installing tensorboard and wandb to $environment" >&2
  python3 -m venv "$environment" || die "Python's module venv is missing: as root, run: apt-get install python3-venv"
  "$python" -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps "${packages[@]}" >&2 ||
    die "pip could not install them; run it again"
  "$python" -c "$readers" >&2 || die "tensorboard or wandb cannot be imported"
fi
echo "$python"
