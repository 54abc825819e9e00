"""Models that are larger than memory, and recomputation."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from . import _C


def init(
    folder: str | os.PathLike[str] | None = None, *, values: bool = True
) -> contextlib.AbstractContextManager[None]:
    """`with libzero.init(folder): model = ...`: large tensors that are made inside, by constructors or from_pretrained,
    lie in a file in `folder` (a local disk; default: the system's folder for temporary files) until `shard` takes
    them over, so that no model is whole in memory. The file has no name and goes with the last of them.

    `with libzero.init(values=False): model = ...`: parameters that constructors make inside have no values and take no
    memory (they are on the device meta; buffers are as always). `shard(..., weights=FOLDER)` reads them from files, each
    rank its own part.

    The first form installs libzero's allocator behind torch's CPU tensors."""
    if not values:
        if folder is not None:
            raise _C.ConfigError("libzero.init(values=False) takes no folder: nothing is written. Leave one of them out.")
        return _without_values()
    _C.install_host_allocator()
    return _C.BuildOnDisk(os.fspath(folder) if folder is not None else tempfile.gettempdir())


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    register = torch.nn.Module.register_parameter

    def without(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.to("meta"), parameter.requires_grad)  # type: ignore[call-arg]
        register(module, name, parameter)

    torch.nn.Module.register_parameter = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def expect_values(model: torch.nn.Module, weights: bool) -> None:
    """Makes CPU parameters of those on meta, which stay the same objects; they have no bytes until the engine reads them.
    Without weights such a parameter is an error."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            if not weights:
                raise _C.ConfigError(
                    f"Parameter '{name}' is on the device meta, where there are no values. Give libzero.shard the files "
                    "that have them (weights=FOLDER), or build the model outside libzero.init(values=False) and torch.device(\"meta\")."
                )
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(_C.absent(parameter), parameter.requires_grad))


def checkpoint(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Runs `function`, keeps its inputs alone, and runs it again in backward: torch.utils.checkpoint's form that is
    not reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **keywords)
