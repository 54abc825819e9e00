#!/usr/bin/env python3
"""DeepSpeed itself loads what `zero ckpt export --to deepspeed` has written, and trains on with the losses of the run that was saved.

  PEERS_PYTHON benchmarks/peers/universal.py build/release/zero [--stages 1 2 3] [--ranks 1 2]

with the Python that setup.sh or scripts/deepspeed_environment.sh prints. tests/python/exports_in_peers.py runs it as a test.

A sample of DeepSpeed's own (tests/checkpoint/samples) is imported, exported, and loaded at stages 1 and 2 on 1 and 2 ranks; the next three
losses are compared bit for bit with those that DeepSpeed's run had. Stage 3 loads it too, but takes hyper-parameters of several groups from
its configuration, so only its first loss is the same."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).resolve().parents[2] / "tests/checkpoint/samples/ckpt-samples.tar.xz"
RANKS_SAVED, STEP, ROWS, LENGTH, TOKENS = 2, 3, 2, 4, 11


def model_of_the_samples() -> Any:
    """The names and sizes are those of the samples; their values come from the checkpoint, except for what no such folder has."""
    import torch
    from torch import nn

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(TOKENS, 6)
            self.norm = nn.LayerNorm(6)
            self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
            self.fc1, self.fc2 = nn.Linear(6, 7), nn.Linear(7, 6)
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(6, TOKENS, bias=False)
            self.head.weight = self.emb.weight
            self.register_buffer("mean", torch.linspace(-0.5, 0.5, 6))

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.emb(tokens)
            x = x + self.fc2(torch.tanh(self.fc1(self.norm(x)))) * self.scale
            x = x + self.frozen(x) + self.mean
            return nn.functional.cross_entropy(self.head(x).view(-1, TOKENS), targets.view(-1))

    return Tiny()


def batch(step: int, rank: int) -> tuple[Any, Any]:
    import torch

    k = torch.arange(ROWS * (LENGTH + 1)) + 13 * step + 29 * rank
    tokens = ((k * k + 3 * k + 5) % TOKENS).view(ROWS, LENGTH + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load(folder: str, stage: int, frozen: str) -> None:
    """What one rank of DeepSpeed does: it prints its losses, by the rank that had the batch."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = RANKS_SAVED // world
    model = model_of_the_samples()
    model.frozen.weight.data.copy_(load_file(frozen)["param.frozen.weight"])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.005},
    ]
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
        "zero_optimization": {"stage": stage},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 2, "warmup_min_lr": 0, "warmup_max_lr": [0.01, 0.005]},
        },
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.load_checkpoint(folder)
    losses: dict[int, list[float]] = {}
    for step in range(STEP, STEP + 3):
        for part in range(parts):
            loss = engine(*batch(step, rank + part * world))
            losses.setdefault(rank + part * world, []).append(loss.item())
            engine.backward(loss)
            engine.step()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, losses)
    if rank == 0:
        print("LOSSES", json.dumps({str(r): row for each in gathered for r, row in each.items()}), flush=True)
    os._exit(0)


def import_sample(zero: str, folder: Path) -> tuple[Path, list[Any]]:
    """Imports a sample of DeepSpeed as `folder/own`. Returns the sample's path and, by rank, what its run did next."""
    with tarfile.open(SAMPLES) as tar:
        tar.extractall(folder, filter="data")
    sample = folder / "ckpt-samples/ds/z2-fp32"
    subprocess.run([zero, "ckpt", "import", sample, folder / "own"], check=True, stdout=subprocess.DEVNULL)
    return sample, json.loads(Path(f"{sample}.expected.json").read_text())["by_rank"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("zero", type=os.path.abspath)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    zero, failed = given.zero, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample, expected = import_sample(zero, folder)
        wanted = {str(rank): [loss for (loss,) in each["next_losses"]] for rank, each in enumerate(expected)}
        export = [zero, "ckpt", "export", folder / "own", folder / "out", "--to", "deepspeed"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        environment = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        for stage in given.stages:
            for ranks in given.ranks:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, "--load"]
                run = subprocess.run([*command, folder / "out", str(stage), f"{sample}.expected.safetensors"],
                                     env=environment, capture_output=True, text=True)  # fmt: skip
                lines = [line for line in run.stdout.splitlines() if line.startswith("LOSSES")]
                losses = json.loads(lines[0][7:]) if lines else {}
                count = 1 if stage == 3 else 3
                same = bool(losses) and all(losses[rank][:count] == wanted[rank][:count] for rank in wanted)
                print(f"stage {stage}, {ranks} ranks: {'the same ' + str(count) + ' losses' if same else 'DIFFERENT: ' + str(losses) + run.stderr[-500:]}")
                failed += not same
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        load(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    sys.exit(main())
