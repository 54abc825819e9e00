#!/usr/bin/env python3
"""What a save costs the steps beside it, and what a lost rank costs: two launchers stand for two hosts, one rank each.

    benchmarks/restart.py build/release/zero TEXT [--model gpt2] [--folder DIR] [--in-memory] [OPTIONS OF zero train ...]

Trains with a save every 8 steps, kills the rank of the second host in a step without a save under way, and prints: the median step, the
step behind each save, how long each save held the run, its bytes a second, and the time from the kill to the end of the next step. The
checkpoint is dropped from the page cache before the kill with --cold. With --in-memory the saves are copies in the hosts' memory
(zero train --memory-copies), and nothing is on disk. With --fio, fio then writes as many bytes alone, to
compare."""
import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time

import fio

SAVE_EVERY = 8


def lines(log):
    try:
        return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    except FileNotFoundError:
        return []


def steps(log):
    return [line for line in lines(log) if "event" not in line and "loss" in line]


def saved(log):
    return [line for line in lines(log) if line.get("event") in ("save", "memory_copy") and "failure" not in line]


def wait_until(condition, launchers):
    while not condition():
        if any(launcher.poll() is not None for launcher in launchers):
            raise SystemExit("a launcher has ended")
        time.sleep(0.005)


def drop_from_cache(folder):
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--folder", help="where the run lies; else a temporary folder")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--fio", action="store_true")
    options, more = parser.parse_known_args()
    if options.fio:
        fio.require()
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    run, log = folder / "run", folder / "run/log.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = [options.program, "train", "--model", options.model, "--data", options.text, "--out", run, "--seq", "128", "--micro-batch", "1",
             "--steps", str(4 * SAVE_EVERY + 4), "--memory-copies" if options.in_memory else "--save-every", str(SAVE_EVERY), "--dtype", "bf16", "--stage", "2", "--threads", "1",
             "--eval-tokens", "0", "--sample-tokens", "0", *more]
    launch = [options.program, "launch", "-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port),
              "--max-restarts", "3", "--node-rank"]
    output = open(folder / "output.txt", "w")
    launchers = [subprocess.Popen([*map(str, launch), str(k), "--", *map(str, train)], stdout=output, stderr=output,
                                  env=dict(os.environ, OMP_NUM_THREADS="1", **({"ZERO_HOST": f"host{k}"} if options.in_memory else {}))) for k in range(2)]
    try:
        wait_until(lambda: len(steps(log)) > SAVE_EVERY and saved(log), launchers)
        if options.cold:
            drop_from_cache(run)
        seen = len(steps(log))
        wait_until(lambda: len(steps(log)) > seen, launchers)
        begin, seen = time.monotonic(), len(steps(log))
        rank = int(pathlib.Path(f"/proc/{launchers[1].pid}/task/{launchers[1].pid}/children").read_text().split()[0])
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: len(steps(log)) < seen, launchers)
        seen = len(steps(log))
        wait_until(lambda: len(steps(log)) > seen, launchers)
        restart = time.monotonic() - begin
        for launcher in launchers:
            launcher.wait()
        ms = {line["step"]: line["step_ms"] for line in steps(log)}
        plain = statistics.median(value for step, value in ms.items() if step % SAVE_EVERY not in (0, 1, 2))
        print(f"median step: {plain:.0f} ms")
        for save in [each for each in saved(log) if each["step"] + 2 in ms]:
            behind = [ms[save["step"] + k] - plain for k in (1, 2)]
            print(f"save of step {save['step']}: held {save['held_ms']:.0f} ms ({save['held_ms'] / plain:.1%} of a step), "
                  f"{save['bytes'] / 1e9:.2f} GB in {save['seconds']:.2f} s, the next two steps {behind[0]:+.0f} and {behind[1]:+.0f} ms")
        print(f"from the kill to the end of the next step: {restart:.2f} s")
        if options.fio:
            size = saved(log)[0]["bytes"]
            ours = statistics.median(save["bytes"] / save["seconds"] for save in saved(log)[:-1]) / 1e9
            alone = fio.gb_per_s(str(folder / "fio"), "write", size=size >> 22 << 22, block=4 << 20, depth=4)
            print(f"a save writes {ours:.2f} GB/s beside training, fio alone {alone:.2f} GB/s: {ours / alone:.2f}")
    finally:
        for launcher in launchers:
            launcher.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
