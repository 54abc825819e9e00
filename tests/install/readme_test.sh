#!/usr/bin/env bash
# Runs what the README tells its reader to run: its C++ program, built against an installed libzero, and its shell lines; and checks its picture.
#   readme_test.sh SOURCE_FOLDER BUILD_FOLDER
# The lines run as they stand, except that numbers of steps are divided by 1000. CXX and CMAKE_GENERATOR come from the environment.
set -euo pipefail
source=$1 build=$2
unset LIBTORCH_ROOT CMAKE_PREFIX_PATH # the package must know by itself
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  exit 1
}

# block SECTION LANGUAGE: the code between ```LANGUAGE and ``` under the heading "## SECTION".
block() {
  awk -v heading="## $1" -v fence="\`\`\`$2" '
    /^## / {inside = $0 == heading}
    /^```/ {if (open) {open = 0; next} if (inside && $0 == fence) {open = 1; found = 1; next}}
    open {print}
    END {exit !found}' "$source/README.md" || fail "the README has no block of $2 under '$1'"
}
# run SECTION: runs its shell lines in the current folder.
run() {
  block "$1" sh | sed -E 's/\b([0-9]+)000\b/\1/g' >lines.sh
  cat lines.sh
  bash -euo pipefail lines.sh || fail "the lines of '$1'"
}

export HOME=$work
mkdir "$work/checkout"
cd "$work/checkout"
mkdir build my_program
ln -s "$build" build/release

block "In your own program" cpp >my_program/my_program.cpp
block "In your own program" cmake >my_program/CMakeLists.txt
run "In your own program"
[[ $(head -c 9 model.safetensors | tail -c 1) == "{" ]] || fail "the program left no weights"
grep -q '"0.weight"' <(head -c 2000 model.safetensors) || fail "the weights lack the first layer"

cat "$source"/*.md "$source"/docs/*.md "$source"/zero/*/*.h >my_text.txt
run "On your own text" | tee output.txt
grep -q '"step":2,' my_run/log.jsonl || fail "the third line did not go on after the first step"
grep -q 'finished after step 2' output.txt || fail "the third line did not finish"
[[ -s my_run/model.safetensors ]] || fail "training left no weights"

# The picture's bytes are what the demo counts at each stage; neither its text nor its number of steps matters to them.
"$build/zero" data prepare my_text.txt --out bytes --tokenizer bytes
for stage in 0 1 2 3; do
  ZERO=$build/zero DATA=$PWD/bytes STAGE=$stage STEPS=1 OUT=$work/stage$stage "$source/scripts/demo.sh" >demo.txt || fail "the demo at stage $stage: $(cat demo.txt)"
done
"$source/benchmarks/draw.py" --check --demo "$work"/stage{0,1,2,3} || fail "the picture is not what the demo counts"
