"""ZeRO stages 0 to 3 for ordinary PyTorch loops.

    opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4), stage=3)
    loss.backward(); opt.step(); opt.zero_grad()

docs/python.md tells the rest."""

from . import _torch_release

_torch_release.check()  # first, and torch before the extension, which uses its libraries

from ._C import CheckpointError, CommError, ConfigError, Error, Group, NotFinite, OutOfMemory, StoreError
from ._build import checkpoint, init
from ._built import VERSION as __version__
from ._compile import backend
from ._group import group
from ._loss import linear_cross_entropy
from ._plan import Plan, plan
from ._quantize import quantize_frozen
from ._shard import Gathered, ShardedOptimizer, gathered, shard

__all__ = [
    "CheckpointError", "CommError", "ConfigError", "Error", "Gathered", "Group", "NotFinite", "OutOfMemory",
    "Plan", "ShardedOptimizer", "StoreError", "backend", "checkpoint", "gathered", "group", "init",
    "linear_cross_entropy", "plan", "quantize_frozen", "shard",
]  # fmt: skip
