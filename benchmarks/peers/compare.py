#!/usr/bin/env python3
"""`zero train` beside PyTorch's and DeepSpeed's trainers: speed, CPU time, memory, and equal losses.

    benchmarks/peers/compare.py                            GPT-2 124 M, fp32, micro-batch 1, 2 ranks: every stage and peer
    benchmarks/peers/compare.py --dtype bf16 --micro-batch 4 --stages 2,3 --modes fsdp2-stage2,fsdp2-stage3,deepspeed2,deepspeed3

Every trainer starts from the same weights, takes the same sequences in the same order and updates with the same AdamW, one
thread a rank. Each round runs all of them in turn, so that a drift of the machine's speed meets all; ratios are taken within a
round. The memory is measured in runs of its own, since reading it disturbs the times. Exit status 1 where losses disagree.

Needs the release build, the demo's text (`make demo` makes both) and benchmarks/peers/setup.sh. Any python3 runs this file.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.dont_write_bytecode = True  # no __pycache__ in the checkout

from memory import children, cpu_seconds, pss_bytes  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libzero"
WARM_UP = 2  # steps of a run that no time is taken from
TIMED_POLL, MEMORY_POLL = 0.02, 0.005  # seconds
LEARNING_RATE = 3e-4
# How far a loss may be from ours, relatively. In bf16 the trainers round at different places: gradients before or after they are
# added, DeepSpeed's master weights at the start.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}

TCMALLOC = "libtcmalloc_minimal.so.4"

OURS_ALONE = "zero independent"
# Peer -> the run of ours that does the same work.
PEERS = {
    "independent": OURS_ALONE,
    "ddp": "zero stage 0",
    "zero-redundancy": "zero stage 1",
    "deepspeed1": "zero stage 1",
    "fsdp2-stage2": "zero stage 2",
    "deepspeed2": "zero stage 2",
    "fsdp2-stage3": "zero stage 3",
    "deepspeed3": "zero stage 3",
    "deepspeed3-lean": "zero stage 3",
}


@dataclass
class Job:
    """Processes that train one model together, and the log that the first of them writes."""

    processes: list[subprocess.Popen]
    log: Path
    ranks: int

    def pids(self) -> list[int]:
        """The ranks: the processes themselves, or the children of a launcher."""
        if len(self.processes) == self.ranks:
            return [process.pid for process in self.processes]
        return children(self.processes[0].pid)

    def lines(self) -> list[dict]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Run:
    """What one run of a trainer gave: a value a job for times (all ranks of a job step together), a value a rank for memory."""

    step_ms: list[float] = field(default_factory=list)  # after the warm-up, of all jobs
    losses: list[float] = field(default_factory=list)  # of every step; those of the first job
    cpu_seconds_per_step: float = 0.0  # all ranks of all jobs
    peak_bytes: list[int] = field(default_factory=list)  # above the process before its model
    peak_together: int = 0  # the most that all ranks had at one moment
    before_bytes: list[int] = field(default_factory=list)


class Comparison:
    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.weights = work / "init"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
        }
        self.peer_environment = dict(self.environment)
        if options.allocator == "tcmalloc":
            self.peer_environment["LD_PRELOAD"] = TCMALLOC
            self.peer_environment["TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"] = str(1 << 40)

    # --- Starting ---

    def start(self, command: list, environment: dict, out: Path, rank: int) -> subprocess.Popen:
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"output{rank}.txt").open("w") as output:
            return subprocess.Popen([str(word) for word in command], env=environment, stdout=output, stderr=subprocess.STDOUT,
                                    stdin=subprocess.DEVNULL, start_new_session=True)

    def common(self, out: Path, steps: int) -> list:
        o = self.options
        return ["--data", o.data, "--out", out, "--dtype", o.dtype, "--micro-batch", o.micro_batch, "--seq", o.seq,
                "--steps", steps, "--seed", o.seed]

    def zero_command(self, out: Path, steps: int, ranks: int, stage: int, lr: float) -> list:
        o = self.options
        return [o.zero, "train", "--model", o.model, *self.common(out, steps), "--overwrite", "--nproc", ranks, "--stage", stage,
                "--lr", lr, "--min-lr", lr, "--warmup", 0, "--schedule", "constant", "--threads", 1, "--eval-tokens", 0,
                "--sample-tokens", 0]

    def make_weights(self) -> None:
        """A step at the rate 0 in fp32 leaves the initial weights as they are, and writes them."""
        command = self.zero_command(self.weights, 1, 1, 0, 0.0)
        command[command.index("--dtype") + 1] = "fp32"
        command[command.index("--micro-batch") + 1] = 1
        process = self.start(command, self.environment, self.weights, 0)
        if process.wait() != 0:
            raise SystemExit(f"The initial weights could not be made:\n{self.output(self.weights)}")

    def jobs(self, name: str, steps: int) -> list[Job]:
        """Starts a trainer. Those that do not communicate are as many jobs as there are ranks, on the same data."""
        o = self.options
        alone = name in ("independent", OURS_ALONE)
        ranks = 1 if alone else o.ranks
        jobs = []
        for copy in range(o.ranks if alone else 1):
            out = self.work / f"run{copy}"
            shutil.rmtree(out, ignore_errors=True)
            if name in PEERS:
                environment = {**self.peer_environment, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
                command = [o.python, HERE / "train.py", "--mode", name, "--weights", self.weights, "--lr", LEARNING_RATE,
                           "--deepspeed", json.dumps(o.deepspeed), *self.common(out, steps)]
                processes = [self.start(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, out, rank)
                             for rank in range(ranks)]
            else:
                stage = 0 if alone else int(name.split()[-1])
                processes = [self.start([*self.zero_command(out, steps, ranks, stage, LEARNING_RATE), *o.zero_options], self.environment, out, 0)]
            jobs.append(Job(processes, out / "log.jsonl", ranks))
        return jobs

    def output(self, out: Path) -> str:
        return "\n".join("".join(file.read_text().splitlines(keepends=True)[-30:]) for file in sorted(out.glob("output*.txt")))

    # --- Watching ---

    def run(self, name: str, steps: int, measure_memory: bool) -> Run:
        jobs = self.jobs(name, steps)
        processes = [process for job in jobs for process in job.processes]
        try:
            result = (self.watch_memory if measure_memory else self.watch_times)(jobs, steps)
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(process.returncode != 0 for process in processes):
            outputs = "\n".join(self.output(job.log.parent) for job in jobs)
            raise SystemExit(f"{name} failed:\n{outputs}")
        for job in jobs:
            lines = job.lines()
            done = [line for line in lines if "step_ms" in line]
            result.step_ms += [line["step_ms"] for line in done[WARM_UP:]]
            mean = [line["losses"] for line in lines if line.get("event") == "losses"]
            result.losses = result.losses or (mean[0] if mean else [line["loss"] for line in done])
        for job in jobs:
            shutil.rmtree(job.log.parent, ignore_errors=True)
        return result

    @staticmethod
    def running(jobs: list[Job]) -> bool:
        """Whether all processes run or have ended well; one that failed ends the run."""
        states = [process.poll() for job in jobs for process in job.processes]
        return all(state in (None, 0) for state in states) and any(state is None for state in states)

    def watch_times(self, jobs: list[Job], steps: int) -> Run:
        """CPU time from the end of the warm-up to the last step that was seen to end while all ranks lived."""
        seen = [0] * len(jobs)
        cpu: list[dict[int, float]] = [{} for _ in jobs]
        size = [0] * len(jobs)
        while self.running(jobs) and min(seen) < steps:
            time.sleep(TIMED_POLL)
            for i, job in enumerate(jobs):
                now = job.log.stat().st_size if job.log.exists() else 0
                if now == size[i]:
                    continue
                size[i] = now
                done = sum("step_ms" in line for line in job.lines())
                if done == seen[i]:
                    continue
                seen[i] = done
                seconds = [cpu_seconds(pid) for pid in job.pids()]
                if len(seconds) == job.ranks and min(seconds) > 0:
                    cpu[i][done] = sum(seconds)
        total = 0.0
        for at in cpu:
            timed = [number for number in at if number >= WARM_UP]
            if len(timed) >= 2:
                total += (at[timed[-1]] - at[timed[0]]) / (timed[-1] - timed[0])
        return Run(cpu_seconds_per_step=total)

    def watch_memory(self, jobs: list[Job], steps: int) -> Run:
        """The log appears just before the model is built and gets its first line just before the first step, in every trainer."""
        before: dict[int, int] = {}
        peak: dict[int, int] = {}
        together = 0
        done = 0
        while self.running(jobs) and done < steps:
            time.sleep(MEMORY_POLL)
            total = 0
            for job in jobs:
                stepping = job.log.exists() and job.log.stat().st_size > 0
                for pid in job.pids():
                    used = pss_bytes(pid)
                    if not job.log.exists():
                        before[pid] = used
                    elif stepping and used > 0:
                        peak[pid] = max(peak.get(pid, 0), used)
                        total += used - before.get(pid, 0)
            together = max(together, total)
            done = min(sum("step_ms" in line for line in job.lines()) for job in jobs)
        pids = sorted(peak)
        return Run(
            peak_bytes=[peak[pid] - before.get(pid, 0) for pid in pids],
            before_bytes=[before.get(pid, 0) for pid in pids],
            peak_together=together,
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def relative_difference(ours: float, theirs: float) -> float:
    return abs(theirs - ours) / abs(ours)


def speed(name: str, runs: list[Run], partner: list[Run] | None, options: argparse.Namespace) -> dict:
    """What a line of a table begins with. Ratios are speeds, ours over the peer's, of runs of the same round."""
    step_ms = median(median(run.step_ms) for run in runs)
    row = {
        "run": name,
        "step_ms": step_ms,
        "tokens_per_s": options.ranks * options.micro_batch * options.seq / step_ms * 1000,
        "cpu_seconds_per_step": median(run.cpu_seconds_per_step for run in runs),
    }
    if partner is not None:
        ratios = [median(theirs.step_ms) / median(ours.step_ms) for ours, theirs in zip(partner, runs, strict=True)]
        row |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return row


def ratio_text(row: dict) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})" if "ratio" in row else "-"


def mib_text(row: dict, key: str) -> str:
    return f"{row[key]:.0f}" if key in row else "-"


def summarize(name: str, runs: list[Run], partner: list[Run] | None, memory: Run | None, reference: list[float],
              options: argparse.Namespace) -> dict:
    """One line of the table."""
    row = speed(name, runs, partner, options) | {
        "loss_first": relative_difference(reference[0], runs[0].losses[0]),
        "loss_last": relative_difference(reference[-1], runs[0].losses[-1]),
        "loss_worst": max(relative_difference(a, b) for run in runs for a, b in zip(reference, run.losses, strict=True)),
    }
    if partner is not None:
        row["cpu_ratio"] = median(
            theirs.cpu_seconds_per_step / ours.cpu_seconds_per_step for ours, theirs in zip(partner, runs, strict=True))
    if memory is not None:
        row["peak_mib"] = memory.peak_together / options.ranks / (1 << 20)
    return row


def print_table(rows: list[dict], options: argparse.Namespace) -> None:
    print(f"\n{options.model}, {options.dtype}, sequence {options.seq}, micro-batch {options.micro_batch}, {options.ranks} ranks of one "
          f"thread; {options.rounds} rounds of {options.steps} steps, {options.allocator} for the peers\n")
    print("| run | tokens/s | ms a step | zero / peer (min to max) | CPU s a step | CPU, peer / zero | peak MiB a rank | loss, first and last step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cpu = f"{row['cpu_ratio']:.2f}" if "cpu_ratio" in row else "-"
        print(f"| {row['run']} | {row['tokens_per_s']:.1f} | {row['step_ms']:.0f} | {ratio_text(row)} | {row['cpu_seconds_per_step']:.2f} | {cpu} | "
              f"{mib_text(row, 'peak_mib')} | {row['loss_first']:.1e}, {row['loss_last']:.1e} |")


def machine() -> dict:
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "load": os.getloadavg()[0]}


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def check_allocator(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.allocator == "tcmalloc":  # a library that cannot be preloaded is only warned of
        said = subprocess.run(["/bin/true"], env={"LD_PRELOAD": TCMALLOC}, capture_output=True, text=True).stderr
        if said:
            parser.error(f"{TCMALLOC} is missing; run: benchmarks/peers/setup.sh, or --allocator glibc")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="as of `zero train` [gpt2]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32")
    parser.add_argument("--steps", type=int, default=8, help=f"of a run; the first {WARM_UP} are not timed [8]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each [5]")
    parser.add_argument("--memory-steps", type=int, default=3, help="of the run that measures memory; 0: none [3]")
    parser.add_argument("--modes", type=words, help="peers, with commas between [all]: " + ", ".join(PEERS))
    parser.add_argument("--stages", type=words, default=["0", "1", "2", "3"], help="of ours [0,1,2,3]")
    parser.add_argument("--allocator", choices=("tcmalloc", "glibc"), default="tcmalloc", help="of the peers [tcmalloc]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--zero", type=Path, default=ROOT / "build/release/zero", help="the program [build/release/zero]")
    parser.add_argument("--zero-options", type=str.split, default=[], help="more options of `zero train`, in one word, after =")
    parser.add_argument("--deepspeed", type=json.loads, default={}, help="JSON object over train.py's settings of zero_optimization")
    parser.add_argument("--data", type=Path, default=ROOT / "build/demo/bible", help="folder made by `zero data prepare`")
    parser.add_argument("--python", type=Path, default=CACHE / "peers/bin/python", help="that of setup.sh")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    options = parser.parse_args()
    # ZeroRedundancyOptimizer has no fp32 master weights.
    offered = [mode for mode in PEERS if options.dtype == "fp32" or mode != "zero-redundancy"]
    options.modes = offered if options.modes is None else options.modes
    for mode in options.modes:
        if mode not in offered:
            parser.error(f"--modes: {mode} is not one of {', '.join(offered)} at {options.dtype}")
    if not set(options.stages) <= {"0", "1", "2", "3"}:
        parser.error("--stages: 0, 1, 2, 3, with commas between")
    if options.steps < WARM_UP + 2 or options.rounds < 1 or options.ranks < 1:
        parser.error(f"--steps is at least {WARM_UP + 2}, --rounds and --ranks at least 1")
    for path, remedy in ((options.zero, "make build"), (options.data / "train.bin", "make demo"),
                         (options.python, "benchmarks/peers/setup.sh")):
        if not path.exists():
            parser.error(f"{path} is missing; run: {remedy}")
    check_allocator(parser, options)
    return options


def compare(options: argparse.Namespace, work: Path) -> int:
    comparison = Comparison(options, work)
    comparison.make_weights()
    ours = [f"zero stage {stage}" for stage in options.stages]
    names = [OURS_ALONE] if "independent" in options.modes else []
    names += ours + options.modes
    before = machine()
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            runs[name].append(comparison.run(name, options.steps, measure_memory=False))
            print(f"round {number + 1}: {name}: {median(runs[name][-1].step_ms):.0f} ms", file=sys.stderr, flush=True)
    memory: dict[str, Run] = {}
    for name in names if options.memory_steps > 0 else []:
        memory[name] = comparison.run(name, options.memory_steps, measure_memory=True)
        print(f"memory: {name}: {memory[name].peak_together / options.ranks / (1 << 20):.0f} MiB a rank", file=sys.stderr, flush=True)

    together = runs[ours[0]][0].losses if ours else []
    rows = []
    for name in names:
        alone = name in (OURS_ALONE, "independent")
        reference = runs[OURS_ALONE][0].losses if alone else together or runs[name][0].losses
        rows.append(summarize(name, runs[name], runs.get(PEERS.get(name, "")), memory.get(name), reference, options))
    print_table(rows, options)
    if options.json:
        options.json.write_text(json.dumps({
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "machine": before,
            "table": rows,
            "runs": {name: [vars(run) for run in several] for name, several in runs.items()},
            "memory": {name: vars(run) for name, run in memory.items()},
        }, indent=1) + "\n")
    tolerance = TOLERANCE[options.dtype]
    apart = [row for row in rows if not row["loss_worst"] <= tolerance]
    for row in apart:
        print(f"LOSSES DISAGREE: {row['run']} is {row['loss_worst']:.1e} from ours, more than {tolerance:.0e}", file=sys.stderr)
    if not apart:
        print(f"\nEvery loss of every step is within {tolerance:.0e} of ours (relative; at most {max(row['loss_worst'] for row in rows):.1e}).")
    return 1 if apart else 0


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the trainers on the way out
    # In memory where that is possible: half a gigabyte of weights written to a disk would slow down the run that follows.
    memory_disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="zero-peers-", dir=memory_disk if os.access(memory_disk, os.W_OK) else None) as work:
        return compare(options, Path(work))


if __name__ == "__main__":
    sys.exit(main())
