"""What of a torch optimizer the engine runs natively: its groups as `optimizer` sections of a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._C import ConfigError, Error


class _Native(NamedTuple):
    """A torch optimizer that the engine has too."""

    section: str  # its `type` in a configuration
    keys: tuple[str, ...]  # of a group, besides the rate; the configuration's are the same
    only: dict[str, Any]  # the only values of other keys that the engine's optimizer has
    states: Callable[[dict[str, Any], torch.Tensor], tuple[str, ...]]  # of a parameter of a group


def _native() -> dict[type[torch.optim.Optimizer], _Native]:
    optim = torch.optim
    adam = (
        ("betas", "eps", "weight_decay"),
        {"amsgrad": False, "maximize": False, "differentiable": False},
        lambda group, parameter: ("exp_avg", "exp_avg_sq"),
    )
    plain = {"maximize": False, "differentiable": False}
    known = {
        optim.AdamW: _Native("AdamW", *adam),
        optim.Adam: _Native("Adam", *adam),
        optim.SGD: _Native(
            "SGD",
            ("momentum", "dampening", "weight_decay", "nesterov"),
            plain,
            lambda group, parameter: ("momentum_buffer",) if group["momentum"] else (),
        ),
        optim.Adagrad: _Native(
            "Adagrad",
            ("lr_decay", "weight_decay", "eps", "initial_accumulator_value"),
            plain,
            lambda group, parameter: ("sum",),
        ),
        optim.Adafactor: _Native(
            "Adafactor",
            ("beta2_decay", "eps", "d", "weight_decay"),
            {"maximize": False},
            lambda group, parameter: ("row_var", "col_var") if parameter.dim() > 1 else ("variance",),
        ),
    }
    if hasattr(optim, "Muon"):
        known[optim.Muon] = _Native(
            "Muon",
            ("momentum", "nesterov", "ns_steps", "weight_decay"),
            {"adjust_lr_fn": None, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7},
            lambda group, parameter: ("momentum_buffer",),
        )
    return known


_NATIVE = _native()


def states_of(kind: type[torch.optim.Optimizer], group: dict[str, Any], parameter: torch.Tensor) -> tuple[str, ...]:
    """The states of a parameter besides its step, by torch's names, which are the engine's."""
    if kind not in _NATIVE:
        raise Error(
            "state_dict and opt.state of an optimizer that the configuration has chosen have no torch format. Use "
            "opt.save(folder) or opt.save_full(file), and opt.optimizer_state(p, name)."
        )
    return _NATIVE[kind].states(group, parameter)


def counts_steps(kind: type[torch.optim.Optimizer]) -> bool:
    """Torch's states of it have a `step`."""
    return kind is not torch.optim.SGD and kind is not getattr(torch.optim, "Muon", None)


def shape_of(state: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a state, by torch's name. Adafactor's rows and columns have one element there."""
    flat = {"row_var": -1, "col_var": -2}.get(state)
    shape = list(parameter.shape)
    if flat is not None:
        shape[flat] = 1
    return tuple(shape)


def evaluates(sections: Sequence[dict[str, Any]]) -> bool:
    """An optimizer of these has weights for evaluation that are not those that it trains."""
    return any(section.get("type") == "ScheduleFreeAdamW" for section in sections)


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a hyper-parameter of a group. One that is a tensor is filled: the program and compiled steps hold it."""
    old = group.get(key)
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif isinstance(old, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in old):
        for each, new in zip(old, value):
            if isinstance(each, torch.Tensor):
                each.fill_(new)
    else:
        group[key] = value


def keys_of(kind: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """What of a saved group must be as it is here."""
    return tuple(_NATIVE[kind].only) if kind in _NATIVE else ()


def followed_of(kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> tuple[str, ...]:
    """Hyper-parameters that may change while training (schedules change them), by torch's names; `params` are those of
    the section where a configuration names the optimizer."""
    return ("lr", *(_NATIVE[kind].keys if kind in _NATIVE else (key for key in params if key != "lr")))


def changed(kind: type[torch.optim.Optimizer], group: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group that differ from those of a section, but for the rate."""
    keys = [key for key in followed_of(kind, params) if key != "lr" and group.get(key) is not None]
    now = {key: _plain(group[key]) for key in keys}
    return {key: value for key, value in now.items() if params.get(key) != value}


def _plain(value: Any) -> Any:
    """As JSON has it; numbers of torch and NumPy too."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else float(value)


def section_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any] | None:
    """The `optimizer` section that stands for one of its groups; None where the engine has no such optimizer.

    Throws ConfigError for an option that the engine's own lacks."""
    native = _NATIVE.get(type(optimizer))
    if native is None:
        return None
    for key, value in native.only.items():
        if key in group and group[key] != value:
            raise ConfigError(
                f"torch.optim.{type(optimizer).__name__} has {key}={group[key]!r}, which libzero's own does not have. "
                f"Set it to {value!r}; or use stage 0 or 1 with native=False, which runs torch's optimizer itself as "
                "ZeRO-1."
            )
    section = native.section
    params = {"lr": float(group["lr"]), **{key: group[key] for key in native.keys}}
    if "betas" in params:
        params["betas"] = [float(beta) for beta in params["betas"]]
    if section == "Adam" and group.get("decoupled_weight_decay"):
        section = "AdamW"
    elif section == "Adam":
        params["adam_w_mode"] = False
    return {"type": section, "params": params}


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


def fixed_of(
    kind: type[torch.optim.Optimizer], group: dict[str, Any], params: dict[str, Any]
) -> dict[str, Any]:
    """What of a group must stay as it was when the engine was made."""
    free = ("params", "initial_lr", "swa_lr", *followed_of(kind, params))
    return {key: value for key, value in group.items() if key not in free}
