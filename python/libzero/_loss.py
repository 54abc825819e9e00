"""The loss of a language model's head, without the logits of the whole batch."""

import torch

from . import _C


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    divisor: float | None = None,
) -> torch.Tensor:
    """Returns `cross_entropy(hidden @ weight.T, targets)` as an fp32 scalar. The logits are computed some rows at a time, and their
    gradient with them, so that no memory of their size is held.

    hidden: (..., C), weight: (V, C), of one floating-point dtype; targets: (...), int64. `reduction` is "mean", over the targets that are
    not `ignore_index`, or "sum"; `divisor` divides the sum by a number of your own, such as the tokens of all micro-batches. Backward runs once.
    """
    if reduction not in ("mean", "sum"):
        raise _C.ConfigError(f'linear_cross_entropy takes reduction "mean" or "sum", not {reduction!r}: no loss is kept for each row.')
    if divisor is not None and not divisor > 0:
        raise _C.ConfigError(f"linear_cross_entropy takes a divisor above 0, not {divisor}.")
    if targets.shape != hidden.shape[:-1]:
        raise _C.ConfigError(f"linear_cross_entropy takes hidden (..., C) and targets (...), not {tuple(hidden.shape)} and {tuple(targets.shape)}.")
    targets = targets.flatten()
    if ignore_index != -100:
        targets = targets.masked_fill(targets == ignore_index, -100)
    if divisor is None:
        divisor = 1.0 if reduction == "sum" else 0.0
    return _C.linear_cross_entropy(hidden.flatten(0, -2), weight, targets, label_smoothing, float(divisor))
