#!/usr/bin/env python3
"""Runs `zero tune` beside an exhaustive grid: how near its choice comes to the best configuration, and how near the planner's first does.

    benchmarks/tune_grid.py build/release/zero [--steps 8] [--json FILE]

The grid is every stage, micro-batch and recomputation of a global batch on two ranks. Each setting runs in each of two turns, and the median of
all its steps behind the first two counts. The fastest of many is partly so by chance: it and the choices of `zero tune` and of the planner then
run against each other in turns, whose medians are compared. `zero tune` may make about a fifth as many runs as the grid has settings.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import plan_here

RANKS, BATCH, WARM_UP = 2, 8, 2
# model, sequence, dtype
MODELS = [("gpt2", 128, "fp32"), ("wide", 64, "bf16"), ("llama", 128, "bf16")]
STAGES, MICRO_BATCHES, RECOMPUTED = (0, 1, 2, 3), (1, 2, 4), (0, 1)
Setting = tuple[int, int, int]


def times(program: str, folder: Path, model: list[str], setting: Setting, steps: int) -> list[float]:
    stage, micro, recomputed = setting
    plan_here.run([program, "train", *model, "--out", str(folder / "run"), "--overwrite", "--nproc", str(RANKS), "--stage", str(stage), "--micro-batch", str(micro), "--accumulate",
                   str(BATCH // RANKS // micro), "--steps", str(WARM_UP + steps), "--eval-tokens", "0", "--sample-tokens", "0", "--recompute", str(recomputed)])  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return [line["step_ms"] for line in lines if "event" not in line and line["step"] > WARM_UP]


def against_each_other(program: str, folder: Path, model: list[str], settings: list[Setting], arguments: argparse.Namespace) -> dict[Setting, float]:
    measured: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for turn in range(arguments.turns):
        for setting in list(measured) if turn % 2 == 0 else list(measured)[::-1]:
            measured[setting] += times(program, folder, model, setting, arguments.steps)
    return {setting: statistics.median(values) for setting, values in measured.items()}


def setting_of(config: dict) -> Setting:
    recomputed = config.get("activation_checkpointing", {}).get("every", 0)
    return config.get("zero_optimization", {}).get("stage", 0), config["train_micro_batch_size_per_gpu"], min(recomputed, 1)


def words(setting: Setting) -> str:
    return f"stage {setting[0]}, micro-batch {setting[1]}{', recomputed' if setting[2] else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6, help="turns in which the choices run against each other")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    program = arguments.program
    grid = list(itertools.product(STAGES, MICRO_BATCHES, RECOMPUTED))
    print(f"{len(grid)} settings; load {os.getloadavg()[0]:.2f} before the start\n")
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(20000)))
        for model, sequence, dtype in MODELS:
            (folder / "model.json").write_text(json.dumps(plan_here.MODELS[model]))
            common = ["--model", str(folder / "model.json"), "--data", str(folder / "text.txt"), "--seq", str(sequence), "--dtype", dtype]
            out = folder / f"tuned-{model}"
            tries = len(grid) // 5
            said = plan_here.run([program, "tune", *common, "--batch", str(BATCH), "--nproc", str(RANKS), "--vary", "stage,micro-batch,recompute", "--tries", str(tries - 1),
                                  "--steps", str(arguments.steps), "--out", str(out)])  # fmt: skip
            tuned = setting_of(json.loads((out / "ds_config.json").read_text()))
            runs = len(json.loads((out / "tune.json").read_text())["tries"])
            here = plan_here.run([program, "plan", "--model", str(folder / "model.json"), "--seq", str(sequence), "--dtype", dtype, "--batch", str(BATCH), "--here", "--per-host",
                                  str(RANKS), "--out", str(folder / "planned.json")])  # fmt: skip
            planned = setting_of(json.loads((folder / "planned.json").read_text()))
            measured: dict[Setting, list[float]] = {setting: [] for setting in grid}
            for turn in range(2):
                for setting in grid if turn == 0 else reversed(grid):
                    measured[setting] += times(program, folder, common, setting, arguments.steps)
            medians = {setting: statistics.median(values) for setting, values in measured.items()}
            best, worst = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
            again = against_each_other(program, folder, common, [best, tuned, planned], arguments)
            row = {"model": model, "best": words(best), "best_ms": medians[best], "worst_ms": medians[worst], "tuned": words(tuned), "tuned_off": again[tuned] / again[best] - 1,
                   "runs": runs, "planned": words(planned), "planned_off": again[planned] / again[best] - 1}  # fmt: skip
            results.append(row)
            print(f"{model}, {dtype}: best {row['best']} ({row['best_ms']:.0f} ms; worst {row['worst_ms']:.0f}); tuned in {runs} runs: {row['tuned']} ({100 * row['tuned_off']:+.1f} %); "
                  f"the planner's first: {row['planned']} ({100 * row['planned_off']:+.1f} %)", flush=True)  # fmt: skip
            if not re.search("ds_config", said):
                sys.exit(said)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
