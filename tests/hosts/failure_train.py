#!/usr/bin/env python3
"""Random failures of `zero train` on virtual hosts: every survivor must end, and say the same.

  tests/hosts/failure_train.py PROGRAM [--cases 100] [--seed 1] [--together 1]

Hosts are ranks that are told different host names (ZERO_HOST), over the loopback interface. A case is two or three
hosts of one or two ranks that train a small model and save it every few steps, and one rank that is killed, stopped
or whose whole host is, at a random moment of start-up, forward, backward, step or save.
"""
import argparse
import collections
import contextlib
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

LIMIT = 60  # seconds until a survivor counts as hanging
MODEL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 64, "vocab_size": 256,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    def __init__(self, program, folder, hosts, ranks, stage, agent_store=False):
        self.folder, self.hosts, self.ranks = folder, hosts, ranks
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n"
                                             for i in range(900)))
        port = free_port()
        self.processes = []
        for rank in range(hosts * ranks):
            variables = {"RANK": rank, "WORLD_SIZE": hosts * ranks, "LOCAL_RANK": rank % ranks,
                         "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                         "ZERO_HOST": self.host(rank), "OMP_NUM_THREADS": 1}
            words = [program, "train", "--model", folder / "model.json", "--data", folder / "text", "--out",
                     folder / "out", "--seq", 32, "--micro-batch", 4, "--steps", 100000, "--warmup", 0, "--threads", 1,
                     "--stage", stage, "--save-every", 5, "--eval-every", 0, "--schedule", "constant"]
            with open(folder / f"log.{rank}", "wb") as log:
                self.processes.append(subprocess.Popen(
                    [str(word) for word in words], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}}))

    def host(self, rank):
        return "abc"[rank // self.ranks]

    def log(self, rank):
        return (self.folder / f"log.{rank}").read_text(errors="replace")

    def watched(self):
        """Whether all ranks have signed in. Before that a rank that is not there is named when the time is up alone."""
        def has_watch(process):
            for name in pathlib.Path(f"/proc/{process.pid}/task").glob("*/comm"):
                with contextlib.suppress(OSError):
                    if name.read_text() == "zero watch\n":
                        return True
            return False
        return all(has_watch(process) for process in self.processes)

    def steps(self):
        try:
            return (self.folder / "out" / "log.jsonl").read_text().count("\n")
        except OSError:
            return 0

    def verdict(self, rank):
        lines = [line for line in self.log(rank).splitlines() if "error: " in line]
        return lines[-1].split("error: ", 1)[1] if lines else "no error: " + self.log(rank)[-300:]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def run_case(program, seed, start):
    choose = random.Random(seed)
    hosts, ranks, stage = choose.choice([2, 3]), choose.choice([1, 2]), choose.choice([0, 1, 2, 3])
    size = hosts * ranks
    kind = choose.choice(["kill", "kill", "kill", "stop", "stop host", "two"])
    victim = choose.randrange(size)
    at_start = choose.random() < start
    with tempfile.TemporaryDirectory(prefix="zero-failure-") as folder:
        job = Job(program, pathlib.Path(folder), hosts, ranks, stage)
        try:
            end = time.monotonic() + LIMIT
            while not (job.watched() if at_start else job.steps() >= 3) and time.monotonic() < end:
                time.sleep(0.005 if at_start else 0.05)
            time.sleep(choose.uniform(0, 0.5 if at_start else 2))
            ended = [rank for rank in range(size) if job.processes[rank].poll() is not None]
            if ended:
                return False, f"seed {seed}: rank {ended[0]} ended early: {job.verdict(ended[0])}"
            lost = {victim}
            if kind == "stop host":
                lost = {rank for rank in range(size) if job.host(rank) == job.host(victim)}
            elif kind == "two":
                lost.add(choose.randrange(size))
            since = time.monotonic()
            for rank in lost:
                job.processes[rank].send_signal(signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL)
            times, said = {}, collections.defaultdict(list)
            for rank in set(range(size)) - lost:
                while job.processes[rank].poll() is None and time.monotonic() - since < LIMIT:
                    time.sleep(0.01)
                times[rank] = time.monotonic() - since
                said[job.verdict(rank)].append(rank)
                if job.processes[rank].poll() is None:
                    said[f"HANGS {job.verdict(rank)}"].append(rank)
            what = f"{hosts} x {ranks}, stage {stage}, {kind} {sorted(lost)}{' at start' if at_start else ''}"
            # What each adds to the verdict, what it was doing, is its own.
            verdicts = {re.split(r"; rank \d+ was|\. Rank \d+ was", text)[0].rstrip(".") for text in said}
            named = all(any(re.search(rf"[Rr]anks? (\d+-)?{rank}\b|[Hh]osts? .*\b{job.host(rank)}\b", text)
                            for rank in lost) for text in said)
            good = len(verdicts) <= 1 and named and not any(text.startswith(("HANGS", "no error")) for text in said)
            slowest = f"{max(times.values()):6.2f} s" if times else "nobody is left"
            text = f"{'ok' if good else 'FAILED'} seed {seed}: {slowest}: {what}"
            for message, by in said.items():
                text += f"\n      {sorted(by)}: {message[:400]}"
            return good, text
        finally:
            job.close()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("program")
    options.add_argument("--cases", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--together", type=int, default=1)
    options.add_argument("--start", type=float, default=0.2, help="how many of the cases are during start-up")
    chosen = options.parse_args()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(chosen.together) as pool:
        for good, text in pool.map(lambda seed: run_case(chosen.program, seed, chosen.start),
                                   range(chosen.seed, chosen.seed + chosen.cases)):
            failed += not good
            print(text, flush=True)
    print(f"{chosen.cases - failed} of {chosen.cases} cases are as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
