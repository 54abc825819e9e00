"""Models that are larger than memory, and recomputation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from . import _C


def init(folder: str | os.PathLike[str] | None = None) -> _C.BuildOnDisk:
    """`with libzero.init(folder): model = ...`: large tensors that are made inside, by constructors or from_pretrained,
    lie in a file in `folder` (a local disk; default: the system's folder for temporary files) until `shard` takes
    them over, so that no model is whole in memory. The file has no name and goes with the last of them.

    Installs libzero's allocator behind torch's CPU tensors."""
    _C.install_host_allocator()
    return _C.BuildOnDisk(os.fspath(folder) if folder is not None else tempfile.gettempdir())


def checkpoint(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Runs `function`, keeps its inputs alone, and runs it again in backward: torch.utils.checkpoint's form that is
    not reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **keywords)
