"""The loss of transformers' causal language models without their logits."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import nn

from . import _C
from ._loss import linear_cross_entropy

_KEPT = "_libzero_hidden"  # attribute of a head: what it was called with, while its model computes a loss


def use_linear_cross_entropy(model: nn.Module) -> nn.Module:
    """Makes a causal language model of transformers compute its loss by `libzero.linear_cross_entropy`, and returns the model.

    A model that trains and is given `labels` returns the loss, and None as `logits`: logits of the whole batch never exist. Otherwise it
    works as before. Raises ConfigError for a model whose loss is another one, or whose head is more than one matrix; and in its first
    step for a model that changes its logits before the loss."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper has the model inside
    name = type(base).__name__
    if not isinstance(getattr(type(base), "loss_function", None), property):
        raise _C.ConfigError(f"use_linear_cross_entropy takes a causal language model of transformers, before torch.compile, and not {name}.")
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise _C.ConfigError(
            f"use_linear_cross_entropy needs a head that is one matrix, an nn.Linear without bias; that of {name} is "
            f"{'missing' if head is None else f'{type(head).__module__}.{type(head).__name__}'}. Call it before the head gets an adapter."
        )
    loss = base.loss_function
    if getattr(loss, "func", None) is _loss:
        return model
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise _C.ConfigError(
            f"use_linear_cross_entropy replaces ForCausalLMLoss, transformers' loss of causal language models; that of {name} is "
            f"{getattr(loss, '__name__', loss)}."
        )
    head.forward = MethodType(_head_forward, head)
    base.forward = MethodType(_forward_of(type(base)), base)
    base.loss_function = functools.partial(_loss, head)
    return model


def _head_forward(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    if _KEPT not in head.__dict__:
        return nn.Linear.forward(head, hidden)
    head.__dict__[_KEPT] = hidden
    return hidden


@functools.cache
def _forward_of(kind: type[nn.Module]) -> Any:
    whole = kind.forward
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def forward(model: Any, *values: Any, **keywords: Any) -> Any:
        if not model.training or signature.bind(model, *values, **keywords).arguments.get("labels") is None:
            return whole(model, *values, **keywords)
        head = model.get_output_embeddings()
        head.__dict__[_KEPT] = None
        try:
            output = whole(model, *values, **keywords)
        finally:
            del head.__dict__[_KEPT]
        if isinstance(output, tuple):
            return output[:1] + output[2:]
        output.logits = None
        return output

    return forward


def _loss(head: nn.Linear, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
          shift_labels: torch.Tensor | None = None, **keywords: Any) -> torch.Tensor:  # fmt: skip
    """Has the arguments of transformers' ForCausalLMLoss; `logits` are the head's input where that was kept."""
    if _KEPT not in head.__dict__:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **keywords)
    hidden = head.__dict__[_KEPT]
    if hidden is None or logits is not hidden:
        raise _C.ConfigError(
            "use_linear_cross_entropy was called for a model that changes its logits before the loss (final_logit_softcapping, logit_scale and "
            "the like), so that they cannot be left out. Load the model again, without it."
        )
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index)
    count = float(num_items_in_batch)
    if count == 0:
        return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index, reduction="sum")
    return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index, divisor=count)
