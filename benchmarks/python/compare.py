#!/usr/bin/env python3
"""libzero from Python beside FSDP2, DeepSpeed and plain PyTorch, and beside the C++ trainer: GPT-2 of transformers.

    benchmarks/python/compare.py                       GPT-2 124 M, fp32, micro-batch 1, sequence 256, 2 ranks: all
    benchmarks/python/compare.py --dtype bf16 --modes libzero2,libzero3,fsdp2-stage2,fsdp2-stage3,deepspeed2,deepspeed3
    benchmarks/python/compare.py --model tiny --seq 32 --rounds 1        whether everything runs

All modes train the same model (transformers' own code) from the same weights on the same tokens with the same AdamW, one thread a
rank. Each round runs all of them in turn; ratios are taken within a round. Memory is measured in runs of its own. `zero bench
step`, the engine with libzero's own model in C++, runs in the same rounds: what it is faster by is the cost of Python and of
transformers' model code together. Exit status 1 where losses disagree.

Needs the release build, the Python package (`make python`), and
an environment with torch, transformers and, for its modes, DeepSpeed: benchmarks/python/setup.sh. Any python3 runs this file.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.dont_write_bytecode = True  # no __pycache__ in the checkout
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))

import compare as peers  # noqa: E402  benchmarks/peers/compare.py: starting, watching, ratios

ROOT = HERE.parent.parent
PLAIN = "plain"
CPP = "C++ "  # and a run of `zero bench step`
# Mode -> the run of ours that does the same work.
PARTNERS = {
    "deepspeed1": "libzero1", "fsdp2-stage2": "libzero2", "deepspeed2": "libzero2", "fsdp2-stage3": "libzero3", "deepspeed3": "libzero3",
    **{f"{CPP}stage {stage}": f"libzero{stage}" for stage in range(4)}, f"{CPP}independent": PLAIN,
}
MODES = [PLAIN, "libzero0", "libzero1", "libzero2", "libzero3", "fsdp2-stage2", "fsdp2-stage3", "deepspeed1", "deepspeed2", "deepspeed3"]


class Comparison(peers.Comparison):
    """Starts rank.py in place of the other's trainers; watching is the same."""

    def jobs(self, name: str, steps: int) -> list[peers.Job]:
        o = self.options
        alone = name == PLAIN
        ranks = 1 if alone else o.ranks
        jobs = []
        for copy in range(o.ranks if alone else 1):
            out = self.work / f"run{copy}"
            shutil.rmtree(out, ignore_errors=True)
            # libzero has an allocator of its own; the others get the better one.
            chosen = self.environment if name.startswith("libzero") else self.peer_environment
            environment = {**chosen, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(peers.free_port()),
                           "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            environment["PYTHONPATH"] = str(o.package)
            command = [o.python, HERE / "rank.py", "--mode", name, "--out", out, "--model", o.model, "--dtype", o.dtype,
                       "--micro-batch", o.micro_batch, "--seq", o.seq, "--steps", steps, "--seed", o.seed]
            processes = [self.start(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, out, rank)
                         for rank in range(ranks)]
            jobs.append(peers.Job(processes, out / "log.jsonl", ranks))
        self.last_log = jobs[0].log
        return jobs

    def ledger(self, name: str) -> int:
        """The sum of the peaks of all categories of libzero's ledger, which is at least the peak of the sum: a short run of its own."""
        jobs = self.jobs(name, 3)
        for process in jobs[0].processes:
            if process.wait() != 0:
                raise SystemExit(f"{name} failed:\n{self.output(jobs[0].log.parent)}")
        peak = next(line["peak"] for line in jobs[0].lines() if line.get("event") == "ledger")
        return sum(peak.values())

    def cpp(self) -> dict[str, peers.Run]:
        """A round of `zero bench step`."""
        o = self.options
        file = self.work / "bench.json"
        command = [o.zero, "bench", "step", "--model", "gpt2", "--dtype", o.dtype,
                   "--micro-batch", o.micro_batch, "--seq", o.seq, "--nproc", o.ranks, "--threads", 1, "--rounds", 1,
                   "--steps", max(2, o.steps - peers.WARM_UP), "--warmup", peers.WARM_UP, "--json", file]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=self.environment)
        rows = json.loads(file.read_text())["results"]
        return {CPP + row["run"]: peers.Run(step_ms=[row["step_ms"]["median"]], cpu_seconds_per_step=row["cpu_seconds_per_step"]["median"],
                                           peak_together=row["memory"]["total_peak"] * o.ranks) for row in rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "tiny"), default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--dtype", choices=peers.TOLERANCE, default="fp32")
    parser.add_argument("--steps", type=int, default=8, help=f"of a run; the first {peers.WARM_UP} are not timed [8]")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each [5]")
    parser.add_argument("--memory-steps", type=int, default=3, help="of the run that measures memory; 0: none [3]")
    parser.add_argument("--modes", type=peers.words, default=MODES, help="with commas between [all]: " + ", ".join(MODES))
    parser.add_argument("--no-cpp", action="store_true", help="without `zero bench step`, which runs beside gpt2 alone")
    parser.add_argument("--allocator", choices=("tcmalloc", "glibc"), default="tcmalloc", help="of the others [tcmalloc]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--zero", type=Path, default=ROOT / "build/release/zero", help="the program [build/release/zero]")
    parser.add_argument("--package", type=Path, default=ROOT / "build/release/python", help="folder with the package libzero [build/release/python]")
    parser.add_argument("--python", type=Path, default=peers.CACHE / "peers/bin/python", help="that of setup.sh")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    options = parser.parse_args()
    options.no_cpp |= options.model != "gpt2"
    unknown = [mode for mode in options.modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes: {', '.join(unknown)}: not among {', '.join(MODES)}")
    if options.steps < peers.WARM_UP + 2 or options.rounds < 1:
        parser.error(f"--steps is at least {peers.WARM_UP + 2}, --rounds at least 1")
    for path, remedy in ((options.python, "benchmarks/python/setup.sh"), (options.zero, "make build"), (options.package, "make python")):
        if not path.exists():
            parser.error(f"{path} is missing; run: {remedy}")
    peers.check_allocator(parser, options)
    return options


def print_table(rows: list[dict], options: argparse.Namespace) -> None:
    print(f"\n{options.model} of transformers, {options.dtype}, sequence {options.seq}, micro-batch {options.micro_batch}, {options.ranks} ranks "
          f"of one thread; {options.rounds} rounds of {options.steps} steps, {options.allocator} for the others\n")
    print("| run | tokens/s | ms a step | libzero / it (min to max) | CPU s a step | peak MiB a rank | ledger MiB | loss, first and last step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        losses = f"{row['losses'][0]:.5f}, {row['losses'][-1]:.5f}" if row["losses"] else "-"
        print(f"| {row['run']} | {row['tokens_per_s']:.1f} | {row['step_ms']:.0f} | {peers.ratio_text(row)} | "
              f"{row['cpu_seconds_per_step']:.2f} | {peers.mib_text(row, 'peak_mib')} | {peers.mib_text(row, 'ledger_mib')} | {losses} |")


def compare(options: argparse.Namespace, work: Path) -> int:
    comparison = Comparison(options, work)
    before = peers.machine()
    runs: dict[str, list[peers.Run]] = {name: [] for name in options.modes}
    for number in range(options.rounds):
        for name in options.modes:
            runs[name].append(comparison.run(name, options.steps, measure_memory=False))
            print(f"round {number + 1}: {name}: {median(runs[name][-1].step_ms):.0f} ms", file=sys.stderr, flush=True)
        for name, run in ({} if options.no_cpp else comparison.cpp()).items():
            runs.setdefault(name, []).append(run)
            print(f"round {number + 1}: {name}: {median(run.step_ms):.0f} ms", file=sys.stderr, flush=True)
    memory: dict[str, peers.Run] = {}
    ledgers: dict[str, int] = {}
    for name in options.modes if options.memory_steps > 0 else []:
        memory[name] = comparison.run(name, options.memory_steps, measure_memory=True)
        if name.startswith("libzero"):
            ledgers[name] = comparison.ledger(name)
        print(f"memory: {name}: {memory[name].peak_together / options.ranks / (1 << 20):.0f} MiB a rank", file=sys.stderr, flush=True)

    rows = []
    for name in runs:
        row = peers.speed(name, runs[name], runs.get(PARTNERS.get(name, "")), options) | {"losses": runs[name][0].losses}
        if name in memory:
            row["peak_mib"] = memory[name].peak_together / options.ranks / (1 << 20)
        if name in ledgers:
            row["ledger_mib"] = ledgers[name] / (1 << 20)
        elif name.startswith(CPP):
            row["ledger_mib"] = runs[name][0].peak_together / options.ranks / (1 << 20)
        rows.append(row)
    print(f"{before['cpu']}, {before['cores']} cores, load {before['load']:.1f} at the start")
    print_table(rows, options)
    if options.json:
        options.json.write_text(json.dumps({
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "machine": before,
            "table": rows,
            "runs": {name: [vars(run) for run in several] for name, several in runs.items()},
            "memory": {name: vars(run) for name, run in memory.items()},
        }, indent=1) + "\n")
    together = {name: several[0].losses for name, several in runs.items() if name != PLAIN and not name.startswith(CPP)}
    if len(together) < 2:
        return 0
    reference_name = next((name for name in together if name.startswith("libzero")), next(iter(together)))
    apart = {
        name: max(peers.relative_difference(a, b) for run in runs[name] for a, b in zip(together[reference_name], run.losses, strict=True))
        for name in together
    }
    tolerance = peers.TOLERANCE[options.dtype]
    for name, worst in apart.items():
        if not worst <= tolerance:
            print(f"LOSSES DISAGREE: {name} is {worst:.1e} from {reference_name}, more than {tolerance:.0e}", file=sys.stderr)
    exact = [name for name in together if name.startswith("libzero")]
    if any(run.losses != together[exact[0]] for name in exact for run in runs[name]):
        print(f"LOSSES DISAGREE: those of {', '.join(exact)} are not the same bits", file=sys.stderr)
        return 1
    print(f"\nlibzero's stages have the same losses, bit for bit; the others are within {max(apart.values()):.1e} of them (relative).")
    return 0 if all(worst <= tolerance for worst in apart.values()) else 1


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the trainers on the way out
    memory_disk = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="zero-python-", dir=memory_disk if os.access(memory_disk, os.W_OK) else None) as work:
        return compare(options, Path(work))


if __name__ == "__main__":
    sys.exit(main())
