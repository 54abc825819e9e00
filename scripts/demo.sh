#!/usr/bin/env bash
# Trains a small GPT-2 by bytes on the King James Bible, about 5 minutes on 2 cores. Results: run/demo.
#   STEPS=N: another number of steps than 1700      STAGE=N: another stage than 3      OUT=DIR: another folder than run/demo
#   DATA=DIR: other tokens                          ZERO=FILE: another program than build/release/zero
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
zero=${ZERO:-build/release/zero}
data=${DATA:-build/demo/bible}
steps=${STEPS:-1700}
stage=${STAGE:-3}
out=${OUT:-run/demo}
warmup=$((steps < 100 ? steps / 2 : 50))

if [[ ! -f $data/meta.json ]]; then
  say "Preparing the text"
  scripts/corpus.sh build/demo/bible.txt
  "$zero" data prepare build/demo/bible.txt --out "$data" --tokenizer bytes
fi

# Small units and a small budget of gathered parameters, so that stage 3 has something to do on a model this small.
command=("$zero" train --model examples/demo/model.json --data "$data" --out "$out" --overwrite
  --nproc 2 --stage "$stage" --bucket-size 1000000 --live-parameters 500000
  --seq 128 --micro-batch 8 --steps "$steps" --lr 4e-3 --warmup "$warmup"
  --log-every 85 --eval-every 425 --sample-tokens 600 --prompt "And it came to pass")
say "${command[*]}"
exec "${command[@]}"
