#!/usr/bin/env python3
"""Holds the planner's times against this machine: settings run for real, beside what `zero train --plan` predicts from measured speeds.

    benchmarks/plan_here.py build/release/zero [--steps 20] [--turns 1] [--json FILE] [--only WORDS]

Each setting is predicted, which measures the machine, and run, in turns. A real step is the median of a run's steps behind the first three.
Hosts are network namespaces (tests/hosts/hosts.py), whose links are throttled by tc; they need root, or a kernel that lets users make namespaces.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 256, "vocab_size": 4096, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
WIDE = {**GPT2, "n_layer": 3, "n_head": 12, "n_embd": 768}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
         "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
MODELS = {"gpt2": GPT2, "wide": WIDE, "llama": LLAMA}
HOSTS = Path(__file__).parent.parent / "tests/hosts/hosts.py"
WARM_UP = 3
DISK = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "DISK"}, "offload_param": {"device": "nvme", "nvme_path": "DISK"}}}
# model, ranks, stage, micro-batch, micro-batches of a step, sequence, dtype, other options
SETTINGS: list[tuple[str, int, int, int, int, int, str, dict[str, Any]]] = [
    ("gpt2", 2, 0, 4, 1, 128, "fp32", {}),
    ("gpt2", 2, 1, 4, 1, 128, "fp32", {}),
    ("gpt2", 2, 2, 4, 1, 128, "fp32", {}),
    ("gpt2", 2, 3, 4, 1, 128, "fp32", {}),
    ("gpt2", 1, 0, 4, 1, 128, "fp32", {}),
    ("gpt2", 2, 3, 1, 1, 256, "fp32", {}),
    ("gpt2", 2, 2, 8, 1, 128, "fp32", {"recompute": 1}),
    ("gpt2", 2, 3, 2, 4, 128, "fp32", {}),
    ("gpt2", 2, 2, 4, 1, 128, "bf16", {}),
    ("gpt2", 2, 3, 8, 2, 128, "bf16", {}),
    ("wide", 2, 0, 2, 1, 256, "fp32", {}),
    ("wide", 2, 2, 2, 1, 256, "bf16", {}),
    ("wide", 2, 3, 1, 1, 256, "bf16", {}),
    ("wide", 2, 3, 4, 1, 256, "bf16", {"recompute": 1}),
    ("wide", 2, 3, 2, 1, 256, "bf16", {"disk": True}),
    ("wide", 2, 2, 2, 2, 128, "fp32", {"eight_bit": True}),
    ("llama", 2, 2, 2, 1, 256, "fp32", {}),
    ("llama", 2, 3, 4, 1, 256, "bf16", {}),
    ("llama", 1, 0, 2, 2, 256, "bf16", {}),
    ("llama", 2, 3, 2, 1, 256, "fp32", {"disk": True}),
    ("gpt2", 2, 2, 4, 1, 128, "fp32", {"hosts": "1gbit"}),
    ("wide", 2, 3, 4, 1, 256, "bf16", {"hosts": "1gbit"}),
    ("llama", 2, 3, 2, 1, 256, "bf16", {"hosts": "10gbit"}),
    ("wide", 2, 0, 2, 2, 128, "bf16", {"hosts": "10gbit"}),
]


def run(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return re.sub(r"^\[\d+\] ?", "", done.stdout, flags=re.M)  # a launcher says which rank speaks


def words_of(setting: tuple[str, int, int, int, int, int, str, dict[str, Any]]) -> str:
    model, ranks, stage, micro, accumulation, sequence, dtype, more = setting
    others = {"recompute": "recomputed", "disk": "states on disk", "eight_bit": "8-bit states"}
    places = f"{ranks} hosts at {more['hosts']}" if "hosts" in more else f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{model}, {places}, stage {stage}, {dtype}, {micro} x {accumulation} of {sequence}" + "".join(f", {others[name]}" for name in more if name in others)


def command_of(program: str, folder: Path, setting: tuple[str, int, int, int, int, int, str, dict[str, Any]], steps: int) -> list[str]:
    model, ranks, stage, micro, accumulation, sequence, dtype, more = setting
    (folder / "model.json").write_text(json.dumps(MODELS[model]))
    options: dict[str, Any] = {"model": folder / "model.json", "data": folder / "text.txt", "out": folder / "run", "nproc": ranks, "stage": stage, "micro-batch": micro,
                               "accumulate": accumulation, "seq": sequence, "dtype": dtype, "steps": WARM_UP + steps, "eval-tokens": 0, "sample-tokens": 0}  # fmt: skip
    if "recompute" in more:
        options["recompute"] = more["recompute"]
    if "disk" in more or "eight_bit" in more:
        config = json.loads(json.dumps(DISK).replace("DISK", str(folder / "disk"))) if "disk" in more else {"data_types": {"optimizer_state_dtype": "8bit"}}
        (folder / "config.json").write_text(json.dumps(config))
        options["config"] = folder / "config.json"
    (folder / "disk").mkdir(exist_ok=True)
    start = []
    if "hosts" in more:
        start = [sys.executable, str(HOSTS), "--hosts", str(options.pop("nproc")), "--rate", more["hosts"], "--zero", program, "--"]
    return [*start, program, "train", "--overwrite", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]


def predicted(command: list[str]) -> dict[str, float]:
    text = run([*command, "--plan"])
    header = re.search(r"^configuration.*$", text, re.M)
    row = re.search(r"This run:\n.*\n.*?((?:[\d.]+ [KMG]?i?B +){3})([\d. ]+)", text)
    if header is None or row is None:
        sys.exit(f"The plan has no row of the run:\n{text}")
    names = ["step", "compute", "gather", "reduce", "offload", "update", "disk"]
    return dict(zip(names, map(float, row[2].split()), strict=False))


def real(command: list[str], folder: Path) -> float:
    run(command)
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return statistics.median(line["step_ms"] for line in lines if "event" not in line and line["step"] > WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=1, help="predictions and runs of each setting; the medians count")
    parser.add_argument("--only", default="", help="settings whose line has these words")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(20000)))
        print(f"load {os.getloadavg()[0]:.2f} before the start\n")
        print(f"{'setting':<62} {'predicted ms':>12} {'real ms':>9} {'off':>7}  compute gather reduce offload update disk")
        for setting in SETTINGS:
            words = words_of(setting)
            if arguments.only not in words:
                continue
            command = command_of(arguments.program, folder, setting, arguments.steps)
            plans, steps = [], []
            for _ in range(arguments.turns):
                plans.append(predicted(command))
                steps.append(real(command, folder))
            plan = sorted(plans, key=lambda each: each["step"])[len(plans) // 2]
            expected, measured = statistics.median(each["step"] for each in plans), statistics.median(steps)
            rows.append({"setting": words, "predicted_ms": expected, "real_ms": measured, "off": expected / measured - 1})
            parts = " ".join(f"{plan[part]:.1f}" for part in ("compute", "gather", "reduce", "offload", "update", "disk"))
            print(f"{words:<62} {expected:>12.1f} {measured:>9.1f} {100 * rows[-1]['off']:>+6.1f}%  {parts}", flush=True)
    off = [abs(row["off"]) for row in rows]
    print(f"\n{len(rows)} settings: off by {100 * statistics.median(off):.1f} % in the median, {100 * max(off):.1f} % at the most; load {os.getloadavg()[0]:.2f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
