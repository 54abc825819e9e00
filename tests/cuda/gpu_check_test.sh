#!/usr/bin/env bash
# scripts/gpu_check.sh with the CPU in a GPU's place passes and reports every part. Where programs fail it names the parts that need
# them, runs the others all the same, and fails. So does gpus_check.sh with the CPU's ranks.
#   gpu_check_test.sh SOURCE BUILD
set -euo pipefail
source=$1 build=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
  cat "$folder"/*.md
  echo "failed: $*"
  exit 1
}
expect() { grep -q -- "$2" "$folder/$1" || fail "$1 has no '$2'"; }

"$source/scripts/gpu_check.sh" --device cpu --build "$build" --seconds 500 --out "$folder/whole.md" || fail "exit status $?"
for part in environment plugin kernels training-parity refusals train bench-step comparison; do expect whole.md "^| $part | passed |"; done
expect whole.md '^| sanitizer | not run: '
expect whole.md 'No part failed'
expect whole.md '^| stage 3 | '
expect whole.md ' losses, at most '
if [[ -n $(compgen -G "$build/python/libzero/_C*.so") ]]; then
  for loop in 'shard, stage 3' accelerator 'Trainer, resumed' Lightning; do expect whole.md "^$loop: [0-9]* losses, at most "; done
fi

# Again, into the same folder, where the first report is.
echo stale >>"$folder/whole.md"
"$source/scripts/gpu_check.sh" --device cpu --build "$build" --parts environment --out "$folder/whole.md" || fail "exit status $? the second time"
if grep -q '^stale$' "$folder/whole.md"; then fail "the first report is still there"; fi

# Without the program, and with tests of the device that fail.
mkdir -p "$folder/broken/tests/cuda"
cp "$build/CMakeCache.txt" "$folder/broken"
printf '#!/bin/sh\necho broken\nexit 3\n' >"$folder/broken/zero"
cp "$folder/broken/zero" "$folder/broken/tests/cuda/cuda_device_test"
chmod +x "$folder/broken/zero" "$folder/broken/tests/cuda/cuda_device_test"
ln -s "$build/tests/cuda/cuda_plugin_test" "$folder/broken/tests/cuda/cuda_plugin_test"
if "$source/scripts/gpu_check.sh" --device cpu --build "$folder/broken" --seconds 500 --out "$folder/broken.md" 2>/dev/null; then
  fail "it passed with programs that fail"
fi
for part in environment kernels training-parity refusals train bench-step; do expect broken.md "^| $part | \*\*failed\*\*: exit status 3 |"; done
expect broken.md '^| plugin | passed |'
expect broken.md '^| comparison | not run: '
expect broken.md 'broken'

# Some parts alone, and no time for another.
"$source/scripts/gpu_check.sh" --device cpu --build "$build" --parts plugin --out "$folder/some.md" || fail "exit status $? of some parts"
expect some.md '^| plugin | passed |'
if grep -q '^| kernels |' "$folder/some.md"; then fail "a part ran that was not asked for"; fi
"$source/scripts/gpu_check.sh" --device cpu --build "$build" --parts plugin --seconds 1 --out "$folder/late.md" || fail "exit status $? without time"
expect late.md '^| plugin | not run: the 1 seconds were up |'
# Several GPUs: the CPU's ranks have the bits of one host, after a failure too.
"$source/scripts/gpus_check.sh" --device cpu --build "$build" --parts stages,failure,hosts --seconds 500 --out "$folder/several.md" ||
  fail "exit status $? of several"
for part in stages failure hosts; do expect several.md "^| $part | passed |"; done
expect several.md 'ends: status [1-9][0-9]* after'
if "$source/scripts/gpus_check.sh" --device cpu --build "$build" --ranks 3 --out "$folder/odd.md" 2>"$folder/odd.txt"; then
  fail "it took an odd number of ranks"
fi
grep -q 'an even number from 2' "$folder/odd.txt" || fail "it does not say which ranks there may be"
echo passed
