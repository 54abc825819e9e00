"""The ranks that this process is one of."""

from __future__ import annotations

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
    return _made
