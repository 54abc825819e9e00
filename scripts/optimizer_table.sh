#!/bin/sh
# Writes the table of combinations in docs/optimizers.md from what the test finds: scripts/optimizer_table.sh [TEST]
set -eu
cd "$(dirname "$0")/.."
ZERO_WRITE_TABLE=1 "${1:-build/release/tests/engine/engine_optimizer_table_test}"
