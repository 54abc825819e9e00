"""A configuration from what the user gave: a dict, a file, keywords."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

from ._C import ConfigError

_SWITCHED = ("bf16", "fp16")


def origin_of(config: dict[str, Any] | str | os.PathLike[str] | None) -> str:
    """What errors call it."""
    return f"'{os.fspath(config)}'" if isinstance(config, (str, os.PathLike)) else "the configuration"


def check(settings: dict[str, Any], lenient: bool) -> None:
    """What only the program `zero` or C++ does of a resolved configuration: ConfigError, or a warning."""
    found = []
    if settings.get("torch_autocast", {}).get("enabled"):
        found.append(
            "torch_autocast is the program's here: leave it out, and compute the loss in a scope of "
            "torch.autocast('cpu', torch.bfloat16)."
        )
    if settings.get("layer_major_accumulation"):
        found.append("layer_major_accumulation needs Engine::accumulate, which Python does not have yet: leave it out.")
    if settings.get("activation_checkpointing", {}).get("every"):
        found.append(
            "activation_checkpointing.every is of the models of `zero train`: leave it out, and use "
            "gradient_checkpointing_enable() or libzero.checkpoint."
        )
    if found and not lenient:
        raise ConfigError(" ".join(found))
    for text in found:
        warnings.warn(text, stacklevel=5)


def text_of(config: dict[str, Any] | str | os.PathLike[str] | None, keywords: dict[str, Any]) -> str:
    """As JSON text. Keywords are top-level keys of the configuration and count more than the same key of `config`;
    `stage=3` stands for zero_optimization.stage, and a bool for {"enabled": ...} of bf16 and fp16. A configuration has
    DeepSpeed's defaults; without one gradients are not clipped."""
    if config is None:
        settings: dict[str, Any] = {"gradient_clipping": 0}  # as in PyTorch: nothing is clipped unasked
    elif isinstance(config, dict):
        settings = dict(config)
    elif not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"The configuration is {config!r}; it must be a dict or the name of a file. A stage is given as stage=3."
        )
    else:
        try:
            with open(config, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError(f"The configuration '{os.fspath(config)}' cannot be read: {error.strerror}.") from error
        if not keywords:
            return text
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"'{os.fspath(config)}' is no plain JSON ({error}), so keywords cannot be added to it: change the "
                "file, or leave its comments out."
            ) from error
    keywords = dict(keywords)
    if "stage" in keywords:
        section = dict(settings.get("zero_optimization", {}))
        section["stage"] = keywords.pop("stage")
        settings["zero_optimization"] = section
    for key, value in keywords.items():
        settings[key] = {"enabled": value} if key in _SWITCHED and isinstance(value, bool) else value
    try:
        return json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The configuration holds something that JSON cannot: {error}.") from error
