#!/usr/bin/env bash
# Builds the wheel, installs it in a fresh virtual environment, and runs the README's loop there on 2 ranks, started by `zero launch` and by torchrun.
#   wheel_test.sh SOURCE_FOLDER PYTHON
# The fresh environment sees the torch of PYTHON's, so that it is not downloaded again.
set -euo pipefail
source=$1 python=$2
unset PYTHONPATH LD_LIBRARY_PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  exit 1
}

wheel=$(LIBTORCH=$ZERO_LIBTORCH PYTHON=$python "$source/scripts/wheel.sh" | tail -n 1)
"$python" -m zipfile --list "$wheel"
if "$python" -m zipfile --list "$wheel" | grep -E 'libtorch|libc10|libgomp|cmake|include/|_C.so'; then fail "the wheel holds what it should not"; fi

"$python" -m venv --without-pip "$work/fresh"
fresh=$work/fresh/bin/python
"$python" -m pip --python "$fresh" install --quiet --no-deps --no-index --disable-pip-version-check "$wheel"
cd "$work"
where='import sysconfig; print(sysconfig.get_paths()["purelib"])'
site=$("$fresh" -c "$where")
if "$fresh" -c 'import libzero' >without.log 2>&1; then fail "libzero without torch"; fi
grep -q "ImportError: libzero needs torch 2.11, and .* has no torch" without.log || fail "$(cat without.log)"
if fresh/bin/zero --version >without.log 2>&1; then fail "zero without torch"; fi
grep -q "torch is not installed" without.log || fail "$(cat without.log)"
"$fresh" -c 'from importlib.metadata import requires; assert requires("libzero") == ["torch==2.11.*"], requires("libzero")'

"$python" -c "$where" >"$site/torch_of_another_environment.pth"
fresh/bin/zero --version
# The plugin for CUDA devices, which is in the wheel where a toolkit is, finds torch's libraries; what is missing then is a device.
"$fresh" - "$site/libzero/libzero_cuda.so" <<'PYTHON'
import os, sys
import torch
import libzero
from libzero import _C
message = ""
try:
    _C.load_device_plugin("cuda")
except libzero.ConfigError as error:
    message = str(error)
has = [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in ("zero::update_", "zero::squared_norm_")]
built = os.path.exists(sys.argv[1])
print("plugin for CUDA devices:", "in the wheel" if built else "not in the wheel", "--", message or "loaded")
assert has == [built, built], (built, has, message)
if built:
    assert message == "" if torch.cuda.is_available() else "finds no CUDA device" in message, message
else:
    assert message.startswith("The plugin for CUDA devices cannot be loaded: libzero_cuda.so:"), message
PYTHON
awk '/^## / {inside = $0 == "## From Python"} /^```/ {open = inside && $0 == "```python"; next} open {print}' "$source/README.md" >train.py
grep -q "optimizer = libzero.shard(" train.py || fail "the README has no loop under 'From Python'"
cat "$source/tests/python/loaded_libraries.py" >>train.py
folders=("$site/libzero" "$("$python" -c "$where")/torch")
fresh/bin/zero launch -n 2 --logs rank0 -- "$fresh" train.py "${folders[@]}" | tee launch.log
"$fresh" -m torch.distributed.run --standalone --nproc-per-node 2 train.py "${folders[@]}" 2>torchrun.errors | tee torchrun.log || fail "$(cat torchrun.errors)"
diff launch.log torchrun.log || fail "torchrun gave another loss"
grep -q "^step 999 loss 0x1" torchrun.log || fail "no loss"
"$fresh" train.py "${folders[@]}" || fail "without a launcher"
