"""A rank whose program ends by an exception ends the job, whatever the others wait in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import support

WAITS = "LIBZERO_TEST_WAITS"  # in what the other ranks wait; set where this process is a rank
LIMIT_S = 60


def rank() -> None:
    import torch
    import torch.distributed as dist

    import libzero

    group = libzero.group()
    waits: dict[str, Any] = {"torch.distributed": dist.barrier, "libzero": group.barrier}
    if os.environ[WAITS] == "torch.distributed":
        dist.init_process_group("gloo")
    model = torch.nn.Linear(16, 16)
    opt = libzero.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    for step in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        opt.step()
        if step == 1 and group.rank == 1:
            raise ValueError("a bad batch")
        if step == 1:
            print("rank 0 waits", flush=True)
        waits[os.environ[WAITS]]()


def main() -> None:
    if WAITS in os.environ:
        rank()
        return
    support.need("torch")
    for waits in ("torch.distributed", "libzero"):
        begin = time.monotonic()
        done = subprocess.run(
            support.command(2, [__file__]), env={**support.environment(), WAITS: waits}, timeout=LIMIT_S,
            capture_output=True, text=True,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode != 0 and "ValueError: a bad batch" in output, output
        assert "rank 1" in output and "terminate called" not in output, output
        if waits == "libzero":
            assert "CommError" in output and "left because of an exception" in output, output
        print(f"the others wait in {waits}: ended after {time.monotonic() - begin:.1f} s", flush=True)
    print("test_failures: passed")


if __name__ == "__main__":
    main()
