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

_KEPT = "_libzero_kept"  # attribute of a head while its model computes a loss


def use_linear_cross_entropy(model: nn.Module) -> nn.Module:
    """Makes a causal language model of transformers compute its loss by `libzero.linear_cross_entropy`, and returns the model.

    A model that trains and is given `labels` returns the loss and no `logits`: logits of the whole batch never exist. Otherwise it works
    as before. Call it before accelerate's `prepare` and before torch.compile. Raises ConfigError for a model whose loss is another one, or
    whose head is more than one matrix; and in its first step for a model that changes or casts its logits before the loss."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper has the model inside
    kind = type(base)
    own = "loss_function" in getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ())
    if not isinstance(getattr(kind, "loss_function", None), property) or not own:
        raise _C.ConfigError(
            f"use_linear_cross_entropy takes a causal language model of transformers whose forward calls its loss_function, before "
            f"torch.compile; {kind.__name__} is none."
        )
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise _C.ConfigError(
            f"use_linear_cross_entropy needs a head that is one matrix, an nn.Linear without bias; that of {kind.__name__} is "
            f"{'missing' if head is None else f'{type(head).__module__}.{type(head).__name__}'}. Call it before the head gets an adapter."
        )
    loss = base.loss_function
    if getattr(loss, "func", None) is _loss:
        return model
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise _C.ConfigError(
            f"use_linear_cross_entropy replaces ForCausalLMLoss, transformers' loss of causal language models; that of {kind.__name__} is "
            f"{getattr(loss, '__name__', loss)}."
        )
    if "forward" in base.__dict__ or "forward" in head.__dict__:
        raise _C.ConfigError(
            f"The forward function of {kind.__name__} or of its head has been wrapped already, by accelerate for example. Call "
            f"use_linear_cross_entropy before that."
        )
    head.forward = _HeadForward(head)
    base.forward = _Forward(base)
    base.loss_function = functools.partial(_loss, head)
    return model


class _Kept:
    """What a head was called with in a step whose loss needs no logits."""

    hidden: torch.Tensor | None = None
    version = 0
    used = False


class _HeadForward:
    """Is the `forward` of a head. Copies and pickles of a model have it too."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = self.head.__dict__.get(_KEPT)
        if kept is None:
            return nn.Linear.forward(self.head, hidden)
        kept.hidden, kept.version = hidden, hidden._version
        return hidden


class _Forward:
    """Is the `forward` of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.model).forward, self.model))

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        model: Any = self.model
        whole = MethodType(type(model).forward, model)
        if not model.training or self.__signature__.bind(*values, **keywords).arguments.get("labels") is None:
            return whole(*values, **keywords)
        head = model.get_output_embeddings()
        kept = head.__dict__[_KEPT] = _Kept()
        try:
            output = whole(*values, **keywords)
        finally:
            del head.__dict__[_KEPT]
        if kept.hidden is not None and not kept.used:
            raise _C.ConfigError(f"{type(model).__name__} has not called its loss_function, so use_linear_cross_entropy does not work for it.")
        if isinstance(output, tuple):
            return tuple(each for each in output if each is not kept.hidden)
        return type(output)(**{name: value for name, value in output.items() if value is not kept.hidden})


def _loss(head: nn.Linear, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
          shift_labels: torch.Tensor | None = None, **keywords: Any) -> torch.Tensor:  # fmt: skip
    """Has the arguments of transformers' ForCausalLMLoss; `logits` are the head's input where that was kept."""
    kept = head.__dict__.get(_KEPT)
    if kept is None or kept.hidden is None:  # the head that runs is another one, as with an adapter
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **keywords)
    hidden = kept.hidden
    if logits is not hidden or hidden._version != kept.version:
        raise _C.ConfigError(
            "use_linear_cross_entropy was called for a model that changes or casts its logits before the loss (final_logit_softcapping, "
            "logit_scale and the like), so that they cannot be left out. Load the model again, without it."
        )
    kept.used = True
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index)
    count = float(num_items_in_batch)
    if count == 0:
        return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index, reduction="sum")
    return linear_cross_entropy(hidden, head.weight, targets, ignore_index=ignore_index, divisor=count)
