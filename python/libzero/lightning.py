"""PyTorch Lightning with sharded states.

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=libzero.lightning.LibzeroStrategy(stage=3))

`import libzero` does not import this file.

Note [Lightning and libzero]
The strategy is Lightning's for DistributedDataParallel without that wrapper: it starts the ranks, and a group of
torch.distributed (gloo, or NCCL for GPUs) beside libzero's own, which carries batches' metrics and objects. In `fit` it
puts what libzero.shard returns in the place of the optimizer from configure_optimizers, and leaves the module as it is.
The module goes to the rank's device as it is sharded, parameter by parameter, and stays there. A checkpoint is a folder
with each rank's slices (Note [Checkpoints of other loops] in _checkpoints.py), in whose manifest rank 0 keeps what
Lightning has beside them: loops, callbacks, schedulers. Weights and states are loaded once the model is sharded. A
checkpoint in a file is Lightning's own, made whole on rank 0: weights in fp32, states in torch's format. Its weights are
loaded before the model is sharded, the optimizer's states after."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

try:
    import lightning.pytorch as pl
    from lightning.pytorch.overrides.distributed import _sync_module_states
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.apply_func import apply_to_collection
except ImportError as error:
    raise ImportError("libzero.lightning needs lightning: pip install lightning") from error

from . import _checkpoints, _device
from ._build import init
from ._C import ConfigError
from ._group import group as _group
from ._loop import follow, named, set_all, settings_of, sharded_by, with_masters
from ._shard import ShardedOptimizer, shard

__all__ = ["LibzeroStrategy"]

_BY_VALUE = (
    "gradient_clip_algorithm='value' of the Trainer: the engine clips by value in its step. Leave gradient_clip_val out, "
    "and give LibzeroStrategy gradient_clipping_value=...; or use gradient_clip_algorithm='norm'."
)


class _Precision(Precision):
    """What Trainer(precision=...) is with libzero: the engine casts parameters, and the loop inputs."""

    dtype = torch.float32  # of a sharded model

    def __init__(self, precision: Any) -> None:
        self.precision = precision

    def convert_input(self, data: Any) -> Any:
        if self.dtype == torch.float32:
            return data
        return apply_to_collection(data, torch.Tensor, lambda x: x.to(self.dtype) if x.is_floating_point() else x)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        raise ConfigError(_BY_VALUE)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer.clip_next_step(float(clip_val))  # the engine clips in its step


def _end_torchs_group() -> None:
    # While Python runs: a thread of gloo's that drops a tensor once the interpreter is going aborts the process.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _carried(device: torch.device) -> bool:
    """Whether torch.distributed's group has a backend for tensors of the device."""
    if device.type == "cpu" or not torch.distributed.is_initialized():
        return True
    try:
        torch.distributed.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    except RuntimeError:
        return False
    return True


class LibzeroStrategy(DDPStrategy):
    """A strategy for lightning.Trainer that shards a module's states over the ranks in `fit`:

        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=LibzeroStrategy(stage=3))

    `config` and `keywords`: as for libzero.shard. Accumulation, clipping and the precision ("32-true", "bf16-mixed", and
    on a GPU "16-mixed") are the Trainer's, the optimizer and the scheduler configure_optimizers'. Started by torchrun, by
    `zero launch`, or by Lightning itself. A module is sharded by one `fit`, and stays so. `whole_checkpoints`: a checkpoint is one file,
    through rank 0, and not each rank's slices. `process_group_backend`: torch.distributed's; Lightning's choice for the
    device without it."""

    strategy_name = "libzero"

    def __init__(
        self,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        whole_checkpoints: bool = False,
        process_group_backend: str | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend)
        self._config, self._keywords, self._whole_checkpoints = config, keywords, whole_checkpoints
        self._shards: str | None = None  # the folder of the checkpoint that was opened last, if it has shards

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """What libzero.shard has returned for the module; None before `fit`."""
        return sharded_by(self.lightning_module) if self.lightning_module is not None else None

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or _Precision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) not in (Precision, MixedPrecision, _Precision):
            raise ConfigError(
                f"The Trainer has precision '{plugin.precision}'; a LibzeroStrategy takes '32-true', and 'bf16-mixed' or on "
                "a GPU '16-mixed', which train parameters in bf16 or fp16 with fp32 master weights."
            )
        self._precision_plugin = None if plugin is None else _Precision(plugin.precision)

    # --- The start.

    def setup_environment(self) -> None:
        without_rank = "WORLD_SIZE" in os.environ and "RANK" not in os.environ  # Lightning's own launcher
        if without_rank:
            os.environ["RANK"] = str(self.global_rank)
        group = _group()
        if without_rank:
            del os.environ["RANK"]
        if (group.size, group.rank) != (self.world_size, self.global_rank):
            raise ConfigError(
                f"Lightning takes this process for rank {self.global_rank} of {self.world_size}, libzero for rank "
                f"{group.rank} of {group.size}. Give the Trainer as many devices (and num_nodes) as ranks were "
                "started; where Lightning is to start them, call libzero.group() after that alone."
            )
        place = _device.resolved(self.root_device, group)
        nccl = _device.by_nccl(self._get_process_group_backend())
        if place.type == "cuda" and nccl and _device.shared(group, place):
            raise ConfigError(
                f"Two ranks have the same GPU ('{place}' of this one), and torch.distributed's group is NCCL's, which takes "
                "one rank a GPU. Start a rank for each GPU; or, to let them share it, slowly, give LibzeroStrategy "
                'process_group_backend="gloo".'
            )
        super().setup_environment()
        atexit.register(_end_torchs_group)

    def setup(self, trainer: pl.Trainer) -> None:
        self.precision_plugin.dtype = torch.float32  # of a module that is not sharded
        if trainer.state.fn != TrainerFn.FITTING and self.sharded is None:
            self._setup_whole(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        assert self.sharded is not None
        settings = json.loads(self.sharded._engine.config)
        assert isinstance(self._precision_plugin, _Precision)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if settings[name]["enabled"]:
                self._precision_plugin.dtype = dtype
        self.setup_precision_plugin()

    def _setup_whole(self, trainer: pl.Trainer) -> None:
        # Every rank has the whole model.
        assert self.accelerator is not None and self.model is not None
        if _carried(self.root_device):
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        _sync_module_states(self.model)  # on the CPU
        self.model_to_device()
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if self.sharded is not None:
            raise ConfigError(
                "The module is sharded already, by an earlier fit(). To go on, make it anew and load a checkpoint: "
                "fit(module, ckpt_path=...)."
            )
        settings = self._settings(trainer)
        super().setup_optimizers(trainer)
        given = [each for each in self.optimizers if each.param_groups]  # Lightning's stand-in for none has no groups
        if len(given) != 1:
            raise ConfigError(
                f"configure_optimizers has returned {len(given)} optimizers; a LibzeroStrategy takes one, over all "
                "that is trained. Make parameters with rates of their own groups of it; for a GAN write the loop "
                "yourself, with libzero.shard for each network."
            )
        here = _device.of(module)
        if here not in (torch.device("cpu"), self.root_device):
            module.to(self.root_device)
        sharded = shard(module, given[0], settings, device=self.root_device)
        for config in self.lr_scheduler_configs:
            follow(config.scheduler, sharded)
        self.optimizers = [sharded]

    def _settings(self, trainer: pl.Trainer) -> dict[str, Any]:
        if self._layer_sync is not None:
            raise ConfigError("The Trainer has sync_batchnorm=True, which a LibzeroStrategy does not have. Leave it out.")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ConfigError(_BY_VALUE)
        precision = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(self.precision_plugin.precision), "no")
        settings = settings_of(
            self._config,
            self._keywords,
            precision=precision,
            micro_batches=trainer.accumulate_grad_batches,
            clipping=0.0,  # the Trainer says it before each step
        )
        if trainer.gradient_clip_val and settings["gradient_clipping"] not in (0, trainer.gradient_clip_val):
            raise ConfigError(
                f"The configuration has gradient_clipping={settings['gradient_clipping']}, the Trainer "
                f"gradient_clip_val={trainer.gradient_clip_val}. Take the key out of the configuration."
            )
        return settings

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around configure_model: for stage 3 the module is built on disk (libzero.init)."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        section = self._settings(trainer).get("zero_optimization", {})
        if trainer.state.fn != TrainerFn.FITTING or section.get("stage", 0) != 3:
            yield
            return
        with init(section.get("offload_param", {}).get("nvme_path")):
            yield

    # --- Training.

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = self.sharded.scale(closure_loss) if self.sharded is not None else closure_loss
        return super().backward(loss, optimizer, *arguments, **keywords)

    def teardown(self) -> None:
        optimizers, self.optimizers = self.optimizers, []  # whose states need not move to another device
        module = self._lightning_module
        if self.sharded is not None:
            self._lightning_module = None  # which stays on its device
        try:
            super().teardown()
        finally:
            self.optimizers, self._lightning_module = optimizers, module

    # torch.distributed's group carries no tensors of some devices: then it carries copies on the CPU.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or _carried(tensor.device):
            return super().reduce(tensor, group, reduce_op)
        return tensor.copy_(super().reduce(tensor.cpu(), group, reduce_op))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if _carried(tensor.device):
            return super().all_gather(tensor, group, sync_grads)
        return super().all_gather(tensor.cpu(), group, sync_grads).to(tensor.device)

    def on_exception(self, exception: BaseException) -> None:
        # At stage 3 this rank's end meets the others', which may be waiting for it in torch's group: that ends first.
        if self.sharded is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # --- Checkpoints.

    def _saves_shards(self) -> bool:
        sharded = self.sharded
        plain = type(self.checkpoint_io) is TorchCheckpointIO
        return sharded is not None and sharded.saves_shards and plain and not self._whole_checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """{} where the states go to shards. Else the whole weights in fp32, on rank 0; {} on the others. Collective."""
        module, sharded = self.lightning_module, self.sharded
        if module is None or sharded is None:
            return super().lightning_module_state_dict()
        return {} if self._saves_shards() else with_masters(sharded, module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.sharded is not None and self._saves_shards():
            return {_checkpoints.GROUPS: self.sharded.groups_as_saved()}
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes each rank's slices to the folder `filepath`; with weights alone, or to where no local folder can be,
        whole weights and states to a file. Collective."""
        sharded, module = self.sharded, self.lightning_module
        if sharded is None or module is None or not self._saves_shards():
            if self.is_global_zero and os.path.isdir(filepath):
                _checkpoints.remove(filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with_states = "optimizer_states" in checkpoint
        if with_states and storage_options is None and "://" not in str(filepath):
            if self.is_global_zero and os.path.isfile(filepath):
                _checkpoints.remove(filepath)  # of a run that saved whole ones
            _checkpoints.save(sharded, filepath, checkpoint)
            return
        checkpoint["state_dict"] = with_masters(sharded, module)
        if with_states:
            checkpoint["optimizer_states"] = [sharded.state_dict()]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._shards = os.fspath(checkpoint_path) if _checkpoints.is_checkpoint(checkpoint_path) else None
        if self._shards is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        return _checkpoints.kept_in(self._shards, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"]):
            if _checkpoints.GROUPS in states:
                assert isinstance(optimizer, ShardedOptimizer) and self._shards is not None
                optimizer.load(self._shards)  # the weights too
                _checkpoints.put_groups(optimizer, states[_checkpoints.GROUPS])
            else:
                optimizer.load_state_dict(states)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, sharded = self.lightning_module, self.sharded
        if self._shards is not None and module is not None:
            if module.trainer.state.fn == TrainerFn.FITTING:
                return  # in load_optimizer_state_dict: the module is not sharded yet
            if sharded is not None:
                sharded.load(self._shards)
            else:
                set_all(module, _checkpoints.Weights(self._shards))
            return
        super().load_model_state_dict(checkpoint, strict)
        if module is None or sharded is None:
            return
        values = checkpoint["state_dict"]
        for parameter, names in named(module.named_parameters(remove_duplicate=False)):
            if names[0] in values:  # the master weights, which the above may have rounded
                sharded.set_parameter(parameter, values[names[0]].to(torch.float32))
