"""Frozen weights of linear layers in 4 or 8 bits (QLoRA), as bytes that are sharded and gathered as such."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from . import _C

FORMATS = ("nf4", "int8")


def quantize_frozen(model: torch.nn.Module, format: str = "nf4", skip: Collection[str] = ()) -> int:
    """Replaces the frozen `torch.nn.Linear` layers of `model` by layers whose weights are kept in "nf4", with double quantisation, 4.127 bits
    a number, or in "int8" by blocks of 128, 8.25 bits, and returns how many it replaced. Call it after `peft.get_peft_model`, which freezes
    the base model, and before `shard`:

        model = peft.get_peft_model(model, peft.LoraConfig(...))
        libzero.quantize_frozen(model)
        opt = libzero.shard(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), stage=3)

    A layer is frozen if its weight does not require gradients. These stay as they are: the head (`get_output_embeddings` of transformers'
    models), as in `zero train`; weights that other modules hold too; layers of other classes; and layers whose name, or whose name's last
    part, is in `skip`. T5 needs `skip=("wo",)`, since it casts what goes into that layer to the dtype of the weight. The numbers are those of `zero train --lora-quantize-base`, bit for bit (docs/fine-tuning.md). A product
    computes in the dtype that the weight had, or in that of autocast.

    Throws ConfigError for another format, if there is no such layer, and for a weight that is not in fp32, bf16 or fp16 on the CPU. Then nothing is replaced."""
    if format not in FORMATS:
        raise _C.ConfigError(f"quantize_frozen was given the format {format!r}. Give one of {', '.join(map(repr, FORMATS))}.")
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    head_of = getattr(model, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    found: dict[str, torch.nn.Linear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is not torch.nn.Linear or module.weight.requires_grad or holders[id(module.weight)] > 1:
            continue
        if module is head or name in skip or name.rpartition(".")[2] in skip:
            continue
        if not name:
            raise _C.ConfigError("quantize_frozen replaces layers of a model, and was given a single linear layer. Give a module that holds it.")
        weight = module.weight
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.device.type != "cpu":
            raise _C.ConfigError(
                f"quantize_frozen takes weights in fp32, bf16 or fp16 on the CPU, and '{name}.weight' is {weight.dtype} on {weight.device}. "
                "Quantise the model before it is moved."
            )
        found[name] = module
    if not found:
        raise _C.ConfigError(
            "The frozen weights of linear layers were to be quantised, and the model has none. Freeze them first, as peft.get_peft_model does."
        )
    layers: dict[torch.nn.Linear, PackedLinear] = {}
    for name, module in found.items():
        if module not in layers:  # one layer may stand at several places
            layers[module] = PackedLinear(module, format)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layers[module])
    return len(layers)


class PackedLinear(torch.nn.Module):
    """A linear layer whose frozen weight is a vector of bytes."""

    def __init__(self, layer: torch.nn.Linear, format: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype, self.format = layer.in_features, layer.out_features, layer.weight.dtype, format
        self.weight = torch.nn.Parameter(_C.packed_weight(layer.weight.detach(), format), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype
        if not x.is_floating_point():
            raise _C.ConfigError(
                f"A layer that quantize_frozen has replaced was given {x.dtype}: its model casts to the dtype of the layer's weight, which is "
                f"bytes now. Leave such layers out by their names (T5: skip=('wo',)). It has {self.in_features} inputs and {self.out_features} outputs."
            )
        if torch.is_autocast_enabled(x.device.type):  # the values are read back in the dtype of the product
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        product: torch.Tensor = _Product.apply(x, self.weight, (self.format, self.out_features, self.in_features, dtype))
        return product if self.bias is None else product + self.bias.to(dtype)

    def values(self) -> torch.Tensor:
        """Returns the weight as it is read back, (out_features, in_features)."""
        return _values(self.weight, self.format, self.out_features, self.in_features, self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.format}"


def _values(packed: torch.Tensor, format: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    values: torch.Tensor = torch.ops.zero.unpacked_weight(packed, format, rows, columns, dtype)
    return values


class _Product(torch.autograd.Function):
    """x W^T, whose W is read back in each pass, so that it lives as long as the product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, matrix: tuple[str, int, int, torch.dtype]) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.matrix = matrix
        return x @ _values(packed, *matrix).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ _values(packed, *ctx.matrix), None, None
