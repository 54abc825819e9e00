#!/usr/bin/env bash
# Checks libzero on several GPUs of this machine, over NCCL, and writes one report:  scripts/gpus_check.sh [OPTION ...]
#   --device cuda|cpu   cpu: the CPU stands in, with small sizes, to try this script itself [cuda]
#   --out FILE          the report, in Markdown [run/gpus-check/report.md]; the parts' whole output goes beside it
#   --build DIR         programs that were built before, as for scripts/gpu_check.sh
#   --ranks N           an even number from 2 [the number of GPUs; 2 for the CPU]
#   --model NAME        of the measurements [gpt2; gpt2-nano for the CPU]
#   --seconds S         when the time is up parts are left out [240 with --build DIR, else 7200]
#   --parts A,B,...     only these parts
# Each part runs within a time limit of its own, whatever became of the others, and after each the report has what is known so far. Exit
# status 1 where one failed. What one GPU can show is scripts/gpu_check.sh's.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=scripts/gpu_parts.sh
source scripts/gpu_parts.sh
folder=run/gpus-check
read_options "$0" "$@"
((ranks >= 2 && ranks % 2 == 0)) || die "--ranks is $ranks; it should be an even number from 2$([[ $device == cuda ]] && echo ", and this machine has $gpus GPUs")"
if [[ $device == cuda ]]; then
  model=${model:-gpt2}
  batch=8 length=1024 steps=10 warmup=3 rounds=2 train_steps=20
  # NCCL adds in an order of its own, which depends on the stage's messages.
  same=1e-5
else
  model=${model:-gpt2-nano}
  batch=1 length=32 steps=1 warmup=1 rounds=1 train_steps=6
  same=0
fi
sizes=(--dtype bf16 --micro-batch "$batch" --seq "$length" --steps "$steps" --warmup "$warmup")

# Every collective beside the CPU's, and the engine's steps at each stage: one rank a GPU.
collectives() { device_tests 'DeviceTraining.*'; }

# The stages with operators that give the same bits, beside each other, and beside the CPU.
stages() {
  local stage
  for stage in 0 1 2 3; do
    nano "$work/stages/$stage" --device "$device" --stage "$stage" --deterministic
    losses "$work/stages/$stage" "$work/stages/0" "$same"
  done
  nano "$work/stages/bf16" --device "$device" --stage 3 --dtype bf16
  nano "$work/stages/cpu" --device cpu --stage 3
  losses "$work/stages/3" "$work/stages/cpu" 1e-4
}

# Half of the GPUs are one host's, and the others another's: two launchers, which meet over the loopback interface. Then the hosts' memory
# carries the tensors: each host keeps all parameters, and what crosses is packed.
hosts() {
  mkdir -p "$work/hosts"
  printf '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": %s, "zero_packed_exponents": true}}' "$((ranks / 2))" >"$work/hosts/kept.json"
  two_hosts run --stage 3
  two_hosts kept --config "$work/hosts/kept.json" --through-host
  nano "$work/hosts/one" --device "$device" --stage 3
  losses "$work/hosts/run" "$work/hosts/one" 1e-4
  losses "$work/hosts/kept" "$work/hosts/one" 1e-4
}
# two_hosts NAME OPTION ...
two_hosts() {
  local half=$((ranks / 2)) port host visible=() options launched=() status=0
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  read -ra options <<<"$(nano_options)"
  for host in 0 1; do
    visible=()
    if [[ $device == cuda ]]; then visible=(CUDA_VISIBLE_DEVICES="$(seq -s , $((host * half)) $((host * half + half - 1)))"); fi
    env ZERO_HOST="host$host" NCCL_HOSTID="host$host" OMP_NUM_THREADS=1 "${visible[@]}" "$build/zero" launch -n "$half" --nnodes 2 --node-rank "$host" \
      --master-addr 127.0.0.1 --master-port "$port" -- "$build/zero" train "${options[@]}" --out "$work/hosts/$1" --overwrite \
      --device "$device" "${@:2}" >"$work/hosts/$1$host.log" 2>&1 &
    launched+=($!)
  done
  for host in 0 1; do wait "${launched[host]}" || status=$?; done
  tail -n 5 "$work/hosts/$1"[01].log
  if ((status != 0)); then exit "$status"; fi
}
export -f two_hosts

# A rank is killed: without restarts the launcher names it and ends; with them the run has the losses of one that was never interrupted.
failure() {
  local options train_steps=60
  read -ra options <<<"$(nano_options) --device $device --stage 3 --save-every 2"
  nano "$work/failure/whole" --device "$device" --stage 3
  mkdir -p "$work/failure"
  OMP_NUM_THREADS=1 python3 - "$build/zero" "$ranks" "$work/failure" "${options[@]}" <<'PYTHON'
import os, pathlib, re, signal, subprocess, sys, time
program, ranks, folder, options = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4:]
def rank_one(launcher):
    for pid in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"\0RANK=1\0" in b"\0" + pathlib.Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise SystemExit("no process of rank 1")
def run(name, *restarts):
    out = folder / name
    text = open(folder / f"{name}.txt", "w+")
    mine = list(options)
    if not restarts:  # it would never end
        mine[mine.index("--steps") + 1] = "1000000"
    launcher = subprocess.Popen([program, "launch", "-n", ranks, *restarts, "--", program, "train", *mine, "--out", str(out)],
                                stdout=text, stderr=subprocess.STDOUT)
    begin = time.monotonic()
    while not any(re.fullmatch(r"checkpoint-\d+", path.name) for path in out.glob("*")) and launcher.poll() is None:
        if time.monotonic() - begin > 60:
            launcher.terminate()
            raise SystemExit(f"{name}: no checkpoint within a minute")
        time.sleep(0.02)
    if launcher.poll() is not None:
        text.seek(0)
        raise SystemExit(f"{name}: the run had ended before rank 1 could be killed\n{text.read()}")
    os.kill(rank_one(launcher.pid), signal.SIGKILL)
    killed = time.monotonic()
    try:
        status = launcher.wait(120)
    except subprocess.TimeoutExpired:
        launcher.kill()
        raise SystemExit(f"{name}: the launcher had not ended after two minutes")
    text.seek(0)
    said = text.read()
    print(f"{name}: status {status} after {time.monotonic() - killed:.1f} s")
    print("\n".join(said.splitlines()[-6:]))
    return status, said
status, said = run("ends")
assert status != 0 and "rank 1" in said.lower(), "a rank that was killed is an error that names it"
status, said = run("restarts", "--max-restarts", "2")
assert status == 0, "the run goes on after a restart"
PYTHON
  losses "$work/failure/restarts" "$work/failure/whole" "$same"
}

bench_step() {
  "$build/zero" bench step --device "$device" --mfu --lockstep --nproc "$ranks" --model "$model" --dtype bf16 --micro-batch "$batch" \
    --seq "$length" --steps "$steps" --warmup "$warmup" --rounds "$rounds" --json "$work/bench.json"
}

fsdp2() {
  needs_torch
  local stage sizes
  read -ra sizes <<<"$size_words"
  for stage in 2 3; do
    OMP_NUM_THREADS=1 "$python_environment" -m torch.distributed.run --standalone --nproc-per-node "$ranks" benchmarks/peers/fsdp2_step.py \
      --device "$device" --model "$model" --stage "$stage" "${sizes[@]}"
  done
}

export batch length steps warmup rounds same
begin_parts
part environment 60 environment
part stages 240 stages
part failure 240 failure
part hosts 120 hosts
part bench-step 600 bench_step
part collectives 1200 collectives
part fsdp2 120 fsdp2
end_parts
