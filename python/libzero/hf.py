"""Hugging Face: accelerate's Accelerator and transformers' Trainer, with sharded states, and losses without logits.

    accelerator = libzero.hf.accelerator(stage=3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    trainer = libzero.hf.LibzeroTrainer(model, arguments, config={"zero_optimization": {"stage": 3}}, ...)

    libzero.hf.use_linear_cross_entropy(model)

`import libzero` does not import this file, and this file imports transformers only for LibzeroTrainer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ._accelerate import LibzeroAccelerator
from ._head import use_linear_cross_entropy

if TYPE_CHECKING:
    from ._trainer import LibzeroTrainer

__all__ = ["LibzeroAccelerator", "LibzeroTrainer", "accelerator", "use_linear_cross_entropy"]


def accelerator(config: dict[str, Any] | str | os.PathLike[str] | None = None, **keywords: Any) -> LibzeroAccelerator:
    """An accelerate.Accelerator whose `prepare` shards a model's states over the ranks.

    `config` and the keywords `stage`, `bf16`, `fp16` and `zero_optimization`: as for libzero.shard; all other keywords
    are Accelerator's. A rank takes its GPU where there is one, and else the CPU; cpu=True asks for that. Collective."""
    return LibzeroAccelerator(config=config, **keywords)


def __getattr__(name: str) -> Any:
    if name == "LibzeroTrainer":
        from ._trainer import LibzeroTrainer

        return LibzeroTrainer
    raise AttributeError(f"module 'libzero.hf' has no attribute '{name}'")
