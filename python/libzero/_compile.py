"""torch.compile over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _C


def backend(graph_module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """`torch.compile(model, backend=libzero.backend)`: Inductor, with a graph's parameters present while it runs."""
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: Any, inputs: Any, **keywords: Any) -> Any:
        compiled = compile_fx_inner(graph, inputs, **keywords)

        def run(arguments: list[Any]) -> Any:
            pins = _C.pin([each for each in arguments if isinstance(each, torch.Tensor)])
            try:
                return compiled(arguments)
            finally:
                pins.release()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with functorch_config.patch(enable_autograd_cache=False):  # a hit would leave `inner` out
        return compile_fx(graph_module, example_inputs, inner_compile=inner)
