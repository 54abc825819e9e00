#!/usr/bin/env bash
# Checks libzero on the GPU of this machine, and writes one report:  scripts/gpu_check.sh [OPTION ...]
#   --device cuda|cpu   cpu: the CPU stands in, with small sizes, to try this script itself [cuda]
#   --out FILE          the report, in Markdown [run/gpu-check/report.md]; the parts' whole output goes beside it
#   --build DIR         programs that are built already [build/cuda, or build/release for the CPU, which are built first]
#   --ranks N           of the training and the measurements [the number of GPUs; 2 for the CPU]
#   --model NAME        of the measurements [gpt2; gpt2-nano for the CPU]
# Every part runs within a time limit of its own, whatever became of the others. Exit status 1 where one failed. A part that lacks a tool
# is "not run", with the reason, and no failure.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
device=cuda out='' build='' ranks='' model=''
while (($# > 0)); do
  case $1 in
    --device | --out | --build | --ranks | --model)
      [[ $# -gt 1 ]] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --help | -h)
      sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//p}' "scripts/$(basename "${BASH_SOURCE[0]}")"
      exit 0
      ;;
    *) die "$1 is no option; scripts/gpu_check.sh --help lists them" ;;
  esac
done
case $device in
  cuda) preset=cuda gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -c .) || true ;;
  cpu) preset=release gpus=2 ;;
  *) die "--device is '$device'; it may be cuda or cpu" ;;
esac
[[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || die "--ranks is '$ranks'; it should be a number from 1"
ranks=${ranks:-$((gpus > 0 ? gpus : 1))}
report=$(realpath -m "${out:-run/gpu-check/report.md}")
work=${report%.md}.parts
mkdir -p "$work"
rm -rf "${work:?}"/*
if [[ $device == cuda ]]; then
  model=${model:-gpt2}
  sizes=(--dtype bf16 --micro-batch 8 --seq 1024 --steps 10 --warmup 3)
  rounds=3 train_steps=20
else
  model=${model:-gpt2-nano}
  sizes=(--dtype bf16 --micro-batch 1 --seq 32 --steps 1 --warmup 1)
  rounds=1 train_steps=3
fi

names=() results=() seconds=() failed=0
# part NAME LIMIT_S FUNCTION: runs it in a shell of its own. Status 77: not run, and the last line of its output says why.
part() {
  local name=$1 limit=$2 begin=$SECONDS status=0 result
  say "$name" >&2
  # shellcheck disable=SC2163
  export -f "$3"
  timeout --kill-after 10 "$limit" bash -euo pipefail -c "$3" >"$work/$name.log" 2>&1 || status=$?
  case $status in
    0) result=passed ;;
    77) result="not run: $(tail -n 1 "$work/$name.log")" ;;
    124 | 137) result="**failed**: it took more than $limit s, or was killed" ;;
    *) result="**failed**: exit status $status" ;;
  esac
  if [[ $result == '**failed'* ]]; then
    failed=$((failed + 1))
    tail -n 5 "$work/$name.log" >&2
  fi
  names+=("$name") results+=("$result") seconds+=($((SECONDS - begin)))
  echo "$name: $result" >&2
}

build_programs() {
  if [[ $device == cuda ]]; then CUDA=1 scripts/setup.sh; else scripts/setup.sh; fi
  local plugin=()
  if [[ $device == cuda ]]; then plugin=(zero_cuda); fi
  scripts/build.sh "$preset" zero_program cuda_plugin_test cuda_device_test "${plugin[@]}"
}

environment() {
  echo "libzero          $(git describe --always --dirty 2>/dev/null || echo 'no git here')"
  "$build/zero" --version
  echo "system           $(uname -sr), $(nproc) cores"
  grep -m 1 'model name' /proc/cpuinfo || true
  local root nccl
  root=$(sed -n 's/^LIBTORCH_ROOT:.*=//p' "$build/CMakeCache.txt")
  echo "LibTorch         $root"
  nccl=$(find -L "$root" "$root/.." -maxdepth 4 -name 'libnccl.so.2' 2>/dev/null | head -n 1)
  if [[ -n $nccl ]]; then
    python3 -c 'import ctypes, sys; v = ctypes.c_int(); ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)); print(f"NCCL             {v.value // 10000}.{v.value // 100 % 100}.{v.value % 100}")' "$nccl"
  fi
  if [[ $device == cpu ]]; then return; fi
  if command -v nvcc >/dev/null; then nvcc --version | tail -n 2; fi
  command -v nvidia-smi >/dev/null || {
    echo "nvidia-smi is not found: is there a driver?"
    exit 1
  }
  nvidia-smi --query-gpu=index,name,memory.total,driver_version,compute_cap,power.limit --format=csv
  nvidia-smi topo -m
}

plugin() { "$build/tests/cuda/cuda_plugin_test" --gtest_brief=1; }
device_tests() { ZERO_CHECK_DEVICE=$device OMP_NUM_THREADS=1 "$build/tests/cuda/cuda_device_test" --gtest_filter="$1"; }
kernels() { device_tests 'DeviceKernels.*'; }
training_parity() { device_tests 'DeviceTraining.*'; }
refusals() { device_tests 'Device.*'; }

sanitizer() {
  if [[ $device == cpu ]]; then
    echo "compute-sanitizer watches a GPU"
    exit 77
  fi
  local tool
  tool=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | head -n 1) || true
  if [[ -z $tool ]]; then
    echo "compute-sanitizer is not found; it comes with the CUDA toolkit"
    exit 77
  fi
  local check
  for check in memcheck racecheck synccheck; do
    echo "== $check"
    ZERO_CHECK_DEVICE=cuda OMP_NUM_THREADS=1 "$tool" --tool "$check" --error-exitcode 9 \
      "$build/tests/cuda/cuda_device_test" --gtest_filter='DeviceKernels.*' --gtest_brief=1
  done
}

# The same run on the device and on the CPU, in fp32: losses within 1e-4.
train() {
  local folder=$work/train where
  rm -rf "$folder"
  mkdir -p "$folder"
  cat docs/*.md >"$folder/text.txt"
  for where in "$device" cpu; do
    "$build/zero" train --model gpt2-nano --data "$folder/text.txt" --out "$folder/run" --nproc "$ranks" --stage 3 --seq 32 --micro-batch 1 \
      --steps "$train_steps" --device "$where"
    if [[ -d $folder/device ]]; then mv "$folder/run" "$folder/cpu"; else mv "$folder/run" "$folder/device"; fi
  done
  python3 - "$folder/device" "$folder/cpu" <<'PYTHON'
import json, sys
def losses(folder):
    lines = [json.loads(line) for line in open(folder + "/log.jsonl")]
    return [line["loss"] for line in lines if "loss" in line and "step" in line and "event" not in line]
device, cpu = (losses(folder) for folder in sys.argv[1:])
if not cpu or len(device) != len(cpu):
    sys.exit(f"{len(device)} losses on the device, {len(cpu)} on the CPU")
worst = max(abs(a - b) / abs(b) for a, b in zip(device, cpu))
print(f"{len(cpu)} losses, at most {worst:.1e} from the CPU's (relative); the last {device[-1]:.5f}")
sys.exit(0 if worst <= 1e-4 else "more than 1e-4")
PYTHON
}

# A small model in Python on the device and on the CPU: losses within 1e-4.
python_package() {
  if [[ ! -d $build/python/libzero || -z $(compgen -G "$build/python/libzero/_C*.so") ]]; then
    echo "the Python package is not built: make python$([[ $device == cuda ]] && echo ' CUDA=1')"
    exit 77
  fi
  cat >"$work/on_device.py" <<'PYTHON'
import sys
import torch, torch.nn as nn
import libzero

def losses(device, stage):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = libzero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage)
    found = []
    for step in range(5):
        x = torch.sin(torch.arange(96.0) * (step + 1 + libzero.group().rank)).view(6, 16).to(device)
        loss = nn.functional.cross_entropy(model(x), torch.arange(6, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    optimizer.close()
    return found

rank = libzero.group().rank
device = torch.device("cuda", rank) if sys.argv[1] == "cuda" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
for stage in range(4):
    there, here = losses(device, stage), losses(torch.device("cpu"), stage)
    worst = max(abs(a - b) / abs(b) for a, b in zip(there, here))
    if rank == 0:
        print(f"stage {stage}: {len(there)} losses, at most {worst:.1e} from the CPU's (relative)")
    assert worst <= 1e-4, (there, here)
PYTHON
  PYTHONPATH=$build/python OMP_NUM_THREADS=1 "$build/zero" launch -n "$ranks" -- "$python_environment" "$work/on_device.py" "$device"
}

bench_step() {
  local sizes
  read -ra sizes <<<"$size_words"
  "$build/zero" bench step --device "$device" --mfu --model "$model" --nproc "$ranks" "${sizes[@]}" --rounds "$rounds" --json "$work/bench.json"
}

fsdp2() {
  if [[ ! -x $python_environment ]]; then
    echo "PyTorch is not installed for it: scripts/python_environment.sh"
    exit 77
  fi
  local stage round sizes
  read -ra sizes <<<"$size_words"
  rm -f "$work/fsdp2.json"
  for ((round = 0; round < rounds; ++round)); do
    for stage in 2 3; do
      OMP_NUM_THREADS=1 "$python_environment" -m torch.distributed.run --standalone --nproc-per-node "$ranks" benchmarks/peers/fsdp2_step.py \
        --device "$device" --model "$model" --stage "$stage" "${sizes[@]}" | tee -a "$work/fsdp2.json"
    done
  done
}

# Both in one table. MFU is of the FLOPs that libzero counted and of the speed that it measured.
comparison() {
  python3 - "$work/bench.json" "$work/fsdp2.json" <<'PYTHON'
import json, os, sys
from statistics import median
if not os.path.exists(sys.argv[1]):
    print("zero bench step left no figures")
    sys.exit(77)
bench = json.load(open(sys.argv[1]))
speed = bench["options"]["products_flop_per_s"]
flops = bench["results"][0]["flops_per_step"]
rows = [(r["run"], r["tokens_per_s"]["median"], r["step_ms"]["median"], r["exposed_ms"] and r["exposed_ms"]["median"], r["device_peak"]) for r in bench["results"]]
runs = {}
if os.path.exists(sys.argv[2]):
    for line in open(sys.argv[2]):
        run = json.loads(line)
        runs.setdefault(run["run"], []).append(run)
for name, all in runs.items():
    rows.append((name, median(r["tokens_per_s"] for r in all), median(r["step_ms"] for r in all), None, all[0]["peak_bytes"]))
print(f"Matrix products: {speed / 1e12:.1f} TFLOP/s at best, measured by zero bench step. A step of a rank needs {flops / 1e12:.4g} TFLOP.\n")
print("| run | tokens/s | ms a step | MFU | exposed ms | peak of the device's allocator, MiB |\n|---|---|---|---|---|---|")
for name, tokens, ms, exposed, peak in rows:
    cells = ["-" if exposed is None else f"{exposed:+.2f}", "-" if not peak else f"{peak / 2**20:.0f}"]
    print(f"| {name} | {tokens:.1f} | {ms:.2f} | {100 * flops / (ms / 1000 * speed):.1f} % | {' | '.join(cells)} |")
PYTHON
}

# What the parts read in their own shells; an array cannot be exported.
export device preset build ranks model work python_environment rounds train_steps size_words="${sizes[*]}"
export -f device_tests say die

if [[ -z $build ]]; then
  part build 5400 build_programs
  build=build/$preset
fi
build=$(realpath -m "$build")
part environment 60 environment
part plugin 300 plugin
part kernels 900 kernels
part training-parity 1200 training_parity
part refusals 300 refusals
part sanitizer 1800 sanitizer
part train 900 train
part python 600 python_package
part bench-step 1800 bench_step
part fsdp2 1800 fsdp2
part comparison 60 comparison

{
  echo "# libzero on $([[ $device == cuda ]] && echo "$gpus GPUs" || echo "the CPU, which stands in for a GPU")"
  echo
  echo "By \`scripts/gpu_check.sh\`, $(date -u '+%Y-%m-%d %H:%M') UTC. $ranks ranks; $model with ${sizes[*]}. $([[ $failed == 0 ]] && echo "No part failed." || echo "$failed parts failed.")"
  echo
  echo "| part | result | s |"
  echo "|---|---|---|"
  for i in "${!names[@]}"; do echo "| ${names[i]} | ${results[i]} | ${seconds[i]} |"; done
  if [[ -s $work/comparison.log ]]; then printf '\n## Beside FSDP2\n\n%s\n' "$(cat "$work/comparison.log")"; fi
  for name in "${names[@]}"; do
    if [[ $name == comparison ]]; then continue; fi
    # shellcheck disable=SC2016
    printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(tail -n 60 "$work/$name.log")"
  done
} >"$report"
say "$report" >&2
[[ $failed == 0 ]]
