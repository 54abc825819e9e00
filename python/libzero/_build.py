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
    made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # with the original, whose id stays its own

    def without(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if id(parameter) not in made:
                made[id(parameter)] = (parameter, _like(parameter, parameter.to("meta")))
            parameter = made[id(parameter)][1]
        register(module, name, parameter)

    torch.nn.Module.register_parameter = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _like(parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.nn.Parameter:
    """Makes a parameter of these values that has the other's attributes."""
    made = torch.nn.Parameter(values, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def expect_values(model: torch.nn.Module, weights: str | None) -> list[torch.nn.Parameter]:
    """Makes CPU parameters of those on meta, which stay the same objects; they have no bytes until the engine reads them.
    Returns them. Throws where a model or `weights` cannot be used."""
    if weights is not None and not os.path.exists(weights):
        raise _C.CheckpointError(f"'{weights}' does not exist. Name a safetensors file, or a folder with weights.")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise _C.ConfigError(
                f"Buffer '{name}' is on the device meta, where there are no values. Build the model within "
                "libzero.init(values=False), which leaves buffers as they are, and not within torch.device(\"meta\")."
            )
    absent = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if absent and weights is None:
        raise _C.ConfigError(
            f"Parameter '{next(iter(absent))}' is on the device meta, where there are no values. Give libzero.shard the files "
            "that have them (weights=FOLDER), or build the model outside libzero.init(values=False) and torch.device(\"meta\")."
        )
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # weak references, with which a parameter cannot be changed
    for name, parameter in absent.items():
        try:
            torch.utils.swap_tensors(parameter, _like(parameter, _C.absent(parameter)))
        except RuntimeError as error:
            raise _C.ConfigError(
                f"Parameter '{name}' cannot get memory, since something else refers to it ({error}). Shard the model right "
                "after it was built."
            ) from None
    for module in recurrent:
        module._init_flat_weights()
    return list(absent.values())


def checkpoint(function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Runs `function`, keeps its inputs alone, and runs it again in backward: torch.utils.checkpoint's form that is
    not reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **keywords)
