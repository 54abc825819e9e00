#!/usr/bin/env python3
"""Steps with all states on disk, beside what fio reaches on that disk in the same minutes.

    benchmarks/offload.py /mnt/nvme --data build/demo/bible
    benchmarks/offload.py /mnt/nvme --data build/demo/bible --ways delayed --rounds 5 --steps 6
    benchmarks/offload.py /mnt/nvme --data build/demo/bible --model gpt2-large --fits

Trains GPT-2 XL, or another model (bf16, fp32 master weights, micro-batch 1, sequence 256) under a hard limit of memory in the ways that `--ways` names. Before and
after each run fio moves bytes in the proportion in which a step reads and writes them, with io_uring, the same block size and depth, past the page
cache, from huge pages; then it reads alone and writes alone; then it moves the mixture beside a smaller model that trains in memory, since a disk and the
processors share memory. Three bounds follow for the bytes of a step by formula: all of them at the speed of fio's mixture; what is read at the speed of
its reading and then what is written at that of its writing; all of them at the mixture's speed beside a training, which a step that does not compute all
the time can beat. The last column is over the larger of a step without offloading (--fits; else of the two passes alone) and of the bytes at the
mixture's speed; with clipping, where no update can begin before the last gradient, over the passes and then the optimizer's bytes, which a step that
goes on updating beside the next forward pass can beat. The passes alone are the second step of a run with delayed updates, which has none beside it; it
writes its gradients to the disk. A step's time is the median of those after the second. Needs the release build, the text of `make demo`, fio (apt-get
install fio), and 40 GB of the disk.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import fio

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "clipping": [],
    "in-backward": ["--update-in-backward", "--clip", "0"],
    "delayed": ["--delayed-update-after", "1"],
}
IN_MEMORY = "in-memory"  # nothing is offloaded
GRADIENTS_ON_DISK = {"clipping", "delayed"}


@contextlib.contextmanager
def resident(options: argparse.Namespace) -> Iterator[None]:
    """A training in memory, past its first steps, goes on meanwhile."""
    with tempfile.TemporaryDirectory() as out:
        command = [options.zero, "train", "--nproc", str(options.ranks), "--threads", str(options.threads), "--model", options.resident]
        command += ["--data", options.data, "--out", out, "--overwrite", "--steps", "1000000", "--micro-batch", "1", "--seq", "256", "--stage", "3"]
        command += ["--dtype", "bf16", "--eval-tokens", "0", "--sample-tokens", "0", "--log-every", "1"]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            log = Path(out) / "log.jsonl"
            while training.poll() is None and not (log.exists() and log.read_text().count('"step_ms"') > 2):
                time.sleep(0.1)
            if training.returncode is not None:
                sys.exit(f"the training in memory ended early: {' '.join(command)}")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGKILL)  # it should save nothing
            training.wait()


def disk(options: argparse.Namespace, read_percent: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def speed(way: str) -> float:
            return fio.gb_per_s(f"{folder}/file", way, size=4 << 30, block=options.block, depth=options.depth, seconds=4, read_percent=read_percent)

        speed("write")  # what is written for the first time is slower
        speeds = {"mixed": speed("rw"), "read": speed("read"), "write": speed("write")}
        with resident(options):
            speeds["beside"] = speed("rw")
    return speeds


@dataclass
class Training:
    seconds: list[float]  # of each step
    read: float  # GB of a step, by formula
    written: float
    parameters: int

    def passes_gb(self) -> float:
        """Of the passes: bf16 parameters, read for each of the two, and gradients."""
        return 6e-9 * self.parameters


def train(options: argparse.Namespace, way: str, steps: int) -> Training:
    with tempfile.TemporaryDirectory(dir=options.folder) as out:
        command = [] if way == IN_MEMORY else [str(ROOT / "benchmarks/limited.sh"), options.limit]
        command += [options.zero, "train", "--nproc", str(options.ranks), "--threads", str(options.threads)]
        command += ["--model", options.model, "--data", options.data, "--out", out, "--overwrite"]
        command += ["--steps", str(steps), "--micro-batch", "1", "--seq", "256", "--stage", "3", "--dtype", "bf16"]
        command += ["--eval-tokens", "0", "--sample-tokens", "0", "--log-every", "1"]
        if way != IN_MEMORY:
            command += ["--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path", options.folder, "--live-parameters", str(options.live)]
            command += [*WAYS[way], *options.zero_options]
        if way in GRADIENTS_ON_DISK:
            command.append("--offload-gradients")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    traffic = next(event for event in events if event.get("event") == "traffic")
    total = {way: sum(rank.get("disk", {}).get(f"{way}_formula", 0) for rank in traffic["per_rank"]) for way in ("read", "written")}
    return Training(
        seconds=[event["step_ms"] * 1e-3 for event in events if "step_ms" in event],
        read=total["read"] / traffic["steps"] * 1e-9,
        written=total["written"] / traffic["steps"] * 1e-9,
        parameters=events[0]["parameters"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk")
    parser.add_argument("--data", required=True, help="folder made by `zero data prepare`")
    parser.add_argument("--ways", default="in-backward,delayed,clipping", help="of updating, with commas between [in-backward,delayed,clipping]")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each [3]")
    parser.add_argument("--steps", type=int, default=6, help="of a run [6]")
    parser.add_argument("--model", default="gpt2-xl", help="as of `zero train` [gpt2-xl]")
    parser.add_argument("--fits", action="store_true", help="the model can be trained without offloading, for comparison")
    parser.add_argument("--resident", default="gpt2", help="the model that trains in memory beside fio [gpt2]")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of a rank [2]")
    parser.add_argument("--live", type=int, default=100_000_000, help="parameters that are gathered at a time, at most [100000000]")
    parser.add_argument("--limit", default="6G", help="of memory, all ranks together [6G]")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a transfer, of fio and of libzero's default [1048576]")
    parser.add_argument("--depth", type=int, default=32, help="transfers under way [32]")
    parser.add_argument("--zero", default=str(ROOT / "build/release/zero"), help="the program [build/release/zero]")
    parser.add_argument("--zero-options", type=str.split, default=[], help="more options of `zero train`, in one word, after =")
    options = parser.parse_args()
    fio.require()
    results: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways.split(",")}
    read_percent = 53  # until a run has told
    for index in range(options.rounds):
        passes = train(options, "delayed", 2).seconds[1]
        alone = median(train(options, IN_MEMORY, options.steps).seconds[2:]) if options.fits else passes
        print(f"round {index + 1}: the passes alone {passes:.1f} s" + (f", a step in memory {alone:.1f} s" if options.fits else ""), flush=True)
        before = disk(options, read_percent)
        for way, runs in results.items():
            run = train(options, way, options.steps)
            seconds, gb = median(run.seconds[2:]), run.read + run.written
            read_percent = round(100 * run.read / gb)
            after = disk(options, read_percent)
            speed = {name: mean((before[name], after[name])) for name in before}
            before = after
            bounds = {
                "mixed": gb / speed["mixed"],
                "apart": run.read / speed["read"] + run.written / speed["write"],
                "beside": gb / speed["beside"],
            }
            if way == "clipping":
                bounds["least"] = passes + (gb - run.passes_gb()) / speed["mixed"]
            else:
                bounds["least"] = max(alone, bounds["mixed"])
            runs.append({"seconds": seconds} | bounds)
            print(
                f"round {index + 1}: {way}: {seconds:.1f} s a step; {run.read:.1f} GB read, {run.written:.1f} written; fio "
                + ", ".join(f"{value:.2f} GB/s {name}" for name, value in speed.items())
                + "; bounds "
                + ", ".join(f"{value:.1f} s {name}" for name, value in bounds.items()),
                flush=True,
            )
    print("\n| update | s a step | over the bytes at fio's mixture | over reading, then writing | at fio's mixture beside a training | over the least |")
    print("|---|---|---|---|---|---|")
    for way, runs in results.items():
        cells = [f"{median(run['seconds'] for run in runs):.1f}"]
        for bound in ("mixed", "apart", "beside", "least"):
            ratios = [run["seconds"] / run[bound] for run in runs]
            cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
