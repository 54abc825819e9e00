"""The ranks that this process is one of."""

from __future__ import annotations

import atexit
import os
import sys

from . import _C

_made: _C.Group | None = None


def group(timeout: float | None = None) -> _C.Group:
    """This process's group of ranks, made at the first call: of all that `zero launch`, torchrun, mpirun or srun have
    started, or of this one alone. `timeout`, in seconds: a rank that keeps the others waiting for longer is reported
    by name (default: ten minutes). Collective at the first call.

    Installs libzero's allocator behind torch's CPU tensors."""
    global _made
    if _made is None:
        _C.install_host_allocator()
        _made = _C.init(timeout)
        atexit.register(_leave, _made, os.getpid())
    return _made


def _leave(group: _C.Group, process: int) -> None:
    # Where an exception ends the program, the other ranks may be waiting for it elsewhere, in torch.distributed for
    # example. So this rank says that it goes, and the ends of its engines wait for nobody.
    # A forked child that ends so says nothing of its parent.
    if os.getpid() == process and getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1"):
        group.abandon("it left because of an exception")
