"""Engines whose optimizer has gone.

Note [The end of an engine]
At stage 3 the end of an engine meets the other ranks. Python drops an object in a cycle of references (a Trainer is in
one) where its garbage collector happens to run, which is another place on each rank: a rank that waited there for the
others would wait for ever, since they wait for it elsewhere. So an engine outlives an optimizer that is dropped without
close(), until the next `shard`, where the ranks compare what each has dropped and end what all have."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from . import _C

_count = itertools.count()
_kept: dict[int, tuple[_C.Group, _C.Engine]] = {}  # the same keys on all ranks of a group
_gone: set[int] = set()


def keep(owner: Any, engine: _C.Engine, group: _C.Group) -> None:
    """`engine` lives on when `owner` goes, until `end_gone`."""
    if group.size == 1:
        return
    index = next(_count)
    _kept[index] = (group, engine)
    weakref.finalize(owner, _gone.add, index).atexit = False


def end_gone(group: _C.Group) -> None:
    """Ends the engines that every rank has dropped or closed. Collective."""
    kept = [index for index, (of, _) in _kept.items() if of is group]
    if not kept:
        return
    mine = torch.tensor([int(index in _gone or not _kept[index][1].open) for index in kept], device="cpu")
    on_all = group.all_gather_control(mine, "shard").view(group.size, len(kept)).all(0)
    for index, ended in zip(kept, on_all.tolist()):
        if ended:
            _kept.pop(index)[1].close()
            _gone.discard(index)
