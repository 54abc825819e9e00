#!/usr/bin/env bash
# Checks libzero on the GPU of this machine, and writes one report:  scripts/gpu_check.sh [OPTION ...]
#   --device cuda|cpu   cpu: the CPU stands in, with small sizes, to try this script itself [cuda]
#   --out FILE          the report, in Markdown [run/gpu-check/report.md]; the parts' whole output goes beside it
#   --build DIR         programs that were built before, here or elsewhere, and nothing is installed [build/cuda, or build/release for the
#                       CPU, which are built first]. Their libraries are found where they were linked, in DIR and DIR/lib, and with Python's torch
#   --ranks N           of the training and the measurements [the number of GPUs; 2 for the CPU]
#   --model NAME        of the measurements [gpt2; gpt2-nano for the CPU]
#   --seconds S         when the time is up parts are left out [240 with --build DIR, else 7200]
#   --parts A,B,...     only these parts
# The parts that say most come first. Each runs within a time limit of its own, whatever became of the others, and after each the report has
# what is known so far. Exit status 1 where one failed. A part that lacks a tool is "not run", with the reason, and no failure.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=scripts/gpu_parts.sh
source scripts/gpu_parts.sh
folder=run/gpu-check
read_options "$0" "$@"
if [[ $device == cuda ]]; then
  model=${model:-gpt2}
  batch=8 length=1024 steps=10 warmup=3 rounds=1 train_steps=20
else
  model=${model:-gpt2-nano}
  batch=1 length=32 steps=1 warmup=1 rounds=1 train_steps=3
fi
sizes=(--dtype bf16 --micro-batch "$batch" --seq "$length" --steps "$steps" --warmup "$warmup")

plugin() { "$build/tests/cuda/cuda_plugin_test" --gtest_brief=1; }
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
  nano "$work/train/device" --stage 3 --device "$device"
  nano "$work/train/cpu" --stage 3 --device cpu
  losses "$work/train/device" "$work/train/cpu" 1e-4
}

# Each option of the engine that a device has, beside the plain run of its dtype.
options() {
  if [[ $device == cpu && -z $parts ]]; then
    echo "the CPU has tests of its own"
    exit 77
  fi
  local settings=(
    'fp32-stage-1|fp32|1e-5|--stage 1' 'fp32-stage-2|fp32|1e-5|--stage 2' 'fp32-stage-3|fp32|1e-5|--stage 3'
    'recompute|fp32|1e-5|--stage 3 --recompute 1' 'gather-all|fp32|1e-5|--stage 3 --live-parameters 0'
    'tiles|fp32|1e-4|--stage 3 --tile-elements 100000' 'states-on-host|fp32|1e-5|--stage 2 --offload-optimizer cpu'
    'all-on-host|fp32|1e-5|--stage 3 --offload-optimizer cpu --offload-param cpu'
    "states-on-disk|fp32|1e-5|--stage 2 --offload-optimizer nvme --nvme-path $work/disk"
    "all-on-disk|fp32|1e-5|--stage 3 --offload-optimizer nvme --offload-param nvme --nvme-path $work/disk"
    "gradients-on-disk|fp32|1e-5|--stage 2 --offload-optimizer nvme --offload-gradients --nvme-path $work/disk"
    'budget|fp32|1e-5|--stage 3 --memory-budget 8GB' 'split-masters|bf16|1e-3|--dtype bf16 --stage 3 --split-master-weights'
    'states-in-bf16|fp32|1e-2|--stage 3 --optimizer-states bf16' 'states-in-8-bits|fp32|2e-2|--stage 2 --optimizer-states 8bit'
    'split-in-8-bits|bf16|2e-2|--dtype bf16 --stage 3 --split-master-weights --optimizer-states 8bit'
    'muon|muon|1e-4|--stage 3 --optimizer Muon' 'muon-on-host|muon|1e-4|--stage 2 --optimizer Muon --offload-optimizer cpu'
    'lamb-on-host|lamb|1e-4|--stage 3 --optimizer Lamb --offload-optimizer cpu'
    'bf16-stage-3|bf16|1e-3|--dtype bf16 --stage 3' 'bf16-on-host|bf16|1e-3|--dtype bf16 --stage 3 --offload-optimizer cpu --offload-param cpu'
    'fp16|fp32|1e-2|--dtype fp16 --stage 3' 'autocast|fp32|2e-2|--autocast bf16 --stage 3'
    'accumulated|twice|1e-5|--stage 3 --accumulate 2' 'layer-major|twice|1e-5|--stage 3 --accumulate 2 --layer-major')
  mkdir -p "$work/disk" "$work/options"
  nano "$work/options/fp32" --device "$device" --stage 0 >"$work/options/fp32.log" 2>&1
  nano "$work/options/bf16" --device "$device" --stage 0 --dtype bf16 >"$work/options/bf16.log" 2>&1
  nano "$work/options/twice" --device "$device" --stage 0 --accumulate 2 >"$work/options/twice.log" 2>&1
  nano "$work/options/muon" --device cpu --stage 0 --optimizer Muon >"$work/options/muon.log" 2>&1
  nano "$work/options/lamb" --device cpu --stage 0 --optimizer Lamb >"$work/options/lamb.log" 2>&1
  # shellcheck disable=SC2016
  printf '%s\n' "${settings[@]}" | OMP_NUM_THREADS=1 xargs -d '\n' -P "$(($(nproc) / 2 + 1))" -I {} bash -uo pipefail -c '
    IFS="|" read -r name beside within words <<<"$1"
    read -ra words <<<"$words"
    if nano "$work/options/$name" --device "$device" "${words[@]}" >"$work/options/$name.log" 2>&1; then
      said=$(losses "$work/options/$name" "$work/options/$beside" "$within" 2>&1) || said="FAILED: $said"
    else
      said="FAILED: $(tail -n 2 "$work/options/$name.log")"
    fi
    echo "$name beside $beside: $said"' _ {} | tee "$work/options.txt"
  [[ $(grep -c . "$work/options.txt") -ge ${#settings[@]} ]] && ! grep -q FAILED "$work/options.txt"
}

# Small models in Python, by each loop, on the device and on the CPU: losses within 1e-4, in bf16 within 2e-2.
python_package() {
  if [[ ! -d $build/python/libzero || -z $(compgen -G "$build/python/libzero/_C*.so") ]]; then
    echo "the Python package is not built: make python$([[ $device == cuda ]] && echo ' CUDA=1')"
    exit 77
  fi
  local each
  for each in "$device" cpu; do
    if [[ $each != cpu || ! -e $work/loops-$1-cpu.json ]]; then
      PYTHONPATH=$build/python OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$build/zero" launch -n "$1" -- "$python_environment" \
        scripts/gpu_loops.py "$each" "$work/loops-$1-$each.json"
    fi
  done
  "$python_environment" scripts/gpu_loops.py compare "$work/loops-$1-$device.json" "$work/loops-$1-cpu.json"
}
python_loops() { python_package "$ranks"; }
python_shared() {
  if [[ $device == cpu ]]; then
    echo "the CPU has no device to share"
    exit 77
  fi
  python_package $((2 * gpus))
}

bench() { "$build/zero" bench step --device "$device" --mfu --nproc "$ranks" --dtype bf16 --seq "$length" --steps "$steps" --warmup "$warmup" "$@"; }
bench_step() { bench --model "$model" --micro-batch "$batch" --rounds "$rounds" --json "$work/bench.json"; }
not_on_cpu() {
  if [[ $device != cpu ]]; then return; fi
  echo "the CPU is slow"
  exit 77
}
bench_large() {
  not_on_cpu
  bench --model "$model" --micro-batch $((4 * batch)) --stages 0,3 --rounds 1 --json "$work/bench-large.json"
}
bench_xl() {
  not_on_cpu
  bench --model gpt2-xl --micro-batch 4 --stages 3 --rounds 1 --json "$work/bench-xl.json"
}

# A step whose products take in GELU and a bias's gradient, beside one whose products do not.
epilogues() {
  if [[ $device == cpu && -z $parts ]]; then
    echo "a CPU's products have no epilogues"
    exit 77
  fi
  local way
  for way in always never; do
    bench --model "$model" --micro-batch "$batch" --stages 0 --rounds 2 --epilogues "$way" --json "$work/epilogues-$way.json"
  done
  python3 - "$work" <<'PYTHON'
import json, sys
for way in ("always", "never"):
    run = json.load(open(f"{sys.argv[1]}/epilogues-{way}.json"))["results"][-1]
    ms = run["step_ms"]
    print(f"epilogues {way:6}: {ms['median']:.2f} ms a step ({ms['min']:.2f} to {ms['max']:.2f}), {run['tokens_per_s']['median']:.0f} tokens/s")
PYTHON
}

# States off the device, with all of the host's cores: what a step takes beside its bound, and beside FSDP2's CPUOffloadPolicy.
offload() {
  local each=$(($(nproc) / ranks)) large=gpt2-xl sequences=4 name options line
  if [[ $device == cpu ]]; then each=1 large=$model sequences=$batch; fi
  if ((each < 1)); then each=1; fi
  for line in 'optimizer|--offload-optimizer cpu' 'both|--offload-optimizer cpu --offload-param cpu' \
    'delayed|--offload-optimizer cpu --offload-param cpu --delayed-update'; do
    IFS='|' read -r name options <<<"$line"
    read -ra options <<<"$options"
    bench --model "$large" --micro-batch "$sequences" --stages 3 --rounds 1 --threads "$each" "${options[@]}" --json "$work/offload-$name.json"
  done
  if [[ $device == cuda && -n $torch ]]; then
    local sizes
    read -ra sizes <<<"$size_words"
    OMP_NUM_THREADS=$each timeout 100 "$python_environment" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
      benchmarks/peers/fsdp2_step.py --device cuda "${sizes[@]}" --model "$large" --micro-batch "$sequences" --stage 3 --offload |
      tee "$work/offload-fsdp2.json" || echo "FSDP2's offload did not run"
  fi
  python3 - "$work" <<'PYTHON'
import json, os, sys
print("| stage 3 | ms a step | bound ms | of the bound | bound by | device MiB |\n|---|---|---|---|---|---|")
for name in ("optimizer", "both", "delayed"):
    file = f"{sys.argv[1]}/offload-{name}.json"
    if not os.path.exists(file):
        continue
    run = json.load(open(file))["results"][-1]
    ms, bound = run["step_ms"]["median"], run["offload"]
    peak = run["device_peak"]
    print(f"| {name} on the host | {ms:.1f} | {bound['ms']:.1f} | {ms / bound['ms']:.2f} x | {bound['binds']} | {peak / 2**20 if peak else 0:.0f} |")
file = f"{sys.argv[1]}/offload-fsdp2.json"
if os.path.exists(file) and os.path.getsize(file):
    run = json.loads(open(file).readline())
    print(f"| {run['run']} | {run['step_ms']:.1f} | - | - | - | {(run['peak_bytes'] or 0) / 2**20:.0f} |")
PYTHON
}

# Where the time of a step goes by kernel: the second of two steps, as Nsight Compute times each.
kernel_table() {
  local tool
  tool=$(command -v ncu || compgen -G '/usr/local/cuda*/bin/ncu' | head -n 1 || compgen -G '/opt/nvidia/nsight-compute/*/ncu' | head -n 1) || true
  if [[ $device == cpu || -z $tool ]]; then
    echo "ncu is not found; it comes with Nsight Compute"
    exit 77
  fi
  cat docs/*.md >"$work/kernels.txt"
  "$tool" --clock-control none --cache-control none --metrics gpu__time_duration.sum --csv --page raw --target-processes all \
    --log-file "$work/kernels.csv" "$build/zero" train --model "$model" --data "$work/kernels.txt" --out "$work/kernels" --nproc 1 --stage 0 \
    --dtype bf16 --seq "$length" --micro-batch "$batch" --steps 2 --eval-tokens 0 --sample-tokens 0 --device cuda
  python3 - "$work/kernels.csv" <<'PYTHON'
import csv, re, sys
lines = [line for line in open(sys.argv[1]) if line.startswith('"')]
kernels = [(row["Kernel Name"], float(row["gpu__time_duration.sum"].replace(",", ""))) for row in csv.DictReader(lines) if row["ID"]]
unit = next(row["gpu__time_duration.sum"] for row in csv.DictReader(lines) if not row["ID"])
to_ms = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0}[unit]
# A step ends with its last update.
updates = [i for i, (name, _) in enumerate(kernels) if "update_kernel" in name]
ends = [i for i, after in zip(updates, updates[1:] + [len(kernels)]) if after - i > 100 or after == len(kernels)]
step = kernels[ends[-2] + 1 : ends[-1] + 1] if len(ends) > 1 else kernels
table = {}
for name, time in step:
    short = re.sub(r"\b(at|native|void|cuda|anonymous namespace|unnamed|c10|std|zero)\b(::)?|[()<>&*]| ", "", name)[:90]
    count, total = table.get(short, (0, 0.0))
    table[short] = (count + 1, total + time * to_ms)
print(f"{len(kernels)} kernels of the run; of the step {len(step)}, {sum(time for _, time in step) * to_ms:.2f} ms\n\n      ms  count  kernel")
for name, (count, time) in sorted(table.items(), key=lambda entry: -entry[1][1])[:40]:
    print(f"{time:8.3f} {count:6}  {name}")
PYTHON
}

# Plain PyTorch on one device: the rival of who has no ZeRO.
torch_step() {
  needs_torch
  local sizes
  read -ra sizes <<<"$size_words"
  local run=(timeout 100 "$python_environment" benchmarks/peers/torch_step.py --device "$device" --model "$model" "${sizes[@]}")
  "${run[@]}" | tee "$work/torch.json"
  if [[ $device == cuda ]]; then
    "${run[@]}" --compile --vocabulary 50304 | tee -a "$work/torch.json"
    "${run[@]}" --compile --vocabulary 50304 --micro-batch $((4 * batch)) | tee -a "$work/torch-large.json"
  fi
}

fsdp2() {
  needs_torch
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

# All in one table. MFU is of the FLOPs that libzero counted and of the speed that it measured.
comparison() {
  python3 - "$work/bench.json" "$work/torch.json" "$work/fsdp2.json" <<'PYTHON'
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
for file in filter(os.path.exists, sys.argv[2:]):
    for line in open(file):
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

export batch length steps warmup rounds gpus
export -f bench not_on_cpu python_package
begin_parts
part environment 60 environment
part plugin 60 plugin
part kernels 60 kernels
part bench-step 300 bench_step
part train 300 train
part epilogues 60 epilogues
part bench-large 60 bench_large
part kernel-table 75 kernel_table
part training-parity 1200 training_parity
part options 90 options
part torch 150 torch_step
part bench-xl 60 bench_xl
part offload 150 offload
part refusals 60 refusals
part fsdp2 90 fsdp2
part python 120 python_loops
part python-shared 90 python_shared
part sanitizer 300 sanitizer
time_limit=$((SECONDS + 60))
part comparison 60 comparison
end_parts
