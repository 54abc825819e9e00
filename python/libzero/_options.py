"""What of a torch optimizer the engine runs natively: its groups as `optimizer` sections of a configuration."""

from __future__ import annotations

import json
from typing import Any

import torch

from ._C import ConfigError

# Hyper-parameters that may change while training (schedulers change them), by torch's names.
FOLLOWED = ("lr", "betas")

# What each native optimizer calls a parameter's states, as torch does.
STATES = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adagrad: ("sum",),
}


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
    return None


def groups_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[list[str], str]] | None:
    """Its groups, by the names of their parameters (`names`: by id), as the engine takes them; None where the engine
    has no such optimizer."""
    groups = []
    for group in optimizer.param_groups:
        section = section_of(optimizer, group)
        if section is None:
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
