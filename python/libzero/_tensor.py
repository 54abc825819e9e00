"""What torch's own functions do with a sharded parameter, where that would be wrong in silence.

Nothing of torch is changed before the first `shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _C
from ._C import Error

if TYPE_CHECKING:
    from ._shard import ShardedOptimizer

_installed = False


def install() -> None:
    """Changes the methods of torch.Tensor that a sharded parameter needs otherwise; once."""
    global _installed
    if _installed:
        return
    _installed = True
    for name in ("__repr__", "tolist", "numpy", "__array__", "__reduce_ex__"):
        setattr(torch.Tensor, name, _copying(getattr(torch.Tensor, name)))


def _copying(method: Any) -> Any:
    # These reach for the memory without an operator: they get a copy.
    def wrapped(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if _C.is_sharded(self) and not _C.is_gathered(self):
            with torch.no_grad():
                copy = self.detach().clone()
            self = torch.nn.Parameter(copy, self.requires_grad) if type(self) is torch.nn.Parameter else copy
        return method(self, *arguments, **keywords)

    return wrapped


def guard(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
    """`optimizer`, from which `sharded` was made, says so where it is stepped."""

    def refuse(*_: Any) -> None:
        raise Error(
            "This torch optimizer was given to libzero.shard and has no gradients any more. Call step() of what "
            "libzero.shard returned."
        )

    optimizer.register_step_pre_hook(refuse)
