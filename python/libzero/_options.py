"""What of a torch optimizer the engine runs natively: its groups as `optimizer` sections of a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ._C import ConfigError

# Hyper-parameters that may change while training (schedulers change them), by torch's names.
FOLLOWED = ("lr", "betas")
# What of a saved group must be as it is here.
FIXED = (
    "weight_decay", "momentum", "dampening", "nesterov", "eps", "lr_decay", "initial_accumulator_value", "beta2_decay",
    "d", "ns_steps",
)  # fmt: skip

def states_of(kind: type[torch.optim.Optimizer], group: dict[str, Any], parameter: torch.Tensor) -> tuple[str, ...]:
    """The states of a parameter besides its step, by torch's names, which are the engine's."""
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return ("exp_avg", "exp_avg_sq")
    if kind is torch.optim.SGD:
        return ("momentum_buffer",) if group["momentum"] else ()
    if kind is torch.optim.Adagrad:
        return ("sum",)
    if kind is torch.optim.Adafactor:
        return ("row_var", "col_var") if parameter.dim() > 1 else ("variance",)
    return ("momentum_buffer",)


def _refuse(group: dict[str, Any], kind: str, **only: Any) -> None:
    for key, value in only.items():
        if key in group and group[key] != value:
            raise ConfigError(
                f"torch.optim.{kind} has {key}={group[key]!r}, which libzero's own {kind} does not have. Set it to "
                f"{value!r}; or use stage 0 or 1 with native=False, which runs torch's optimizer itself as ZeRO-1."
            )


def _adam(group: dict[str, Any], kind: str, decoupled: bool) -> dict[str, Any]:
    _refuse(group, kind, amsgrad=False, maximize=False, differentiable=False)
    return {
        "type": "AdamW" if decoupled else "Adam",
        "params": {
            "lr": float(group["lr"]),
            "betas": [float(beta) for beta in group["betas"]],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            **({} if decoupled else {"adam_w_mode": False}),
        },
    }


def section_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any] | None:
    """The `optimizer` section that stands for one of its groups; None where the engine has no such optimizer.

    Throws ConfigError for an option that the engine's own lacks."""
    kind = type(optimizer)
    if kind is torch.optim.AdamW:
        return _adam(group, "AdamW", decoupled=True)
    if kind is torch.optim.Adam:
        return _adam(group, "Adam", decoupled=bool(group.get("decoupled_weight_decay")))
    if kind is torch.optim.SGD:
        _refuse(group, "SGD", maximize=False, differentiable=False)
        keys = ("momentum", "dampening", "weight_decay", "nesterov")
        return {"type": "SGD", "params": {"lr": float(group["lr"]), **{key: group[key] for key in keys}}}
    if kind is torch.optim.Adagrad:
        _refuse(group, "Adagrad", maximize=False, differentiable=False)
        keys = ("lr_decay", "weight_decay", "eps", "initial_accumulator_value")
        return {"type": "Adagrad", "params": {"lr": float(group["lr"]), **{key: group[key] for key in keys}}}
    if kind is torch.optim.Adafactor:
        _refuse(group, "Adafactor", maximize=False)
        keys = ("beta2_decay", "eps", "d", "weight_decay")
        return {"type": "Adafactor", "params": {"lr": float(group["lr"]), **{key: group[key] for key in keys}}}
    if kind is getattr(torch.optim, "Muon", None):
        _refuse(group, "Muon", adjust_lr_fn=None, ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7)
        keys = ("momentum", "nesterov", "ns_steps", "weight_decay")
        return {"type": "Muon", "params": {"lr": float(group["lr"]), **{key: group[key] for key in keys}}}
    return None


def groups_of(
    optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]
) -> list[tuple[list[str], str]] | None:
    """Their groups, by the names of their parameters (`names`: by id), as the engine takes them; None where the engine
    has no such optimizer."""
    groups = []
    for optimizer, group in ((each, group) for each in optimizers for group in each.param_groups):
        section = section_of(optimizer, group)
        if section is None:
            if len(optimizers) > 1:
                raise ConfigError(
                    f"libzero has no {type(optimizer).__name__} of its own, and of several optimizers each must be "
                    "AdamW, Adam, SGD, Adagrad, Adafactor or Muon."
                )
            return None
        unknown = sum(id(parameter) not in names for parameter in group["params"])
        if unknown:
            raise ConfigError(
                f"The optimizer has {unknown} parameters that the model does not have. Make it over "
                "model.parameters() of the model that you give to libzero.shard."
            )
        groups.append(([names[id(parameter)] for parameter in group["params"]], json.dumps(section)))
    return groups


def fixed_of(group: dict[str, Any]) -> dict[str, Any]:
    """What of a group must stay as it was when the engine was made."""
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr", "swa_lr", *FOLLOWED)}
