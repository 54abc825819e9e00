#!/usr/bin/env python3
"""Holds the memory that libzero.plan predicts against real sharded steps: 60 settings of small models, with their states in memory or on disk.

    PYTHONPATH=build/release/python $(scripts/python_environment.sh) benchmarks/plan_memory.py build/release/zero [--json FILE]

A real step is the third one of a run on 1 or 2 ranks of this machine; its memory is the sum of the peaks that rank 0's ledger and allocator have by category.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))
STATES = ("parameters", "gradients", "optimizer")
BATCH = 8  # samples of a rank and a step
# dtype, stage, samples of a micro-batch, and what is special
SETTINGS: dict[int, list[tuple[str, int, int, str]]] = {
    1: [("fp32", 0, 8, ""), ("bf16", 0, 8, ""), ("bf16", 0, 8, "optimizer on disk"), ("fp32", 3, 8, "all on disk")],
    2: [("fp32", 0, 8, ""), ("bf16", 1, 8, ""), ("fp32", 2, 4, ""), ("bf16", 3, 8, ""), ("fp32", 3, 8, "recomputed"), ("bf16", 2, 8, "optimizer on disk"),
        ("fp32", 3, 8, "all on disk"), ("fp32", 1, 8, "8-bit")],
}  # fmt: skip


def special_of(each: dict[str, Any]) -> str:
    zero = each["ds_config"]["zero_optimization"]
    found = []
    if "offload_optimizer" in zero:
        found.append("all on disk" if "offload_param" in zero else "optimizer on disk")
    if each["recomputed"]:
        found.append("recomputed")
    if "data_types" in each["ds_config"]:
        found.append("8-bit")
    return ", ".join(found)


def rank_of_a_run(ranks: int, file: Path) -> None:
    """Runs all settings of so many ranks, as one of them."""
    import torch

    import libzero
    from plan_models import MODELS, held

    torch.set_num_threads(1)
    group = libzero.group(timeout=60)
    rows = []
    disk = str(file.parent)  # the same for all ranks
    hardware = {"device": "epyc 9654", "per_host": ranks, "nvme": 1e9}
    for name, (make, loss) in MODELS.items():
        plans: dict[str, Any] = {}
        for dtype, stage, micro_batch, special in SETTINGS[ranks]:
            torch.manual_seed(1)
            model = make()
            if special == "recomputed" and not hasattr(model, "gradient_checkpointing_enable"):
                special, micro_batch = "", 4
            if dtype not in plans:
                plans[dtype] = libzero.plan(model, loss, batch=BATCH * ranks, dtype=dtype, hardware=hardware)
            plan = plans[dtype]
            wanted = (stage, micro_batch, special)
            chosen = next(each for each in plan.candidates if (each["stage"], each["micro_batch"], special_of(each)) == wanted)
            if chosen["recomputed"]:
                model.gradient_checkpointing_enable()
            config = json.loads(json.dumps(plan.config_of(chosen)).replace("/local_nvme", disk))
            if special == "all on disk":  # units are gathered as far as memory allows: the fewest
                config["zero_optimization"]["stage3_max_live_parameters"] = 0
            real, predicted = held(group, model, loss, config), chosen["memory"]
            rows.append({"model": name, "ranks": ranks, "setting": f"{dtype}, {chosen['configuration']}", "held": sum(real.values()),
                         "predicted": sum(predicted.values()), "states_equal": all(real[state] == predicted[state] for state in STATES),
                         "parts": {key: [value, predicted[key]] for key, value in real.items() if value != predicted[key]}})  # fmt: skip
    if group.rank == 0:
        file.write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        return rank_of_a_run(arguments.ranks, arguments.json)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="libzero-", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        file = Path(name) / "rows.json"
        for ranks in SETTINGS:
            command = [arguments.program, "launch", "-n", str(ranks), "--", sys.executable, __file__, arguments.program, "--ranks", str(ranks), "--json", str(file)]
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}, check=False)
            if done.returncode != 0:
                sys.exit(f"The runs on {ranks} ranks failed.")
            rows += json.loads(file.read_text())
    print(f"| {'model':<12} | ranks | {'setting':<56} | held, bytes | predicted | off |\n|---|---|---|---|---|---|")
    for row in rows:
        row["off"] = row["predicted"] / row["held"] - 1
        print(f"| {row['model']:<12} | {row['ranks']} | {row['setting']:<56} | {row['held']:,} | {row['predicted']:,} | {100 * row['off']:+.2f} % |")
        if not row["states_equal"]:
            print(f"the states differ: {row['parts']}")
    off = {of: [abs(row["off"]) for row in rows if (row["model"] == "LSTM") == of] for of in (False, True)}
    print(f"\n{len(rows)} settings; states agree to the byte in {sum(row['states_equal'] for row in rows)} of them.")
    print(f"Off by {100 * statistics.median(off[False] + off[True]):.2f} % in the median, {100 * max(off[False]):.2f} % at the most, "
          f"and {100 * max(off[True]):.2f} % at the most for the LSTM.")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
