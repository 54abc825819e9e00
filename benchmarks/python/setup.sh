#!/usr/bin/env bash
# Adds transformers to the environment of benchmarks/peers/setup.sh (PyTorch, DeepSpeed), which it makes where it is missing.
#
# Compiles DeepSpeed's CPU Adam, which takes minutes the first time.
#
#   benchmarks/python/setup.sh      prints the environment's Python
set -euo pipefail
python=$("$(dirname "${BASH_SOURCE[0]}")/../peers/setup.sh" | tail -n 1)
transformers=5.24.0
"$python" -c "import transformers; assert transformers.__version__ == '$transformers'" >/dev/null 2>&1 ||
  "$python" -m pip install --quiet --progress-bar off --no-cache-dir "transformers==$transformers" >&2 ||
  { echo "error: pip could not install transformers; run it again" >&2; exit 1; }
# DeepSpeed compiles its CPU Adam at the first use: here, not in the first run that is timed.
DS_ACCELERATOR=cpu "$python" -c '
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])' >&2 || { echo "error: DeepSpeed could not compile its CPU Adam" >&2; exit 1; }
echo "$python"
