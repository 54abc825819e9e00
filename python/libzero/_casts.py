"""Casts at modules: a model's inputs, modules that stay in fp32, and what a program can do about other dtypes.

The hooks are functions of this file with their dtype, so that a model can still be copied and pickled."""

from __future__ import annotations

import fnmatch
import functools
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map

# What torch says of operands of two dtypes.
_WORDS = ("same dtype", "expected scalar type", "should be the same", "to have the same dtype", "must match")


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    """What a configuration makes of parameters in fp32."""
    return next(
        (dtype for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if settings[key]["enabled"]),
        torch.float32,
    )


def install(model: torch.nn.Module, settings: dict[str, Any], inputs: bool) -> list[Any]:
    """Hooks for a sharded model: casts its inputs in floating point where `inputs` says so, and those of
    `fp32_modules` there and back. Returns their handles."""
    dtype, handles = dtype_of(settings), []
    if inputs:
        handles.append(_cast_inputs(model, dtype))
    if dtype == torch.float32:
        return handles
    patterns = settings.get("fp32_modules", "").replace(" ", "").split(",")
    chosen: list[str] = []
    for wrapped, module in model.named_modules():
        name = (wrapped + ".").replace("_orig_mod.", "")[:-1]  # as _compile.unwrapped
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns if pattern):
            chosen.append(name)
            handles.append(_cast_inputs(module, torch.float32))
            handles.append(module.register_forward_hook(functools.partial(_results, dtype)))
    handles.append(model.register_forward_hook(_explain, always_call=True))
    return handles


def _cast_inputs(module: torch.nn.Module, dtype: torch.dtype) -> Any:
    return module.register_forward_pre_hook(functools.partial(_inputs, dtype), prepend=True, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, value)


def _inputs(dtype: torch.dtype, module: torch.nn.Module, arguments: Any, keywords: Any) -> Any:
    return _cast(arguments, dtype), _cast(keywords, dtype)


def _results(dtype: torch.dtype, module: torch.nn.Module, arguments: Any, result: Any) -> Any:
    return _cast(result, dtype)


def _explain(module: torch.nn.Module, arguments: Any, result: Any) -> None:
    # Also called where the forward pass has failed: adds to torch's words what libzero has to do with it.
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in _WORDS):
        return
    dtype = next((each.dtype for each in module.parameters() if each.dtype != torch.float32), torch.float32)
    wide = [name for name, each in module.named_buffers() if each.is_floating_point() and each.dtype != dtype]
    buffers = f" Buffers in another dtype: {', '.join(wide[:4])}{', ...' if len(wide) > 4 else ''}." if wide else ""
    error.args = (
        f"{error} (libzero keeps the parameters of this model in {dtype}.{buffers} What meets them must have the same: "
        "cast_forward_inputs=True of libzero.shard casts the model's inputs, data_types.buffer_dtype buffers, and "
        'fp32_modules="pattern" keeps modules in fp32 and casts around them; or cast where the error was raised.)',
    )
