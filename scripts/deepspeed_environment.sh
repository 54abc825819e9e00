#!/usr/bin/env bash
# Installs DeepSpeed beside the environment of scripts/python_environment.sh, whose PyTorch it uses, for the tests with the label `peers`:
# 10 MB, in a folder of its own, so that the environment stays as it is. No operator is compiled.
#
#   scripts/deepspeed_environment.sh      prints the environment's Python
#
# The script keeps an environment that is already there; remove the folder to start afresh.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

environment=$libtorch_cache/deepspeed
python=$environment/bin/python
packages=(setuptools==80.9.0 wheel==0.45.1 hjson==3.1.0 py-cpuinfo==9.0.0 psutil==7.1.3 msgpack==1.1.2 ninja==1.13.0 einops==0.8.1 tqdm==4.67.1 pydantic==2.12.5)
deepspeed=deepspeed==0.19.8

if ! "$python" -c 'import torch, deepspeed' >/dev/null 2>&1; then
  base=$(scripts/python_environment.sh)
  say "Installing DeepSpeed to $environment" >&2
  "$base" -m venv "$environment"
  "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
  pip=("$python" -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check)
  "${pip[@]}" "${packages[@]}" >&2 || die "pip could not install ${packages[*]}; run it again"
  # Its set-up imports torch, so it is not built in isolation.
  DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation --no-deps "$deepspeed" >&2 || die "pip could not install DeepSpeed; run it again"
fi
echo "$python"
