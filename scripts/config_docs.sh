#!/bin/sh
# Writes the tables of docs/config.md: scripts/config_docs.sh [PROGRAM]
set -eu
cd "$(dirname "$0")/.."
program=${1:-build/release/zero}
document=docs/config.md
{
  sed '/^<!-- tables: /q' $document
  "$program" config --markdown
  sed -n '/^<!-- end of tables -->/,$p' $document
} >$document.new
mv $document.new $document
