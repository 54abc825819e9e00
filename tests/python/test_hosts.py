"""Several hosts: 2 of 2 ranks, over loopback, have the bits of 4 ranks of one host that adds in the same order."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import support

OUT = "LIBZERO_TEST_OUT"  # set where this process is a rank
STEPS = 4


def train(out: Path) -> None:
    """Losses, and rank 0's final weights, of stages 0 and 3: a file a rank."""
    import torch

    import libzero

    group = libzero.group()
    assert group.size == 4
    lines = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage)
        generator = torch.Generator().manual_seed(group.rank)
        for _ in range(STEPS):
            x = torch.randn(8, 24, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            lines.append(loss.item().hex())
        weights = opt.full_state_dict()  # of rank 0
        lines += [str(value.view(torch.int32).sum().item()) for value in weights.values()]
        opt.close()
    half = len(lines) // 2
    assert lines[:half] == lines[half:], f"stages 0 and 3 differ: {lines}"
    (out / str(group.rank)).write_text("\n".join(lines))


def results(command: list[str], environment: dict[str, str]) -> list[str] | None:
    """What the ranks of a launcher write; None where this machine lacks the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        status = subprocess.run(command, env={**support.environment(), OUT: folder, **environment}, timeout=300).returncode
        if status == 77:
            return None
        assert status == 0, f"{command} ended with status {status}"
        return [(Path(folder) / str(rank)).read_text() for rank in range(4)]


def main() -> None:
    if OUT in os.environ:
        train(Path(os.environ[OUT]))
        return
    support.need("torch")
    one_host = results(support.command(4, [__file__]), {"ZERO_SUM_BLOCK": "2"})
    hosts = Path(__file__).parents[1] / "hosts/hosts.py"
    compared = 0
    for launcher in ("launch", "torchrun"):
        start = [sys.executable, str(hosts), "--hosts", "2", "--ranks", "2", "--loopback", "--launcher", launcher]
        start += ["--zero", support.program(), "--", sys.executable, __file__]
        got = results(start, {"ZERO_TEST_TORCH": sys.executable})
        if got is None:
            print(f"left out: {launcher}")
            continue
        assert got == one_host, (launcher, got, one_host)
        compared += 1
        print(f"{launcher}: 2 hosts of 2 ranks have the bits of one host", flush=True)
    if compared == 0:
        sys.exit(77)
    print("test_hosts: passed")


if __name__ == "__main__":
    main()
