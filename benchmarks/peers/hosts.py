#!/usr/bin/env python3
"""`zero train` beside PyTorch's and DeepSpeed's trainers on several hosts of this machine, over links of a given speed.

    benchmarks/peers/hosts.py                                  GPT-2 124 M, bf16, 2 hosts x 1 rank, 1 Gbit/s: every stage and peer
    benchmarks/peers/hosts.py --ranks 2 --rate 10gbit --micro-batch 4 --stages 3 --modes fsdp2-stage3
    benchmarks/peers/hosts.py --run 'quantised: --stage 3 --config zeropp.json'         another run of ours, by options of `zero train`

Hosts are network namespaces (tests/hosts/hosts.py), links are throttled by tc. Every trainer starts from the same weights and takes the
same sequences, one thread a rank; each round runs all of them in turn. Bytes are those that a host's cable carried in a step, by its own
counters: of two runs that differ by some steps. Exit status 1 where losses disagree.

Needs the release build, benchmarks/peers/setup.sh, and root (or a kernel that lets users make namespaces).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.dont_write_bytecode = True  # no __pycache__ in the checkout

from compare import CACHE, HERE, LEARNING_RATE, ROOT, TCMALLOC, TOLERANCE, WARM_UP, machine, relative_difference, words  # noqa: E402

HOSTS = ROOT / "tests/hosts/hosts.py"
FEW = WARM_UP  # steps of the run that is subtracted


class Trainers:
    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.weights = work / "init"

    def zero(self, out: Path, steps: int, chosen: list, lr: float, dtype: str) -> list:
        o = self.options
        return [o.zero, "train", "--model", o.model, "--data", o.data, "--out", out, "--overwrite", "--dtype", dtype, "--micro-batch",
                o.micro_batch, "--seq", o.seq, "--steps", steps, "--seed", 1, *chosen, "--lr", lr, "--min-lr", lr, "--warmup", 0,
                "--schedule", "constant", "--threads", 1, "--eval-tokens", 0, "--sample-tokens", 0]

    def make_weights(self) -> None:
        """A step at the rate 0 leaves the initial weights as they are, and writes them."""
        command = [str(word) for word in [*self.zero(self.weights, 1, ["--stage", 0], 0.0, "fp32"), "--nproc", 1]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, name: str, steps: int) -> dict:
        """Its log's lines, and the most bytes that a host's cable carried out."""
        o = self.options
        out = self.work / "run"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu",
                       "PYTHONDONTWRITEBYTECODE": "1", "ZERO_TEST_TORCH": str(o.python)}
        if name in o.modes:
            launcher = "torchrun"
            environment |= {"LD_PRELOAD": TCMALLOC, "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 40)}
            command = [o.python, HERE / "train.py", "--mode", name, "--weights", self.weights, "--lr", LEARNING_RATE, "--data", o.data, "--out",
                       out, "--dtype", o.dtype, "--micro-batch", o.micro_batch, "--seq", o.seq, "--steps", steps]
        else:
            launcher = "launch"
            command = [*self.zero(out, steps, o.ours[name], LEARNING_RATE, o.dtype), *o.zero_options]
        start = [sys.executable, HOSTS, "--hosts", o.hosts, "--ranks", o.ranks, "--rate", o.rate, "--launcher", launcher, "--zero", o.zero, "--"]
        done = subprocess.run([str(word) for word in [*start, *command]], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{name} failed:\n{done.stdout[-9000:]}\n{done.stderr[-9000:]}")
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        mean = [line["losses"] for line in lines if line.get("event") == "losses"]
        stepped = [line for line in lines if "step_ms" in line]
        carried = [int(number) for number in re.findall(r"carried (\d+) bytes out", done.stdout + done.stderr)]
        return {"step_ms": [line["step_ms"] for line in stepped][WARM_UP:], "losses": mean[0] if mean else [line["loss"] for line in stepped],
                "carried": max(carried)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host [1]")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it [1gbit]")
    parser.add_argument("--model", default="gpt2", help="as of `zero train` [gpt2]")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dtype", choices=TOLERANCE, default="bf16")
    parser.add_argument("--steps", type=int, default=7, help=f"of a run; the first {WARM_UP} are not timed [7]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=words, default=["0", "1", "2", "3"], help="of ours [0,1,2,3]")
    parser.add_argument("--run", action="append", default=[], metavar="NAME: OPTIONS", help="one more of ours, with these options; again and again")
    parser.add_argument("--modes", type=words, default=["ddp", "fsdp2-stage2", "fsdp2-stage3", "deepspeed1", "deepspeed2", "deepspeed3"],
                        help="peers, with commas between")
    parser.add_argument("--zero", type=Path, default=ROOT / "build/release/zero", help="the program [build/release/zero]")
    parser.add_argument("--zero-options", type=str.split, default=[], help="more options of `zero train`, in one word, after =")
    parser.add_argument("--data", type=Path, default=ROOT / "build/demo/bible", help="folder made by `zero data prepare`")
    parser.add_argument("--python", type=Path, default=CACHE / "peers/bin/python", help="that of setup.sh")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    options = parser.parse_args()
    if options.steps < WARM_UP + 2 or options.rounds < 1:
        parser.error(f"--steps is at least {WARM_UP + 2}, --rounds at least 1")
    options.ours = {f"zero stage {stage}": ["--stage", stage] for stage in options.stages}
    options.inexact = []  # runs whose losses may be others
    for run in options.run:
        name, _, chosen = (part.strip() for part in run.partition(":"))
        if not chosen or name in options.ours or name in options.modes:
            parser.error(f"--run is '{run}'; it must be NAME: OPTIONS, with a name that no other run has")
        options.ours[name] = chosen.split()
        options.inexact.append(name)
    for path, remedy in ((options.zero, "make build"), (options.data / "train.bin", "make demo"), (options.python, "benchmarks/peers/setup.sh")):
        if not path.exists():
            parser.error(f"{path} is missing; run: {remedy}")
    return options


def main() -> int:
    options = arguments()
    before = machine()
    names = [*options.ours, *options.modes]
    ranks = options.hosts * options.ranks
    runs: dict[str, list[dict]] = {name: [] for name in names}
    bytes_a_step = {}
    with tempfile.TemporaryDirectory(prefix="zero-hosts-bench-") as work:
        trainers = Trainers(options, Path(work))
        trainers.make_weights()
        for number in range(options.rounds):
            for name in names:
                runs[name].append(trainers.run(name, options.steps))
                print(f"round {number + 1}: {name}: {median(runs[name][-1]['step_ms']):.0f} ms", file=sys.stderr, flush=True)
        for name in names:
            few = trainers.run(name, FEW)["carried"]
            bytes_a_step[name] = (runs[name][0]["carried"] - few) / (options.steps - FEW)
    reference = runs[names[0]][0]["losses"]
    print(f"\n{options.model}, {options.dtype}, sequence {options.seq}, micro-batch {options.micro_batch}, {options.hosts} hosts x {options.ranks} "
          f"ranks of one thread, {options.rate}; {options.rounds} rounds of {options.steps} steps\n")
    print("| run | tokens/s | least to most | ms a step | MB that a host sends a step | loss, furthest from ours |\n|---|---|---|---|---|---|")
    worst_of_all = 0.0
    table = []
    for name in names:
        speeds = [ranks * options.micro_batch * options.seq / median(run["step_ms"]) * 1000 for run in runs[name]]
        worst = max(relative_difference(a, b) for run in runs[name] for a, b in zip(reference, run["losses"], strict=True))
        if name not in options.inexact:
            worst_of_all = max(worst_of_all, worst)
        table.append({"run": name, "tokens_per_s": median(speeds), "least": min(speeds), "most": max(speeds),
                      "bytes_a_step": bytes_a_step[name], "loss_worst": worst})
        print(f"| {name} | {median(speeds):.1f} | {min(speeds):.1f} to {max(speeds):.1f} | "
              f"{median(median(run['step_ms']) for run in runs[name]):.0f} | {bytes_a_step[name] / 1e6:.0f} | {worst:.1e} |")
    if options.json:
        options.json.write_text(json.dumps({
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "machine": before, "table": table, "runs": runs}, indent=1) + "\n")
    if not worst_of_all <= TOLERANCE[options.dtype]:
        print(f"LOSSES DISAGREE: by {worst_of_all:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
