"""accelerate's Accelerator over sharded states.

Note [Accelerate and libzero]
Accelerate starts a process group of torch.distributed (gloo, or NCCL for GPUs) from what torchrun or `zero launch` has
put into the environment, unless the program has one. It chooses the device, gives each rank its batches and carries
`gather`; libzero's own group beside it carries parameters, gradients and states. `prepare` puts what libzero.shard
returns in the place of the optimizer, leaves the model as it is (no DistributedDataParallel, no autocast), and gives
schedulers the new one. A model on the CPU that is given with its optimizer goes to the device as it is sharded,
parameter by parameter; any other goes there whole, as accelerate does it."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend
except ImportError as error:
    raise ImportError("libzero.hf needs accelerate: pip install accelerate") from error

from . import _C, _checkpoints, _device
from ._C import ConfigError
from ._group import group as _group
from ._loop import follow, set_all, settings_of, sharded_by, with_masters
from ._shard import ShardedOptimizer, owner_of, shard

_OURS = ("stage", "bf16", "fp16", "zero_optimization")


class LibzeroOptimizer(AcceleratedOptimizer):
    """What `prepare` makes of an optimizer."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        super().__init__(sharded, device_placement=False)
        self._stepped = False
        self._saves_groups = False  # the states go to shards

    def state_dict(self) -> dict[str, Any]:
        if self._saves_groups:
            return {_checkpoints.GROUPS: self.optimizer.groups_as_saved()}
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and _checkpoints.GROUPS in state_dict:
            _checkpoints.put_groups(self.optimizer, state_dict[_checkpoints.GROUPS])
        else:
            super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._stepped = True

    @property
    def step_was_skipped(self) -> bool:
        return self._stepped and not self.optimizer.updated


class LibzeroAccelerator(Accelerator):
    """See `libzero.hf.accelerator`."""

    _replaced: list[tuple[torch.optim.Optimizer, ShardedOptimizer]]
    _given: list[torch.nn.Module]
    _going: set[int]  # the ids of parameters that `prepare` will shard
    _place: torch.device
    _config: dict[str, Any]
    _saves_masters = False
    _saves_shards = False
    libzero_group: _C.Group

    def __init__(
        self, *arguments: Any, config: dict[str, Any] | str | os.PathLike[str] | None = None, **keywords: Any
    ) -> None:
        ours = {key: keywords.pop(key) for key in _OURS if key in keywords}
        # Accelerate takes the processes of a machine without GPUs for ranks only where it is told so.
        wanted = os.environ.get("ACCELERATE_TORCH_DEVICE")
        keywords.setdefault("cpu", not torch.cuda.is_available() if wanted is None else torch.device(wanted).type == "cpu")
        super().__init__(*arguments, **keywords)
        settings = settings_of(
            config,
            ours,
            precision=self.mixed_precision,
            micro_batches=self.gradient_accumulation_steps,
            clipping=0.0,  # accelerator.clip_grad_norm_ clips
        )
        self._begin(settings)

    @classmethod
    def adopt(cls, accelerator: Accelerator, settings: dict[str, Any]) -> None:
        """Makes an Accelerator that exists into one of these."""
        accelerator.__class__ = cls
        accelerator._begin(settings)

    def _begin(self, settings: dict[str, Any]) -> None:
        self._config = settings
        self._replaced, self._given, self._going = [], [], set()
        self.native_amp = False  # parameters are in bf16 or fp16 themselves: no autocast,
        self.scaler = None  # and the engine scales
        self.libzero_group = _group()
        if (self.num_processes, self.process_index) != (self.libzero_group.size, self.libzero_group.rank):
            raise ConfigError(
                f"accelerate takes this process for {self.process_index} of {self.num_processes}, libzero for rank "
                f"{self.libzero_group.rank} of {self.libzero_group.size}. Start the program by torchrun or `zero launch`; "
                "on a machine without GPUs with cpu=True, or use_cpu=True in TrainingArguments, since else accelerate takes "
                "each process for one alone."
            )
        try:
            self._place = _device.resolved(self.device, self.libzero_group)
        except ConfigError as error:
            raise ConfigError(f"{error} To train on the CPU: cpu=True, or use_cpu=True in TrainingArguments.") from None
        if self._place.type == "cuda" and _device.shared(self.libzero_group, self._place) and _device.by_nccl():
            raise ConfigError(
                f"Two ranks have the same GPU ('{self._place}' of this one), and torch.distributed's group is NCCL's, which "
                "takes one rank a GPU. Start a rank for each GPU. To let them share it, slowly, choose gloo: ddp_backend="
                '"gloo" in TrainingArguments, kwargs_handlers=[accelerate.InitProcessGroupKwargs(backend="gloo")] of '
                "libzero.hf.accelerator."
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError(
                "accelerate is to compile the model. Compile it yourself, before prepare(): "
                "torch.compile(model, backend=libzero.backend)."
            )
        self.register_save_state_pre_hook(self._save_models)
        self.register_load_state_pre_hook(self._load_models)

    # --- prepare.

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As Accelerator.prepare. Collective where an optimizer is among the objects: its model must be among them
        too, or have been prepared before."""
        self._given = [each for each in objects if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer) and not _sharded(each)]
        self._going = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        try:
            return super().prepare(*objects, device_placement=device_placement)
        finally:
            self._given, self._going = [], set()

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        moves = self.device_placement if device_placement is None else device_placement
        if self._place.type == "cpu" or any(id(parameter) in self._going for parameter in model.parameters()):
            moves = False  # _shard moves it
        return super().prepare_model(model, device_placement=moves, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else self._shard(optimizer)
        prepared = LibzeroOptimizer(sharded)
        self._optimizers.append(prepared)
        return prepared

    def _shard(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._given + self._models:
            if wanted <= {id(parameter) for parameter in model.parameters()}:
                sharded = shard(model, optimizer, self._config, group=self.libzero_group, device=self._target(model))
                self._replaced.append((optimizer, sharded))
                return sharded
        raise ConfigError(
            "prepare() was given an optimizer without the model whose parameters it has. Give both to one call: "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )

    def _target(self, model: torch.nn.Module) -> torch.device | None:
        # Where libzero.shard is to move a model.
        if self._place.type == "cpu" or not self.device_placement:
            return None
        if _device.of(model) not in (torch.device("cpu"), self._place):
            model.to(self._place)
        return self._place

    def prepare_scheduler(self, scheduler: Any) -> Any:
        for old, sharded in self._replaced:
            if getattr(scheduler, "optimizer", None) is old:
                follow(scheduler, sharded)
        return super().prepare_scheduler(scheduler)

    def sharded(self, model: torch.nn.Module | None = None) -> ShardedOptimizer | None:
        """What libzero.shard has returned for a model, or for the only one; None where nothing is sharded."""
        if model is not None:
            return sharded_by(model)
        found = [each.optimizer for each in self._optimizers if isinstance(each, LibzeroOptimizer)]
        return found[0] if len(found) == 1 else None

    # --- Training.

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        only = self.sharded()
        super().backward(only.scale(loss) if only is not None else loss, **keywords)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips the gradients of the next step, of all parameters that are trained with these. Returns their norm.
        Collective."""
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        owner = next((owner for owner in map(owner_of, wanted) if owner is not None), None)
        if owner is None:
            return super().clip_grad_norm_(wanted, max_norm, norm_type)
        given = {id(parameter) for parameter in wanted}
        if any(id(parameter) not in given for group in owner.param_groups for parameter in group["params"]):
            raise ConfigError(
                "clip_grad_norm_ was given a part of the parameters that are trained together; libzero clips them by "
                "the norm of all. Give it model.parameters()."
            )
        return owner.clip_grad_norm_(float(max_norm), norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(owner_of(parameter) is not None for parameter in wanted):
            raise ConfigError(
                "clip_grad_value_: the engine clips by value in its step. Give the configuration "
                '{"gradient_clipping_value": ...}, or use accelerator.clip_grad_norm_.'
            )
        super().clip_grad_value_(wanted, clip_value)

    # --- States.

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole weights, in the model's dtype, on rank 0; {} on the others. Collective."""
        owner = self.sharded(model)
        if owner is None:
            return super().get_state_dict(model, unwrap)
        if self._saves_shards and owner.saves_shards:
            return {}
        return OrderedDict(with_masters(owner, model) if self._saves_masters else owner.full_state_dict())

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, *, whole: bool = False, **keywords: Any
    ) -> Any:
        """As Accelerator.save_state: each rank writes its slices of weights and states to the folder `libzero` in
        `output_dir`, which a run at any stage and number of ranks loads (Note [Checkpoints of other loops]).

        With `whole` rank 0 writes whole fp32 weights and states in torch's format, which accelerate loads without
        libzero too. So it is where a torch optimizer runs as it is. Collective."""
        self._saves_shards, self._saves_masters = not whole, True
        optimizers = [each for each in self._optimizers if isinstance(each, LibzeroOptimizer)]
        for each in optimizers:
            each._saves_groups = not whole and each.optimizer.saves_shards
        try:
            saved = super().save_state(output_dir, safe_serialization, **keywords)
        finally:
            self._saves_shards = self._saves_masters = False
            for each in optimizers:
                each._saves_groups = False
        self.wait_for_everyone()
        return saved

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **keywords: Any) -> Any:
        """As Accelerator.load_state, of what `save_state` wrote at any stage and number of ranks, or accelerate alone.
        Collective."""
        unknown = {key: value for key, value in keywords.items() if key != "map_location" and value is not True}
        if unknown:
            raise ConfigError(
                f"load_state was given {', '.join(unknown)}, which a sharded model does not take: every trained parameter "
                "is loaded, and what the model does not have is passed over. Leave it out."
            )
        return super().load_state(input_dir, load_kwargs, **keywords)

    def _save_models(self, models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        owners = [self.sharded(model) for model in models]
        in_shards = [self._saves_shards and owner is not None and owner.saves_shards for owner in owners]
        for index, owner in enumerate(owners):
            shards, ending = _shards(folder, index), f"_{index}" if index else ""
            whole = [os.path.join(folder, name) for name in (f"model{ending}.safetensors", f"pytorch_model{ending}.bin")]
            for other in whole if in_shards[index] else [shards]:  # of an earlier save
                if self.is_main_process:
                    _checkpoints.remove(other)
            if owner is not None and in_shards[index]:
                _checkpoints.save(owner, shards)
        if all(in_shards):
            weights.clear()  # they are empty, and accelerate would write a file of each

    def _load_models(self, models: list[torch.nn.Module], folder: str) -> None:
        # Takes all of accelerate's models, so that it loads none itself: writing to parameters would make all of a
        # model present, and would round to bf16.
        for index, model in enumerate(models):
            ending = f"_{index}" if index else ""
            shards, owner = _shards(folder, index), self.sharded(model)
            if _checkpoints.is_checkpoint(shards):
                if owner is not None:
                    owner.load(shards)
                else:
                    set_all(model, _checkpoints.Weights(shards))
                continue
            file = os.path.join(folder, f"model{ending}.safetensors")
            if os.path.exists(file):
                load_weights(model, [file])
            else:
                file = os.path.join(folder, f"pytorch_model{ending}.bin")
                set_all(model, torch.load(file, map_location="cpu", mmap=True))
        models.clear()


def _sharded(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, (ShardedOptimizer, AcceleratedOptimizer))


def _shards(folder: str, index: int) -> str:
    return os.path.join(folder, f"libzero_{index}" if index else "libzero")


def load_weights(model: torch.nn.Module, files: list[str]) -> None:
    """Sets a model's parameters and buffers from safetensors files, one after the other. A parameter that none of
    them has, under any of its names, is an error unless it is frozen. Collective where the model is sharded."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            where.update((name, opened) for name in opened.keys())
        set_all(model, _Lazy(where))


class _Lazy(dict):  # type: ignore[type-arg]
    """Names to open files; gives tensors."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).get_tensor(name)
