#!/usr/bin/env python3
"""The fused AdamW of libzero beside DeepSpeed's CPU Adam and LibTorch's fused AdamW: GB/s of one update over flat fp32 arrays.

    benchmarks/peers/adam.py                     1 and 2 threads, 5 rounds
    benchmarks/peers/adam.py --threads 1 --elements 31000000
    benchmarks/peers/adam.py --parameters 1e9 --repetitions 5      seconds of a whole model's update

Each round runs `zero_bench optimizer` and DeepSpeed's optimizer in turn, in processes of their own. All count 28 bytes an element:
weight and two moments read and written, gradient read. Needs benchmarks/peers/setup.sh and `ninja -C build/release zero_bench`.
With --parameters libzero updates bf16 parameters with fp32 master weights from a bf16 gradient, DeepSpeed (as in its ZeRO-Offload) fp32
weights from an fp32 gradient: 16 bytes of memory and 28 of traffic a parameter in both. What does not fit in memory is refused.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libzero"
BYTES_AN_ELEMENT = 28
LOOPS = {"AdamW, fp32": "libzero", "LibTorch's fused AdamW, fp32": "LibTorch's fused AdamW", "streaming loop, fp32": "streaming loop"}

DEEPSPEED = """
import sys, time
from statistics import median
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
threads, elements, repetitions = (int(a) for a in sys.argv[1:])
torch.set_num_threads(threads)
weight = torch.nn.Parameter(torch.full((elements,), 0.5))
weight.grad = torch.full((elements,), 1e-3)
optimizer = DeepSpeedCPUAdam([weight], lr=1e-3, weight_decay=0.01, adamw_mode=True)
seconds = []
for _ in range(repetitions + 2):
    start = time.perf_counter()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
print("RESULT", %d * elements / median(seconds[2:]) * 1e-9)
""" % BYTES_AN_ELEMENT


def libzero(options: argparse.Namespace, threads: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [options.zero_bench, "optimizer", "--threads", str(threads), "--elements", str(options.elements)]
        command += ["--rounds", str(options.repetitions), "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(Path(file.name).read_text())["results"]
    return {LOOPS[row["loop"]]: row["gb_per_s"]["median"] for row in results if row["loop"] in LOOPS}


def deepspeed(options: argparse.Namespace, threads: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    command = [options.python, "-c", DEEPSPEED, str(threads), str(options.elements), str(options.repetitions)]
    output = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"DeepSpeed printed no result:\n{output}")
    return {"DeepSpeed's CPU Adam": float(lines[-1].split()[1])}


def seconds_of_models(options: argparse.Namespace, threads: int, parameters: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [options.zero_bench, "optimizer", "--threads", str(threads), "--parameters", str(parameters)]
        command += ["--rounds", str(options.repetitions), "--json", file.name]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(1)  # the program has said why
        row = json.loads(Path(file.name).read_text())["results"][0]
    options.elements = parameters
    peers = {name: BYTES_AN_ELEMENT * parameters * 1e-9 / rate for name, rate in deepspeed(options, threads).items()}
    return {"libzero": row["seconds"]["median"]} | peers


def print_ratios(rounds: list[dict[str, float]], better: str) -> None:
    """Of each name the median, and how many times as fast libzero is by round."""
    for name in rounds[0]:
        ratios = [one["libzero"] / one[name] if better == "more" else one[name] / one["libzero"] for one in rounds]
        spread = f"{median(ratios):6.2f}x  ({min(ratios):.2f} to {max(ratios):.2f})" if name != "libzero" else ""
        print(f"{name:<24} {median(one[name] for one in rounds):9.3f} {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="with commas between [1,2]")
    parser.add_argument("--elements", type=int, default=16 << 20, help="[16777216]")
    parser.add_argument("--parameters", default="", help="of whole models, as 1e9,2e9: their seconds in place of GB/s")
    parser.add_argument("--repetitions", type=int, default=21, help="updates of a run [21]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each [5]")
    parser.add_argument("--zero-bench", default=str(ROOT / "build/release/zero_bench"), help="the program [build/release/zero_bench]")
    parser.add_argument("--python", default=str(CACHE / "peers/bin/python"), help="that of setup.sh")
    parser.add_argument("--json", help="where to write everything that was measured")
    options = parser.parse_args()
    everything = []
    all_threads = [int(text) for text in options.threads.split(",")]
    for parameters in (int(float(text)) for text in options.parameters.split(",") if text):
        for threads in all_threads:
            rounds = [seconds_of_models(options, threads, parameters) for _ in range(options.rounds)]
            everything.append({"parameters": parameters, "threads": threads, "seconds": rounds})
            print(f"\n{parameters / 1e9:g} billion parameters, {threads} thread{'s' if threads > 1 else ''}: median seconds, and libzero's speed over its by round")
            print_ratios(rounds, "less")
    for threads in all_threads if not options.parameters else []:
        rounds = [libzero(options, threads) | deepspeed(options, threads) for _ in range(options.rounds)]
        everything.append({"threads": threads, "gb_per_s": rounds})
        print(f"\n{options.elements} elements, {threads} thread{'s' if threads > 1 else ''}: median GB/s, and libzero's over it by round")
        print_ratios(rounds, "more")
    if options.json:
        Path(options.json).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
