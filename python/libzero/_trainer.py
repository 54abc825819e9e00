"""transformers' Trainer over sharded states."""

from __future__ import annotations

import glob
import json
import os
from typing import Any

import torch

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("LibzeroTrainer needs transformers: pip install transformers accelerate") from error

from . import _checkpoints
from ._C import ConfigError
from ._accelerate import LibzeroAccelerator, LibzeroOptimizer, load_weights
from ._loop import settings_of
from ._shard import ShardedOptimizer, gathered

SHARDS_NAME = "libzero"
STATES_NAME = "libzero.safetensors"  # whole
GROUPS_NAME = "libzero_groups.pt"
OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.pt", "scheduler.pt"


class LibzeroTrainer(Trainer):
    """A Trainer whose model's states are sharded over the ranks. Takes what Trainer takes, and

    `config`: as libzero.shard; a configuration for the Trainer's DeepSpeed integration does, its "auto" being what
    TrainingArguments say. `bf16`, `max_grad_norm`, accumulation and the optimizer are TrainingArguments'.

    `whole_checkpoints`: they hold model.safetensors and whole states, through rank 0, and not each rank's slices
    (Note [Checkpoints of other loops]).

    Started by torchrun or `zero launch`, with a rank for each GPU, or with use_cpu=True. `per_device_train_batch_size` is
    that of a rank. The model goes to the rank's device where it is sharded, or evaluated before that.
    Checkpoints resume at any stage and number of ranks; so do those of a plain Trainer. `save_model` needs memory for
    the whole model on rank 0."""

    def __init__(
        self,
        *arguments: Any,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        whole_checkpoints: bool = False,
        **keywords: Any,
    ) -> None:
        self._given_config, self._whole_checkpoints = config, whole_checkpoints
        self._saves_shards = False  # while a checkpoint is made of slices
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        arguments = self.args
        for name in ("deepspeed", "fsdp", "torch_compile", "auto_find_batch_size", "bf16_full_eval", "fp16_full_eval"):
            if getattr(arguments, name, None):
                raise ConfigError(f"TrainingArguments have `{name}`, which a LibzeroTrainer cannot have. Take it out.")
        settings = settings_of(
            self._given_config,
            {},
            precision=arguments.mixed_precision,
            micro_batches=arguments.gradient_accumulation_steps,
            clipping=arguments.max_grad_norm or 0.0,
        )
        if settings["gradient_clipping"] != (arguments.max_grad_norm or 0.0):
            raise ConfigError(
                f"The configuration has gradient_clipping={settings['gradient_clipping']}, TrainingArguments have "
                f"max_grad_norm={arguments.max_grad_norm}. Take the key out of the configuration."
            )
        self._input_dtype = next(
            (dtype for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if settings[name]["enabled"]),
            None,
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # one rank on a host of several: it takes the first, and there is no DataParallel
        super().create_accelerator_and_postprocess()
        LibzeroAccelerator.adopt(self.accelerator, settings)

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """What libzero.shard has returned; None before training."""
        return self.optimizer.optimizer if isinstance(self.optimizer, LibzeroOptimizer) else None

    # --- Training.

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        # It moves as it is sharded, parameter by parameter; accelerate moves it for an evaluation before that.
        return None

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        if isinstance(data, torch.Tensor) and data.is_floating_point() and self._input_dtype is not None:
            return data.to(self._input_dtype)
        return data

    # The engine clips and takes the norm in its step: nothing to be done before.
    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        return None

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **keywords: Any) -> None:
        grad_norm = self.sharded.grad_norm if self.sharded is not None else None
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **keywords)

    # --- Saving and loading. All ranks take part; rank 0 writes.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer.save_model: what from_pretrained reads, in the dtype that is trained in. Collective."""
        if self.sharded is None:
            super().save_model(output_dir, _internal_call)
            return
        if self._saves_shards:
            self._save_description(output_dir or self.args.output_dir)
            return
        self._save(output_dir, state_dict=self.sharded.full_state_dict())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_description(self, folder: str) -> None:
        # All that `save_model` writes but the weights; of an adapter also these, which are small.
        os.makedirs(folder, exist_ok=True)
        if hasattr(self.model, "peft_config"):
            self._save(folder, state_dict=self._adapter())
            return
        if not self.args.should_save:
            return
        collator = getattr(self.data_collator, "tokenizer", None)
        described = (getattr(self.model, name, None) for name in ("config", "generation_config"))
        for each in (*described, self.processing_class or collator):
            if hasattr(each, "save_pretrained"):
                each.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _adapter(self) -> dict[str, torch.Tensor]:
        assert self.sharded is not None
        named = [(n, p) for n, p in self.model.named_parameters() if n in self.sharded._trainable]
        return {name: self.sharded.parameter(parameter).to(parameter.dtype) for name, parameter in named}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.sharded is not None
        os.makedirs(output_dir, exist_ok=True)
        if self._saves_shards:
            _checkpoints.save(self.sharded, os.path.join(output_dir, SHARDS_NAME))
            states, name = self.sharded.groups_as_saved(), GROUPS_NAME
        elif self.sharded.saves_shards:
            if self.args.should_save:
                _checkpoints.remove(os.path.join(output_dir, SHARDS_NAME))  # of an earlier run
            # A scheduler's state has no learning rates, and no schedule all hyper-parameters: those are in the groups.
            self.sharded.save_full(os.path.join(output_dir, STATES_NAME))
            states, name = self.sharded.groups_as_saved(), GROUPS_NAME
        else:
            states, name = self.sharded.state_dict(), OPTIMIZER_NAME
        if self.args.should_save:
            torch.save(states, os.path.join(output_dir, name))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        whole = self._whole_checkpoints or self.args.save_only_model or self.args.push_to_hub
        self._saves_shards = self.sharded is not None and self.sharded.saves_shards and not whole
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_shards = False
        self.accelerator.wait_for_everyone()  # a checkpoint is whole where this returns, on every rank

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.sharded is None:
            return
        shards, whole = os.path.join(checkpoint, SHARDS_NAME), os.path.join(checkpoint, STATES_NAME)
        in_shards = _checkpoints.is_checkpoint(shards)
        if in_shards or (os.path.exists(whole) and self.sharded.saves_shards):
            if in_shards:
                self.sharded.load(shards)
            else:
                self.sharded.load_full(whole)
            groups = torch.load(os.path.join(checkpoint, GROUPS_NAME), map_location="cpu", weights_only=True)
            _checkpoints.put_groups(self.sharded, groups)
            self.lr_scheduler.load_state_dict(
                torch.load(os.path.join(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
            )
            return
        optimizer, scheduler = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if os.path.isfile(optimizer) and os.path.isfile(scheduler):  # whole, of a torch optimizer: not onto each device
            self.optimizer.load_state_dict(torch.load(optimizer, map_location="cpu", weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if _checkpoints.is_checkpoint(os.path.join(resume_from_checkpoint, SHARDS_NAME)):
            return  # with the optimizer's states, once the model is sharded
        if self.sharded is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not self._load_whole(resume_from_checkpoint):
            with gathered(self._trained(), write=True):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        shards = os.path.join(self.state.best_model_checkpoint, SHARDS_NAME)
        if self.sharded is not None and _checkpoints.is_checkpoint(shards):
            self.sharded.load(shards)
        elif not self._load_whole(self.state.best_model_checkpoint):
            with gathered(self._trained(), write=True):  # an adapter
                super()._load_best_model()

    def _trained(self) -> list[torch.nn.Parameter]:
        trainable = self.sharded._trainable if self.sharded is not None else set()
        return [p for n, p in self.model.named_parameters() if n in trainable or p.requires_grad]

    def _load_whole(self, folder: str) -> bool:
        """The weights of a model that `save_model` wrote; whether there are such."""
        index = os.path.join(folder, "model.safetensors.index.json")
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
            files = [os.path.join(folder, name) for name in names]
        else:
            files = glob.glob(os.path.join(glob.escape(folder), "model.safetensors"))
        if files:
            load_weights(self.model, files)
        return bool(files)
