"""torch.compile over sharded parameters.

A backend that runs operators ("eager", "aot_eager") needs nothing: each operator brings its parameters. Inductor's
kernels take the memory of a graph's inputs instead. So each of its graphs keeps the sharded ones among its inputs
present from its first kernel to its last: forward, backward and recomputed parts are graphs of their own.

This is done where a graph is called, not where it is compiled, so that graphs from Inductor's and AOTAutograd's caches
are no others, nor those that were compiled before `shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from . import _C
from ._C import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_installed = False


def backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend=libzero.backend)`: Inductor. After the first `shard` torch's own
    `torch.compile(model)` is the same."""
    install()
    return torch._TorchCompileInductorWrapper(mode, options, None)(graph_module, example_inputs)


def untraced(function: _Function) -> _Function:
    """A method that a compiled training step calls as it is. What it calls in turn (a closure, a backward pass with
    recomputation) may be compiled."""
    return torch._disable_dynamo(function, recursive=False)


def all_untraced(function: _Function) -> _Function:
    """The same of one that calls nothing of the user's: what it calls is not compiled either."""
    return torch._disable_dynamo(function)


def unwrapped(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Names without what torch.compile(module) puts before those of the module: what is saved is of the model, however
    it is run."""
    return [(name.replace("_orig_mod.", ""), tensor) for name, tensor in named]


def install() -> None:
    """Changes how Inductor calls its graphs; once. Without sharded inputs they do what they did."""
    global _installed
    if _installed:
        return
    _installed = True
    import torch._inductor.output_code as output_code

    for kind in (output_code.CompiledFxGraph, output_code.CompiledAOTI):
        kind.__call__ = _pinning(kind.__call__)  # type: ignore[method-assign]
    wrapper = torch._TorchCompileInductorWrapper
    wrapper.__call__ = _refusing(wrapper.__call__)  # type: ignore[method-assign]


def _pinning(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, inputs: Any) -> Any:
        sharded = [index for index, each in enumerate(inputs) if isinstance(each, torch.Tensor) and _C.is_sharded(each)]
        if not sharded:
            return call(self, inputs)
        pins = _C.pin([inputs[index] for index in sharded])
        try:
            # Inductor frees its inputs on the way: no other reference to one is held here.
            for index in sharded:
                if index in getattr(self, "mutated_input_idxs", ()):
                    _mark_written(inputs[index])
            return call(self, inputs)
        finally:
            pins.release()

    return run


def _mark_written(parameter: torch.Tensor) -> None:
    # A kernel writes it without an operator. An operator that writes nothing says so, without a change of the version
    # that autograd looks at.
    parameter.data.view(-1)[:0].zero_()


def _refusing(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, model: Any, inputs: Any) -> Any:
        from torch._inductor import config

        frozen = config.freezing or self.config.get("freezing")
        if frozen and isinstance(model, torch.nn.Module) and any(map(_C.is_sharded, model.parameters())):
            raise ConfigError(
                "Inductor's `freezing` copies parameters into the compiled graph, whole and as they are now. Leave it "
                "off for a sharded model, or compile a copy that opt.full_state_dict() has filled."
            )
        return compile_graph(self, model, inputs)

    return run
