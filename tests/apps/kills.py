#!/usr/bin/env python3
"""Kills ranks, hosts and launchers of training runs at random moments, and checks that nothing is lost.

    kills.py ZERO_PROGRAM [--kills N] [--seconds S] [--seed SEED]

A run trains a tiny GPT-2 with dropout under `zero launch --max-restarts`, in one or two launchers that stand for hosts, and saves every few
steps, some runs also in the hosts' memory. Meanwhile one rank, all ranks, or a launcher with its ranks gets SIGKILL: in a step, in a save, while a checkpoint is loaded, or during a
restart, as chance has it. A launcher that was killed is started again, as a batch system does. In the end each run must have the weights of
one that was never interrupted, and after each kill every checkpoint whose folder is there must be sound. The first line prints the seed.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

STEPS, SAVE_EVERY = 40, 3
MODEL = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256, "embd_pdrop": 0.1,
         "attn_pdrop": 0.1, "resid_pdrop": 0.1}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def descendants(pid):
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Job:
    """The launchers of one run: one, or two that stand for hosts."""

    def __init__(self, program, folder, hosts, ranks, options):
        self.folder, self.hosts = folder, hosts
        self.log = open(folder / "output.txt", "a")
        train = [program, "train", "--model", str(folder.parent / "tiny.json"), "--data", str(folder.parent / "text.txt"), "--out",
                 str(folder / "run"), "--seq", "32", "--micro-batch", "2", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY),
                 "--eval-tokens", "0", "--sample-tokens", "0", "--threads", "1", *options]
        launch = [program, "launch", "-n", str(ranks), "--max-restarts", "1000", "--logs", "prefix"]
        port = free_port()
        # With all ranks the restart waits for a host that was killed, so that the bits are those of the whole run.
        self.commands = [launch + (["--nnodes", str(hosts), "--node-rank", str(k), "--master-addr", "127.0.0.1", "--master-port",
                                    str(port), "--rejoin", "60"] if hosts > 1 else []) + ["--", *train] for k in range(hosts)]
        self.launchers = [None] * hosts
        self.restarted = set()
        self.over = None  # when node 0's launcher had ended
        for k in range(hosts):
            self.start(k, restarted=False)

    def start(self, k, restarted):
        if restarted:
            self.restarted.add(k)
        environment = dict(os.environ, OMP_NUM_THREADS="1", SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1" if restarted else "0",
                           ZERO_HOST=f"host{k}")
        self.launchers[k] = subprocess.Popen(self.commands[k], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment)

    def came_too_late(self):
        """Ends a launcher that was killed at its exit and started again when node 0's was over: a batch system has ended the job by then, and
        it would wait five minutes for node 0."""
        if self.hosts == 1 or self.launchers[0].poll() != 0:
            self.over = None
            return
        self.over = self.over or time.monotonic()
        for k in self.restarted - {0}:
            launcher = self.launchers[k]
            if time.monotonic() > self.over + 10 and launcher.poll() is None and not descendants(launcher.pid):
                launcher.kill()
                launcher.wait()
                launcher.returncode = 0

    def running(self):
        self.came_too_late()
        return any(launcher.poll() is None for launcher in self.launchers)

    def kill(self, random_):
        """Kills somebody, and says whom."""
        k = random_.randrange(self.hosts)
        launcher = self.launchers[k]
        ranks = descendants(launcher.pid)
        victim = random_.choice(["rank", "rank", "ranks", "launcher"] if k == 0 or self.hosts == 1 else ["rank", "launcher"])
        if victim == "launcher":
            if self.hosts > 1 and k == 0:  # hosts the store: the job dies with it
                for other in self.launchers:
                    other.kill()
                    other.wait()
                for host in range(self.hosts):
                    self.start(host, restarted=True)
            else:
                launcher.kill()
                launcher.wait()
                self.start(k, restarted=True)
        for pid in ranks if victim == "ranks" else random_.sample(ranks, min(1, len(ranks))) if victim == "rank" else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return victim if self.hosts == 1 else f"{victim} of host {k}"

    def end(self):
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        self.log.close()


def unsound(program, run):
    """Returns what `zero ckpt verify` says of a checkpoint that is there and not sound."""
    for folder in sorted(run.glob("checkpoint-*")):
        if folder.suffix or not (folder / "manifest.json").exists():
            continue
        checked = subprocess.run([program, "ckpt", "verify", str(folder)], capture_output=True, text=True)
        # A newer save may have removed it meanwhile.
        if checked.returncode != 0 and (folder / "manifest.json").exists():
            return checked.stderr
    return None


def last_step(run):
    steps = [int(folder.name.split("-")[1]) for folder in run.glob("checkpoint-*") if not folder.suffix]
    return max(steps, default=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--verbose", action="store_true", help="print each run")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    random_ = random.Random(arguments.seed)
    deadline = time.monotonic() + arguments.seconds
    whole, kills, runs, counts = {}, 0, 0, {}
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        (root / "tiny.json").write_text(json.dumps(MODEL))
        (root / "text.txt").write_text("".join(f"line {i % 97}: the quick brown fox jumps over the lazy dog\n" for i in range(900)))
        while kills < arguments.kills and time.monotonic() < deadline:
            hosts, ranks = random_.choice([(1, 1), (1, 2), (1, 2), (1, 3), (2, 1)])
            options = ["--stage", str(random_.randrange(4)), "--dtype", random_.choice(["fp32", "bf16"]), "--accumulate",
                       random_.choice(["1", "2"]), "--memory-copies", random_.choice(["0", "1", "5"]), "--save-staging", random_.choice(["0", "16KB", "256MB"])]
            key = (hosts, ranks, *options[:6])
            if key not in whole:
                folder = root / f"whole{len(whole)}"
                folder.mkdir()
                job = Job(arguments.program, folder, hosts, ranks, options)
                codes = [launcher.wait() for launcher in job.launchers]
                job.log.close()
                if any(codes):
                    print((folder / "output.txt").read_text()[-4000:])
                    return 1
                whole[key] = (folder / "run/model.safetensors").read_bytes()
            folder = root / f"run{runs}"
            folder.mkdir()
            job = Job(arguments.program, folder, hosts, ranks, options)
            wanted = random_.randrange(1, 6)
            killed, failure, patience = [], None, time.monotonic() + 240
            while job.running() and failure is None:
                if time.monotonic() > patience:
                    failure = "it has not ended within 4 minutes"
                elif len(killed) < wanted:
                    pause = time.monotonic() + random_.choice([0.05, 0.6, 1.5]) * random_.random()
                    while time.monotonic() < pause and job.running():
                        time.sleep(0.005)
                    if job.running():
                        killed.append(job.kill(random_))
                        failure = unsound(arguments.program, folder / "run")
                else:
                    time.sleep(0.02)
            if failure is None and any(launcher.wait() for launcher in job.launchers):
                failure = "a launcher has ended with an error"
            if failure is None and (folder / "run/model.safetensors").read_bytes() != whole[key]:
                failure = "the weights are not those of the run that was never interrupted"
            job.end()
            runs += 1
            kills += len(killed)
            if arguments.verbose:
                print(f"{hosts} x {ranks} ranks, {' '.join(options)}: {', '.join(killed)}", flush=True)
            for victim in killed:
                counts[victim] = counts.get(victim, 0) + 1
            if failure:
                print((folder / "output.txt").read_text()[-6000:])
                print(f"run {runs} ({hosts} x {ranks} ranks, {' '.join(options)}), killed {', '.join(killed)}, at checkpoint "
                      f"{last_step(folder / 'run')}: {failure}")
                return 1
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    print(f"{kills} kills in {runs} runs: {', '.join(f'{count} {victim}' for victim, count in sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
