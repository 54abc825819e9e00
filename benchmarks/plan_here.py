#!/usr/bin/env python3
"""Holds the planner's times against this machine: some settings run for real, beside what `zero plan` predicts from measured speeds.

    benchmarks/plan_here.py build/release/zero [--steps 12] [--json FILE]

The machine is measured once (`zero plan --here`), before the runs. A real step is the median of a run's steps behind the first three.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 128, "vocab_size": 4096, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
RANKS, SEQUENCE, WARM_UP = 2, 128, 3
# stage, micro-batch, micro-batches of a step, recomputed, dtype
SETTINGS = [(0, 4, 1, 0, "fp32"), (1, 4, 1, 0, "fp32"), (2, 4, 1, 0, "fp32"), (3, 4, 1, 0, "fp32"), (3, 1, 1, 0, "fp32"),
            (2, 8, 1, 1, "fp32"), (3, 2, 2, 0, "fp32"), (2, 4, 1, 0, "bf16")]  # fmt: skip


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def predicted(program: str, folder: Path, setting: tuple[int, int, int, int, str]) -> float:
    stage, micro, accumulation, recomputed, dtype = setting
    file = folder / "plan.json"
    run([program, "plan", "--model", str(folder / "model.json"), "--hardware", str(folder / "here.json"), "--batch", str(RANKS * micro * accumulation),
         "--seq", str(SEQUENCE), "--dtype", dtype, "--json", str(file)])  # fmt: skip
    for each in json.loads(file.read_text())["results"]:
        words = each["configuration"]
        if (each["stage"], each["micro_batch"], each["accumulation"]) == (stage, micro, accumulation) and "8-bit" not in words and ("recomputed" in words) == bool(recomputed):
            return 1e3 * each["step_seconds"]["total"]
    sys.exit(f"The plan has no candidate for {setting}.")


def real(program: str, folder: Path, setting: tuple[int, int, int, int, str], steps: int) -> float:
    stage, micro, accumulation, recomputed, dtype = setting
    out = folder / "run"
    run([program, "train", "--model", str(folder / "model.json"), "--data", str(folder / "text.txt"), "--out", str(out), "--overwrite", "--nproc", str(RANKS),
         "--threads", "1", "--stage", str(stage), "--micro-batch", str(micro), "--accumulate", str(accumulation), "--seq", str(SEQUENCE), "--dtype", dtype,
         "--steps", str(WARM_UP + steps), "--eval-tokens", "0", "--sample-tokens", "0", *(["--recompute", "1"] if recomputed else [])])  # fmt: skip
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["step_ms"] for line in lines if "event" not in line and line["step"] > WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(4000)))
        load = os.getloadavg()[0]
        run([arguments.program, "plan", "--model", str(folder / "model.json"), "--here", "--per-host", str(RANKS), "--batch", str(RANKS), "--seq", str(SEQUENCE), "--json", str(folder / "first.json")])  # fmt: skip
        here = json.loads((folder / "first.json").read_text())["options"]["cluster"]
        (folder / "here.json").write_text(json.dumps(here))
        print(f"load {load:.2f} before the start; a rank: {here['flops_fp32'] / 1e9:.1f} GFLOP/s in fp32, {here['flops'] / 1e9:.1f} in bf16, {here['bandwidth'] / 1e9:.1f} GB/s\n")
        print(f"{'setting':<44} {'predicted ms':>12} {'real ms':>9} {'off':>7}")
        rows = []
        for setting in SETTINGS:
            expected, measured = predicted(arguments.program, folder, setting), real(arguments.program, folder, setting, arguments.steps)
            stage, micro, accumulation, recomputed, dtype = setting
            words = f"stage {stage}, {dtype}, micro-batch {micro} x {accumulation}{', recomputed' if recomputed else ''}"
            rows.append({"setting": words, "predicted_ms": expected, "real_ms": measured, "off": expected / measured - 1})
            print(f"{words:<44} {expected:>12.1f} {measured:>9.1f} {100 * rows[-1]['off']:>+6.1f}%", flush=True)
        off = [abs(row["off"]) for row in rows]
        print(f"\noff by {100 * statistics.median(off):.1f} % in the median, {100 * max(off):.1f} % at the most; load {os.getloadavg()[0]:.2f} at the end")
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": here, "load": load, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
