"""A configuration from what the user gave: a dict, a file, keywords."""

from __future__ import annotations

import json
import os
from typing import Any

from ._C import ConfigError

_SWITCHED = ("bf16", "fp16")


def text_of(config: dict[str, Any] | str | os.PathLike[str] | None, keywords: dict[str, Any]) -> str:
    """As JSON text. Keywords are top-level keys of the configuration and count more than the same key of `config`;
    `stage=3` stands for zero_optimization.stage, and a bool for {"enabled": ...} of bf16 and fp16. A configuration has
    DeepSpeed's defaults; without one gradients are not clipped."""
    if config is None:
        settings: dict[str, Any] = {"gradient_clipping": 0}  # as in PyTorch: nothing is clipped unasked
    elif isinstance(config, dict):
        settings = dict(config)
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
        return json.dumps(settings)
    except TypeError as error:
        raise ConfigError(f"The configuration holds something that JSON cannot: {error}.") from error
