"""ZeRO-1 around any torch optimizer (1910.02054, section 5.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _C
from ._C import ConfigError

if TYPE_CHECKING:
    from ._shard import ShardedOptimizer


class PartitionedUpdates:
    """Each rank updates the parameters that it owns, with the mean gradients, and sends them to all."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: _C.Group) -> None:
        raise ConfigError(
            f"libzero has no {type(optimizer).__name__} of its own yet; it has AdamW, Adam, SGD and Adagrad."
        )


def check_groups(sharded: ShardedOptimizer, state_dict: dict[str, Any]) -> None:
    """Throws ConfigError unless the state dict is of as many parameters in the same groups."""
    mine = [len(group["params"]) for group in sharded.param_groups]
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise ConfigError(f"The state dict has groups of {theirs} parameters; this optimizer has {mine}.")
