# shellcheck shell=bash
# shellcheck disable=SC2154  # what the scripts set
# Sourced by gpu_check.sh and gpus_check.sh, after env.sh: their options, their parts and the report. A script sets `folder` (of the report)
# and then calls read_options, sets `sizes` and what else its parts read, calls begin_parts, and then `part` for each.

# read_options SCRIPT [OPTION ...]
read_options() {
  device=cuda out='' build='' ranks='' model='' time_limit='' parts=''
  script=$(basename "$1")
  shift
  while (($# > 0)); do
    case $1 in
      --device | --out | --build | --ranks | --model | --parts)
        [[ $# -gt 1 ]] || die "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--seconds is '${2:-}'; it should be a number from 1"
        time_limit=$2
        shift 2
        ;;
      --help | -h)
        sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//p}' "scripts/$script"
        exit 0
        ;;
      *) die "$1 is no option; scripts/$script --help lists them" ;;
    esac
  done
  case $device in
    cuda) preset=cuda gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -c .) || true ;;
    cpu) preset=release gpus=2 ;;
    *) die "--device is '$device'; it may be cuda or cpu" ;;
  esac
  [[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || die "--ranks is '$ranks'; it should be a number from 1"
  ranks=${ranks:-$((gpus > 0 ? gpus : 1))}
  time_limit=${time_limit:-$([[ -n $build ]] && echo 240 || echo 7200)}
  report=$(realpath -m "${out:-$folder/report.md}")
  work=${report%.md}.parts
  mkdir -p "$work"
  rm -rf "${work:?}"/*
  # A Python that has torch: that of scripts/python_environment.sh, or the machine's.
  if [[ ! -x $python_environment ]]; then python_environment=$(command -v python3 || true); fi
  torch=$("$python_environment" -c 'import torch; print(torch.__path__[0])' 2>/dev/null) || true
  names=() results=() seconds=() failed=0
}

# part NAME LIMIT_S FUNCTION: runs it in a shell of its own. Status 77: not run, and the last line of its output says why.
part() {
  local name=$1 limit=$2 begin=$SECONDS status=0 result
  if [[ -n $parts && ,$parts, != *,$name,* ]]; then return; fi
  say "$name" >&2
  local left=$((time_limit - SECONDS))
  if ((limit > left)); then limit=$left; fi
  if ((limit < 3)); then
    echo "the $time_limit seconds were up" >"$work/$name.log"
    status=77
  else
    # shellcheck disable=SC2163
    export -f "$3"
    timeout --kill-after 10 "$limit" bash -euo pipefail -c "$3" >"$work/$name.log" 2>&1 || status=$?
  fi
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
  write_report
}

write_report() {
  {
    echo "# libzero on $([[ $device == cuda ]] && echo "$gpus GPUs" || echo "the CPU, which stands in for a GPU")"
    echo
    echo "By \`scripts/$script\`, $(date -u '+%Y-%m-%d %H:%M') UTC. $ranks ranks; $model with ${sizes[*]}. $([[ $failed == 0 ]] && echo "No part failed." || echo "$failed parts failed.")"
    echo
    echo "| part | result | s |"
    echo "|---|---|---|"
    local i name
    for i in "${!names[@]}"; do echo "| ${names[i]} | ${results[i]} | ${seconds[i]} |"; done
    if [[ -s $work/comparison.log ]]; then printf '\n## Beside PyTorch\n\n%s\n' "$(cat "$work/comparison.log")"; fi
    for name in "${names[@]}"; do
      if [[ $name == comparison ]]; then continue; fi
      # shellcheck disable=SC2016
      printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(tail -n 60 "$work/$name.log")"
    done
  } >"$report.new"
  mv "$report.new" "$report"
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
  root=$libtorch
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

device_tests() { ZERO_CHECK_DEVICE=$device OMP_NUM_THREADS=1 "$build/tests/cuda/cuda_device_test" --gtest_filter="$1"; }

# losses FOLDER OTHER WITHIN: those of two runs, at most so far apart (relative).
losses() {
  python3 - "$@" <<'PYTHON'
import json, sys
def losses(folder):
    lines = [json.loads(line) for line in open(folder + "/log.jsonl")]
    steps = {line["step"]: line["loss"] for line in lines if "loss" in line and "step" in line and "event" not in line}
    return [loss for _, loss in sorted(steps.items())]
device, cpu = (losses(folder) for folder in sys.argv[1:3])
if not cpu or len(device) != len(cpu):
    sys.exit(f"{len(device)} losses, beside {len(cpu)} of the other run")
worst = max(abs(a - b) / abs(b) for a, b in zip(device, cpu))
print(f"{len(cpu)} losses, at most {worst:.1e} from the other run's (relative); the last {device[-1]:.5f}")
sys.exit(0 if worst <= float(sys.argv[3]) else f"more than {sys.argv[3]}")
PYTHON
}

# The documents of the repository, as text.
small_text() {
  if [[ ! -s $work/text.txt ]]; then cat docs/*.md >"$work/text.txt"; fi
  echo "$work/text.txt"
}
nano_options() {
  echo --model gpt2-nano --data "$(small_text)" --seq 32 --micro-batch 1 --steps "$train_steps" --eval-tokens 0 --sample-tokens 0
}
# nano FOLDER [OPTION ...]: a few steps of a small model.
nano() {
  local options
  read -ra options <<<"$(nano_options)"
  "$build/zero" train "${options[@]}" --out "$1" --overwrite --nproc "$ranks" "${@:2}"
}

needs_torch() {
  if [[ -n $torch ]]; then return; fi
  echo "PyTorch is not installed for it: scripts/python_environment.sh"
  exit 77
}

# The parts read what is exported here in their own shells; an array cannot be exported.
begin_parts() {
  export device parts preset build ranks model work torch libtorch='' python_environment train_steps size_words="${sizes[*]}"
  export -f device_tests say die losses small_text nano_options nano needs_torch
  if [[ -z $build ]]; then
    part build 5400 build_programs
    build=build/$preset
  fi
  build=$(realpath -m "$build")
  # The LibTorch that the programs were linked to, or else Python's.
  libtorch=$(sed -n 's/^LIBTORCH_ROOT:.*=//p' "$build/CMakeCache.txt" 2>/dev/null) || true
  if [[ -z $libtorch || ! -d $libtorch ]]; then
    libtorch=$torch
    export LD_LIBRARY_PATH=$build:$build/lib:$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  fi
}

# end_parts: exit status 1 where a part has failed.
end_parts() {
  say "$report" >&2
  [[ $failed == 0 ]]
}
