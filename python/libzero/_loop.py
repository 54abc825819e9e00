"""What loops of other packages share (accelerate, transformers, Lightning): the configuration where the loop is not
the user's, schedulers, and whole weights in and out of a sharded model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ._C import CheckpointError, ConfigError
from ._config import text_of
from ._shard import ShardedOptimizer, owner_of

# What of a configuration the loop decides.
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


def settings_of(
    config: dict[str, Any] | str | os.PathLike[str] | None,
    keywords: dict[str, Any],
    *,
    precision: str,
    micro_batches: int,
    clipping: float,
) -> dict[str, Any]:
    """The configuration for `shard` where the loop is not the user's: without batch sizes, which the loop counts
    itself, and with `precision` ("bf16", "fp16", "no") and `clipping` where it leaves them open, or says "auto".

    Throws ConfigError for what would contradict the loop."""
    text = text_of(config, keywords)
    try:
        settings = _without_auto(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"The configuration is no plain JSON: {error}.") from error
    for section in ("optimizer", "scheduler"):
        if section in settings:
            raise ConfigError(
                f"The configuration has the section `{section}`, which comes from the program here. Take the section "
                "out, and say it in TrainingArguments, configure_optimizers(), or by what you give to prepare()."
            )
    counted = settings.pop("gradient_accumulation_steps", micro_batches)
    if counted != micro_batches:
        raise ConfigError(
            f"The configuration has gradient_accumulation_steps={counted}, the program {micro_batches}. Take the key "
            "out of the configuration."
        )
    for key in _SIZES:
        settings.pop(key, None)
    for name in ("bf16", "fp16"):
        section = settings.setdefault(name, {})
        asked = precision == name
        if section.setdefault("enabled", asked) != asked and precision != "no":
            raise ConfigError(
                f"The program asks for mixed precision '{precision}', but the configuration says {name}.enabled="
                f"{str(not asked).lower()}. Take the section out of the configuration."
            )
    settings.setdefault("gradient_clipping", clipping)  # without the key the engine clips to 1, as DeepSpeed does
    return settings


def _without_auto(value: Any) -> Any:
    # "auto" stands for what the Trainer decides, in configurations for its DeepSpeed integration.
    if isinstance(value, dict):
        return {key: _without_auto(each) for key, each in value.items() if each != "auto"}
    return value


def follow(scheduler: Any, sharded: ShardedOptimizer) -> None:
    """Gives a torch scheduler the sharded optimizer in the place of the one that it was made with."""
    # The groups are the same objects already. What torch wraps around `step` counts calls, for a warning.
    old, scheduler.optimizer = scheduler.optimizer, sharded
    if hasattr(old.step, "_wrapped_by_lr_sched") and not hasattr(sharded.step, "_wrapped_by_lr_sched"):
        step = sharded.step

        def counted(*arguments: Any, **keywords: Any) -> Any:
            sharded._opt_called = True  # type: ignore[attr-defined]
            return step(*arguments, **keywords)

        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        sharded.step = counted  # type: ignore[method-assign]


def sharded_by(model: torch.nn.Module) -> ShardedOptimizer | None:
    """What `shard` has returned for a model; None where it is not sharded."""
    return next((owner for owner in map(owner_of, model.parameters()) if owner is not None), None)


def with_masters(owner: ShardedOptimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`owner.full_state_dict()` with parameters in fp32, on the CPU. Collective."""
    state = owner.full_state_dict()
    for parameter, names in named(model.named_parameters(remove_duplicate=False)):
        value = owner.parameter(parameter)
        state.update((name, value.cpu()) for name in names if name in state)
    return state


@torch.no_grad()
def set_all(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Sets parameters, in fp32 where the model is sharded, and buffers. A parameter that has no value, under any of
    its names, is an error unless it is frozen. Collective where the model is sharded."""
    owner = sharded_by(model)
    for parameter, names in named(model.named_parameters(remove_duplicate=False)):
        name = next((name for name in names if name in values), None)
        if name is None:
            trained = parameter.requires_grad if owner is None else owner.name_of(parameter) in owner._trainable
            if trained:
                raise CheckpointError(f"The saved weights have no '{names[0]}'.")
        elif owner is not None:
            owner.set_parameter(parameter, values[name].to(torch.float32).view(parameter.shape))
        else:
            parameter.copy_(values[name])
    for buffer, names in named(model.named_buffers(remove_duplicate=False)):
        name = next((name for name in names if name in values), None)
        if name is not None:
            buffer.copy_(values[name])


def named(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """Tensors, each once, with all their names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in pairs:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return iter(found.values())
