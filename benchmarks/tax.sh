#!/usr/bin/env bash
# The ZeRO tax: the step time of N ranks against that of N independent trainers that run at the same time and do not communicate.
#
#   benchmarks/tax.sh [RANKS [MICRO_BATCH [STEPS [DTYPE [ROUNDS]]]]]      (2 1 6 fp32 2)
#
# GPT-2 124 M, sequence 256, one thread a rank. Each round runs the independent trainers and every stage in turn, so that a drift of the
# machine's speed meets all of them; a figure is the median over the rounds of the median step (the first two of a run are left out).
# Needs the release build and the demo's text (`make demo` makes both).
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=${1:-2} micro=${2:-1} steps=${3:-6} dtype=${4:-fp32} rounds=${5:-2}
zero=build/release/zero
data=build/demo/bible
[[ -f $data/meta.json ]] || { echo "benchmarks/tax.sh: $data is missing; run 'make demo' once" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

train() { # OUT NPROC STAGE
  "$zero" train --model gpt2 --data "$data" --out "$1" --overwrite --nproc "$2" --stage "$3" --dtype "$dtype" --micro-batch "$micro" --seq 256 \
    --steps "$steps" --threads 1 --eval-batches 0 --sample-tokens 0 >"$1.txt" 2>&1 || { cat "$1.txt" >&2; return 1; }
}
median() { sort -g | awk '{v[NR] = $1} END {print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2}'; }
step_ms() { # LOG
  sed -n 's/.*"step":\([0-9]*\).*/\1 &/p' "$1/log.jsonl" | sed -n 's/^\([0-9]*\) .*"step_ms":\([0-9.]*\).*/\1 \2/p' | awk '$1 > 2 {print $2}' | median
}

for ((round = 1; round <= rounds; ++round)); do
  for ((r = 0; r < ranks; ++r)); do train "$work/alone$r" 1 0 & done
  wait
  for ((r = 0; r < ranks; ++r)); do step_ms "$work/alone$r"; done | median >>"$work/independent"
  for stage in 0 1 2 3; do
    train "$work/stage" "$ranks" "$stage"
    step_ms "$work/stage" >>"$work/stage$stage"
  done
done
echo "GPT-2 124 M, $dtype, sequence 256, micro-batch $micro, $ranks ranks of one thread, $rounds rounds of $steps steps"
base=$(median <"$work/independent")
printf '%-14s %10s %8s\n' run "step ms" tax
printf '%-14s %10.0f %8s\n' independent "$base" -
for stage in 0 1 2 3; do
  ms=$(median <"$work/stage$stage")
  awk -v stage="$stage" -v ms="$ms" -v base="$base" 'BEGIN {printf "%-14s %10.0f %+7.1f%%\n", "stage " stage, ms, (ms / base - 1) * 100}'
done
