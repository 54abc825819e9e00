"""`shard`: a model and a torch optimizer go in, a torch optimizer whose states are partitioned over ranks comes out."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import _build, _C, _casts, _compile, _device, _dropped, _options, _state, _tensor, _zero1
from ._C import ConfigError, Error
from ._config import check, origin_of, text_of
from ._group import group as _group
from ._tensor import owner_of


def shard(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    config: dict[str, Any] | str | os.PathLike[str] | None = None,
    *,
    group: _C.Group | None = None,
    lenient: bool = False,
    native: bool = True,
    cast_forward_inputs: bool = False,
    weights: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    **keywords: Any,
) -> ShardedOptimizer:
    """Shards `model`'s states over the ranks, and returns the optimizer that trains it.

        opt = libzero.shard(model, torch.optim.AdamW(model.parameters(), lr=3e-4), stage=3)
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()

    `optimizer` says what is to be done (its groups and their hyper-parameters) and is used no more; several, as Muon
    for matrices and AdamW for the rest, become one; None: what the configuration's `optimizer` section says. AdamW,
    Adam, SGD, Adagrad, Adafactor and Muon run as the engine's own. Any other, and all with `native=False`, runs as it
    is, with each rank updating its part of the parameters (ZeRO-1): at stages 0 and 1 alone.

    `config`: a dict or a file with DeepSpeed's keys; `keywords`: top-level keys, `stage=3` for
    zero_optimization.stage, `bf16=True` for bf16.enabled. A configuration that does not say otherwise clips gradients
    to a norm of 1, as DeepSpeed does; keywords alone clip nothing. `lenient`: what libzero does not have becomes a warning.
    `cast_forward_inputs`: what the model is called with is cast to its dtype, where it is in floating point.

    `weights`: a safetensors file, or a folder as save_pretrained writes it (.bin and .pt files, too), whose values the
    parameters get. Each rank reads its own part of them, in pieces of 16 MiB. A model that was built within
    `libzero.init(values=False)` needs it. Without it all ranks get rank 0's values.

    `device`: where a model on the CPU goes ("cuda": the GPU of this rank's number on its host). It moves parameter by
    parameter, so that at stage 3 the device never holds all of it. Without it the model stays where it is.

    The model keeps its parameters; their bytes come and go at stage 3. Their `.grad`
    stays None: see `gradient` and `grad_norm` of what is returned. Collective. Throws ConfigError, OutOfMemory,
    CommError; the model is then as it was. CheckpointError: the model's values are gone where it had some, and another
    call with `weights` gives it new ones."""
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    text = text_of(config, keywords)
    if weights is not None and not isinstance(weights, (str, os.PathLike)):
        raise ConfigError(f"weights is a {type(weights).__name__}; it is the path of a safetensors file, or of a folder.")
    return ShardedOptimizer(
        model, optimizers, text, group or _group(), lenient, native, origin_of(config), cast_forward_inputs, weights, device
    )


class _Empty(torch.optim.Optimizer):
    """Stands in where the configuration names the optimizer."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class ShardedOptimizer(torch.optim.Optimizer):
    """What `shard` returns: a torch.optim.Optimizer with the groups of the one that it was given, so that torch's
    learning-rate schedulers act on it. Made by `shard`.

    Functions marked "collective" talk to the other ranks: all ranks call them, in the same order."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        config: str,
        group: _C.Group,
        lenient: bool,
        native: bool,
        origin: str,
        cast_forward_inputs: bool = False,
        weights: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"libzero.shard was given a {type(model).__name__}; the model must be a torch.nn.Module.")
        _check_optimizers(optimizers)
        _check_shapes(model)
        _compile.install()  # before the next: torch's compiler is imported while tensors are as torch made them
        _tensor.install()
        configuration = _C.Configuration(config, group.size, lenient, origin)
        settings = json.loads(configuration.dump())
        check(settings, lenient)
        if group.rank == 0:
            for text in configuration.warnings:
                warnings.warn(text, stacklevel=4)
        self.group = group
        self.device = _device_of(model, device, group)
        moves = self.device != _device.of(model)
        self._carrier = _device.carrier(group, self.device)  # the same ranks
        self._model = weakref.ref(model)
        files = None if weights is None else os.fspath(weights)
        absent = _build.expect_values(model, files)
        named = _compile.unwrapped(model.named_parameters(remove_duplicate=False))
        names = {id(parameter): name for name, parameter in reversed(named)}
        groups = _options.groups_of(optimizers, names) if optimizers and native else None
        self._zero1: _zero1.PartitionedUpdates | None = None
        if optimizers and groups is None:
            if len(optimizers) > 1:
                raise ConfigError("native=False takes one torch optimizer, with several parameter groups where needed.")
            stage, fp16 = settings["zero_optimization"]["stage"], settings["fp16"]["enabled"]
            _zero1.check(optimizers[0], model, native, stage, fp16)
            if weights is not None:
                raise ConfigError(
                    f"weights= is for optimizers that libzero has, and {type(optimizers[0]).__name__} runs as torch's own. "
                    "Load the weights before libzero.shard, or take AdamW, Adam, SGD, Adagrad, Adafactor or Muon."
                )
            self._zero1 = _zero1.PartitionedUpdates(optimizers[0], self._carrier, settings)
            groups = [(list(names.values()), '{"type": "SGD", "params": {"lr": 0.0}}')]
        if not optimizers:
            if "optimizer" not in settings:
                raise ConfigError(
                    "libzero.shard was given no optimizer, and the configuration has no `optimizer` section. Pass a "
                    'torch optimizer over the model\'s parameters, or add {"optimizer": {"type": "AdamW", "params": '
                    '{"lr": 3e-4}}}.'
                )
            optimizers = [_Empty(model, settings["optimizer"]["params"]["lr"])]
        # A file's own schedule, by group.
        self._schedules = [
            configuration.schedule(float(made["lr"])) for each in optimizers for made in each.param_groups
        ]
        if self._zero1 is not None:
            configuration = _C.Configuration(_zero1.engine_config(settings, self.device), group.size, lenient, origin)
        weak = self._model

        def again() -> list[tuple[str, torch.Tensor]] | None:
            alive = weak()
            return None if alive is None else _compile.unwrapped(alive.named_parameters(remove_duplicate=False))

        _dropped.end_gone(group)
        buffers = _compile.unwrapped(model.named_buffers(remove_duplicate=False))
        self._engine = _C.Engine(named, buffers, again, groups or [], configuration, self._carrier, weights is not None)
        if files is not None:
            self._read(files, absent)
        _dropped.keep(self, self._engine, group)
        self._kinds = [type(each) for each in optimizers for _ in each.param_groups]
        # What the engine takes for trainable, whatever is frozen later.
        self._trainable = {names[id(parameter)] for _, parameter in named if parameter.requires_grad}
        super().__init__([group for each in optimizers for group in each.param_groups], optimizers[0].defaults)
        # What the engine trains each group with.
        self._sections = [json.loads(text) for _, text in groups] if groups else [settings["optimizer"]]
        if self._zero1 is not None:
            self._sections = [{"params": {}} for _ in self.param_groups]
        self._fixed = [
            _options.fixed_of(kind, each, section["params"])
            for kind, each, section in zip(self._kinds, self.param_groups, self._sections)
        ]
        self._members = [list(map(id, each["params"])) for each in self.param_groups]
        self._names = names
        self._states = _state.States(self, self._zero1 or _state.EngineStates(self))
        self._micro_batches = int(settings["gradient_accumulation_steps"])
        self._clipping, self._clipping_once = float(settings["gradient_clipping"]), None  # type: float, float | None
        self._previous_norm = bool(settings.get("clip_by_previous_norm"))
        self._zeros: set[int] = set()  # parameters whose gradient is zero where none comes
        self._used = False  # the gradients of the last step have not been dropped,
        self._without: set[int] = set()  # but for those of these parameters
        self._paged = self._engine.pager() is not None
        self._result: dict[str, Any] = {"grad_norm": None, "updated": False, "boundary": False}
        if self._zero1 is not None:
            self._zero1.start()
        _tensor.own(model.parameters(), self)
        if moves:  # what else the model has there, as modules that override `to` know
            model.to(self.device)
        self._casts = _casts.install(model, settings, cast_forward_inputs)
        for each in optimizers:
            _tensor.guard(each, self)

    def _read(self, weights: str, absent: list[torch.nn.Parameter]) -> None:
        try:
            left_over, kept = self._engine.load_pretrained(weights)
        except BaseException:
            self._engine.close()
            for parameter in absent:
                parameter.data = _C.absent(parameter)
            raise
        model = self._model()
        known = {name for name, _ in _compile.unwrapped(model.named_parameters(remove_duplicate=False))}
        self._tell(f"{weights} holds {{}} tensors that the model does not have: {{}}", left_over, known)  # but other names of tied ones
        unsaved = {
            f"{path}.{name}".lstrip(".").replace("_orig_mod.", "")
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        self._tell(f"{weights} has no values for these buffers, which keep those of the model: {{1}}", kept, unsaved)

    def _tell(self, what: str, names: list[str], but: set[str]) -> None:
        names = [name for name in names if name not in but]
        if names and self.group.rank == 0:
            warnings.warn(what.format(len(names), ", ".join(names[:5]) + ", ..." * (len(names) > 5)), stacklevel=6)

    # --- Training.

    @_compile.untraced
    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, with the loss scaled where it must be (fp16). Collective at stages 2 and 3, as
        loss.backward() is."""
        self._engine.backward(loss)

    @_compile.untraced
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """For `opt.scale(loss).backward()` in fp16; the loss itself where nothing is scaled."""
        return self._engine.scale(loss)

    @torch.no_grad()
    @_compile.untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters from the gradients since the last call. With gradient_accumulation_steps of k in the
        configuration it counts a micro-batch, and updates at every k-th call. Without that key any number of backward
        passes may come before it. Returns what `closure` returned. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        self._states.write_back()
        if self._zeros and self._engine.micro_batches + 1 >= self._micro_batches:
            self._set_zeros()
        if self._zero1 is not None:
            self._zero1.before_step(self)
        self._result = self._engine.step()
        if self._zero1 is not None:
            self._zero1.after_step(self, self._result)
        if self._result["boundary"]:
            self._states.stepped()
            self._used = True
            self._without.clear()
            self._clip_lastingly()
        return loss

    @_compile.all_untraced
    def _follow_groups(self) -> None:
        if [list(map(id, group["params"])) for group in self.param_groups] != self._members:
            raise Error(
                "The parameters in opt.param_groups are not those that libzero.shard was given: the engine's groups are "
                "fixed. Leave the lists of parameters as they are (a learning rate of 0 or requires_grad_(False) "
                "keeps parameters as they are), or shard the model anew."
            )
        for index, (group, schedule) in enumerate(zip(self.param_groups, self._schedules)):
            if schedule is not None:
                _options.put(group, "lr", schedule.rate(self._engine.steps + 1))
                betas = schedule.betas(self._engine.steps + 1)
                if betas is not None and "betas" in self._sections[index]["params"]:
                    _options.put(group, "betas", betas)
            if self._zero1 is not None:
                continue
            kind, section = self._kinds[index], self._sections[index]
            now = _options.fixed_of(kind, group, section["params"])
            for key, value in self._fixed[index].items():
                if now.get(key) != value:
                    free = ", ".join(_options.followed_of(kind, section["params"]))
                    raise Error(
                        f"'{key}' of parameter group {index} was changed from {value!r} to {now.get(key)!r}; of a "
                        f"sharded optimizer only {free} may change. Set it before libzero.shard."
                    )
            if changed := _options.changed(kind, group, section["params"]):
                section = {**section, "params": {**section["params"], **changed}}
                self._engine.set_optimizer(json.dumps(section), index)
                self._sections[index] = section
            self._engine.set_lr(float(group["lr"]), index)

    @_compile.untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last `step`; in the middle of an accumulation those of all its micro-batches.
        Right behind `step` there is nothing to drop, and what it has counted stays. To be called by every rank in the
        same place; collective at stages 0 and 1 between hosts. `set_to_none=False`: the parameters that had a gradient
        have one of zeros in the next steps where none comes, so that decay and momentum go on, until
        `zero_grad()`; collective."""
        if set_to_none:
            self._zeros.clear()
        else:
            used = self._engine.gradients_used() if self._used else []
            self._zeros.update(index for index, there in enumerate(used) if there and index not in self._without)
            self._zeros.update(index for index, there in enumerate(self._engine.gradients_present()) if there)
        self._used = False
        self._clip_lastingly()
        self._engine.drop_gradients()

    def forget_zeros(self, parameters: Iterable[torch.Tensor]) -> None:
        """Some parameters have no gradient any more, not one of zeros either."""
        given = {id(parameter) for parameter in parameters}
        by_id = {name: key for key, name in self._names.items()}
        indices = {index for index, name in enumerate(self._engine.parameter_names) if by_id[name] in given}
        self._zeros -= indices
        self._without |= indices

    def _set_zeros(self) -> None:
        present, names = self._engine.gradients_present(), self._engine.parameter_names
        for index in sorted(self._zeros):
            if not present[index]:
                zeros = torch.zeros(self._tensor_of(names[index]).shape, dtype=torch.float32, device="cpu")
                self._engine.set_gradient(names[index], zeros)

    @_compile.untraced
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ of all parameters: clips the gradients of the next `step`, and of no other,
        to this norm, whatever `gradient_clipping` is, and returns their norm before that. For each step's norm alone
        `grad_norm` costs nothing. `foreach` says how torch computes, and changes nothing. Collective."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ was called with norm_type={norm_type}; libzero clips by the 2-norm.")
        if self._previous_norm:
            raise ConfigError(
                "clip_grad_norm_ was called, which clips by the norm of this step, and clip_by_previous_norm is true. "
                "Leave one of them out; set_gradient_clipping changes the largest norm."
            )
        before = self._clipping_once
        norm = math.hypot(*self._engine.group_norms())
        if before is not None:  # has clipped them already
            norm = min(norm, before)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                "The norm of the gradients is not finite, and clip_grad_norm_ was called with error_if_nonfinite=True."
            )
        self.clip_next_step(max_norm if before is None else min(max_norm, before))
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def clip_next_step(self, max_norm: float) -> None:
        """As `clip_grad_norm_`, without the norm."""
        # The engine's 0 is no clipping.
        self._clip(0.0 if math.isinf(max_norm) else max(float(max_norm), sys.float_info.min) if max_norm >= 0 else -1.0)
        self._clipping_once = float(max_norm)

    def set_gradient_clipping(self, max_norm: float) -> None:
        """The largest gradient norm from the next `step` on; 0: nothing is clipped."""
        self._clip(float(max_norm))
        self._clipping, self._clipping_once = float(max_norm), None

    def _clip(self, max_norm: float) -> None:
        self._engine.set_gradient_clipping(max_norm)
        if self._zero1 is not None:
            self._zero1.set_gradient_clipping(max_norm)

    def _clip_lastingly(self) -> None:
        if self._clipping_once is not None:
            self.set_gradient_clipping(self._clipping)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_fixed" in self.__dict__:
            raise Error(
                "A parameter group cannot be added to a sharded optimizer. Make the torch optimizer with all groups "
                "before libzero.shard."
            )
        super().add_param_group(param_group)

    @property  # type: ignore[override]
    def state(self) -> _state.States:
        """The optimizer's states by parameter, as torch's optimizers have them: a view of what the ranks keep, which
        reads, writes and deletes them. Collective."""
        return self._states

    @state.setter
    def state(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        if "_states" in self.__dict__:  # else torch's constructor
            self._states.clear()
            self._states.update(states)

    def __getattr__(self, name: str) -> Any:
        # The engine's schedule-free AdamW has `eval` and `train`: the weights for evaluation come into force, and go.
        # Collective.
        if name in ("eval", "train") and _options.evaluates(self.__dict__.get("_sections", ())):
            return getattr(self._engine, f"optimizer_{name}")
        # An optimizer that runs as it is may have more than torch's class (schedule-free: `train` and `eval`).
        zero1 = self.__dict__.get("_zero1")
        if zero1 is None or name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return zero1.own(self, name)

    # --- What a step was.

    @property
    def grad_norm(self) -> float | None:
        """The norm of the mean gradient over all ranks in the last update, before clipping."""
        return self._result["grad_norm"] if self._result["boundary"] else None

    @property
    def updated(self) -> bool:
        """The last `step` has changed the weights: it was no micro-batch in the middle of an accumulation, and no
        gradient was infinite or NaN."""
        return bool(self._result["updated"])

    @property
    def pending(self) -> bool:
        """Gradients wait for `step`: a backward pass has ended since the last update."""
        return bool(self._engine.passed or self._engine.micro_batches > 0)

    @property
    def steps(self) -> int:
        """Updates so far."""
        return int(self._engine.steps)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 where losses are not scaled."""
        return float(self._engine.loss_scale)

    # --- States by name.

    def name_of(self, parameter: str | torch.Tensor) -> str:
        """The name of a parameter that is given by its tensor (or by its name)."""
        if isinstance(parameter, str):
            return parameter
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise ConfigError(
                "The tensor is no parameter of the model that was given to libzero.shard."
            ) from None

    def _tensor_of(self, parameter: str | torch.Tensor) -> torch.Tensor:
        model = self._model()
        if isinstance(parameter, torch.Tensor) or model is None:
            return parameter  # type: ignore[return-value]
        named = dict(_compile.unwrapped(model.named_parameters(remove_duplicate=False)))
        if parameter not in named:
            raise ConfigError(f"The model has no parameter '{parameter}'.")
        return named[parameter]

    def _refuse_partitioned(self, function: str) -> None:
        if self._zero1 is not None:
            self._zero1.refuse(function)

    def parameter(self, parameter: str | torch.Tensor) -> torch.Tensor:
        """A whole parameter in fp32 (the master weights). Collective."""
        if self._zero1 is not None:
            master = self._zero1.parameter(self._tensor_of(parameter))
            if master is not None:
                return master
        return self._engine.parameter(self.name_of(parameter))

    def set_parameter(self, parameter: str | torch.Tensor, value: torch.Tensor) -> None:
        """Sets it, to the same value on every rank. Collective."""
        self._engine.set_parameter(self.name_of(parameter), value)

    def gradient(self, parameter: str | torch.Tensor) -> torch.Tensor | None:
        """The whole mean gradient over ranks so far, in fp32, before clipping; None where no rank has one. Between
        backward and `step`. Collective."""
        return self._engine.gradient(self.name_of(parameter))

    def set_gradient(self, parameter: str | torch.Tensor, value: torch.Tensor | None) -> None:
        """Puts a mean gradient in the place of what backward has brought, the same on every rank; None drops it, so
        that `step` leaves the parameter alone. Collective."""
        self._engine.set_gradient(self.name_of(parameter), value)
        if value is None:
            self.forget_zeros([self._tensor_of(parameter)])

    def optimizer_state(self, parameter: str | torch.Tensor, state: str) -> torch.Tensor:
        """A whole state of the optimizer, by torch's name ("exp_avg"). Collective."""
        self._states.write_back()
        if self._zero1 is not None:
            name = self.name_of(parameter)
            return self._zero1.optimizer_state(self._tensor_of(parameter), name, state)
        return self._engine.optimizer_state(self.name_of(parameter), state)

    def set_optimizer_state(self, parameter: str | torch.Tensor, state: str, value: torch.Tensor) -> None:
        """Sets it, to the same value on every rank. Collective."""
        self._refuse_partitioned("set_optimizer_state")
        self._states.write_back()
        self._states.stepped()
        self._engine.set_optimizer_state(self.name_of(parameter), state, value)

    def gathered(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor] | None = None,
        write: bool = False,
        modifier_rank: int | None = None,
    ) -> Gathered:
        """`with opt.gathered(parameters): ...`: they are whole on this rank inside, for code that reaches for their
        memory; all of the model's without `parameters`. With `write` or `modifier_rank` what is written there counts
        on leaving, which is collective: `modifier_rank`'s values for all, or else the same on every rank."""
        wanted = _list_of(parameters)
        model = self._model()
        whole = wanted or (list(model.parameters()) if model is not None else [])
        return Gathered(self._engine, wanted, whole, write, modifier_rank)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """What `model.state_dict()` of a model that is not sharded holds, on rank 0, in the dtype that it trains in, on
        the CPU; {} on the others. Needs memory for the whole model there. Collective."""
        model = self._model()
        if model is None:
            raise Error("The model is gone: its state dict cannot be made.")
        values: dict[str, torch.Tensor] = {}

        def keep(name: str, value: torch.Tensor) -> None:
            values[name] = _plain(value)

        self._engine.visit_parameters(keep)
        if self.group.rank != 0:
            return {}
        # A model's own state_dict() may leave parts out, rename or take no arguments: its values are known by their
        # memory.
        by_place = {_place(parameter): self.name_of(parameter) for parameter in model.parameters()}
        return {
            name: values[by_place[_place(value)]] if _place(value) in by_place else _plain(value)
            for name, value in model.state_dict().items()
        }

    # --- Saving.

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """In torch's own format, which torch's optimizer of the same kind loads: whole on rank 0, without states on
        the others, on the CPU. `save` writes shards, and needs no memory for the whole. Collective."""
        with self._states.packing():
            return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict`, or torch's own optimizer of the same kind, has saved: rank 0's counts, whatever the
        others give. Collective."""
        state_dict = dict(state_dict or {})
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._states.stepped()
        if self._zero1 is not None:
            self._zero1.load_state_dict(self, state_dict)
        else:
            self._load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first = self.group.rank == 0
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        trained = [(index, each) for index, each in enumerate(parameters) if self.name_of(each) in self._trainable]

        def problem() -> str:
            found = (self._states.problem(each, state_dict["state"].get(index, {})) for index, each in trained)
            return next(filter(None, found), "")

        groups = _zero1.saved_groups(self, state_dict, problem)
        for index, saved in enumerate(groups):
            for key in _options.keys_of(self._kinds[index]):
                mine = self._fixed[index].get(key)
                if key in self._fixed[index] and key in saved and saved[key] != mine:
                    raise ConfigError(
                        f"'{key}' of parameter group {index} is {saved[key]!r} in the state dict and {mine!r} here. "
                        "Make the torch optimizer with the same before libzero.shard."
                    )
        before = [{key: copy.deepcopy(each) for key, each in group.items() if key != "params"} for group in self.param_groups]
        for kind, section, group, saved in zip(self._kinds, self._sections, self.param_groups, groups):
            followed = _options.followed_of(kind, section["params"])
            for key in (*followed, "initial_lr"):
                if key in saved:
                    _options.put(group, key, saved[key])
        try:
            self._follow_groups()
        except Error:  # of other states
            for group, old in zip(self.param_groups, before):
                for key, value in old.items():
                    _options.put(group, key, value)
            raise
        saved_states = state_dict["state"] if first else {}
        for index, parameter in trained:
            self._states.put(parameter, saved_states.get(index, {}))

    def groups_as_saved(self) -> list[dict[str, Any]]:
        """The groups without their parameters: what a file of `save` or `save_full` lacks."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    @property
    def saves_shards(self) -> bool:
        """`save` and `load` have all states: no torch optimizer runs as it is, whose states `state_dict` has alone."""
        return self._zero1 is None

    def save(
        self,
        folder: str | os.PathLike[str],
        attached: Mapping[str, str] | None = None,
        *,
        background: bool = False,
        staging_bytes: int = 256 << 20,
    ) -> None:
        """Writes each rank's shards of weights and states to a file a rank in `folder`, which appears whole or not at
        all, with the texts that the rank has `attached`. With `background` it returns once parameters and buffers are
        copied, and the states of this moment are written beside the steps that follow; `staging_bytes` is the memory for
        states that a step changes before they are written. `complete_save`, the next `save` and `load` wait for it.
        Collective."""
        self._refuse_partitioned("save")
        self._states.write_back()
        self._engine.save(os.fspath(folder), dict(attached or {}), background, staging_bytes)

    def complete_save(self) -> None:
        """Waits for a save in the background, and throws what has failed in it: the earlier save in its folder stays
        then. Collective."""
        self._engine.complete_save()

    def load(self, folder: str | os.PathLike[str]) -> dict[str, str]:
        """Takes what `save` wrote, at any number of ranks and stage, and returns the texts that this rank had attached.
        Collective."""
        self._refuse_partitioned("load")
        self._states.stepped()
        return self._engine.load(os.fspath(folder))

    def save_full(self, file: str | os.PathLike[str]) -> None:
        """Weights and states, whole, to one safetensors file, which loads at any stage and number of ranks.
        Collective."""
        self._refuse_partitioned("save_full")
        self._states.write_back()
        self._engine.save_full(os.fspath(file))

    def load_full(self, file: str | os.PathLike[str]) -> None:
        """What `save_full` wrote. Collective."""
        self._refuse_partitioned("load_full")
        self._states.stepped()
        self._engine.load_full(os.fspath(file))

    def load_weights(self, file: str | os.PathLike[str]) -> None:
        """The parameters in any safetensors file; the optimizer begins anew. Collective."""
        self._states.stepped()
        self._engine.load_weights(os.fspath(file))
        if self._zero1 is not None:
            self._zero1.restart()

    # --- Accounts.

    def memory(self) -> dict[str, Any]:
        """Bytes of this rank: by the formula of ZeRO ("formula", and "host" for what lies in the host tier), and as
        counted ("now" and "peak" by category). "partitioned": what a torch optimizer keeps that runs as it is."""
        counted = self._carrier.memory()
        return {
            "formula": self._engine.memory_formula(),
            "host": self._engine.host_memory_formula(),
            **({"partitioned": self._zero1.memory()} if self._zero1 is not None else {}),
            "now": {name: both[0] for name, both in counted.items()},
            "peak": {name: both[1] for name, both in counted.items()},
        }

    def traffic(self) -> dict[str, Any]:
        """Bytes that this rank sends: by the formula in a step ("formula"), and as counted since the group was made
        ("sent", by collective). "partitioned": the new parameters, of a torch optimizer that runs as it is."""
        return {
            "formula": self._engine.traffic_formula(),
            **({"partitioned": self._zero1.sent()} if self._zero1 is not None else {}),
            "sent": self.group.traffic(),
        }

    def diverged_parameters(self) -> list[str]:
        """The parameters that ranks should hold the same of and do not, by checksums. Collective."""
        return self._engine.diverged_parameters()

    # --- The end.

    @property
    def paged(self) -> bool:
        """Parameters are sharded (stage 3), and their bytes come and go."""
        return self._paged

    @property
    def runs_inner(self) -> bool:
        """The torch optimizer is making the update."""
        return self._zero1 is not None and self._zero1.running

    @property
    def open(self) -> bool:
        return "_engine" in self.__dict__ and self._engine.open

    def close(self) -> None:
        """Ends the sharding. At stages 0 to 2 the parameters stay whole; at stage 3 they are gone, and using one says
        so: export them before. Collective at stage 3. An optimizer that is dropped without it at stage 3
        lives on until the next `shard`: the garbage collector must not wait for other ranks."""
        for handle in self._casts:
            handle.remove()
        self._engine.close()
        self._carrier = self.group

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self.open:
            return "ShardedOptimizer(closed)"
        kinds = " + ".join(dict.fromkeys(kind.__name__ for kind in self._kinds))
        return f"ShardedOptimizer({kinds}, rank {self.group.rank} of {self.group.size}, {self.steps} steps)"

    def __getstate__(self) -> dict[str, Any]:
        raise Error(
            "A sharded optimizer cannot be pickled or copied: its states are on all ranks. Use opt.state_dict(), "
            "opt.save(folder) or opt.save_full(file)."
        )


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer] | None) -> None:
    if optimizers is None:
        return
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise ConfigError(
            f"libzero.shard was given a {type(optimizers).__name__} as the optimizer; it must be a "
            "torch.optim.Optimizer over the model's parameters, several in a list, or None."
        )
    for each in optimizers:
        if isinstance(each, ShardedOptimizer):
            raise ConfigError("libzero.shard was given an optimizer that it made itself. Give it torch's own.")
        if any(states and float(states.get("step", 1)) > 0 for states in each.state.values()):
            raise ConfigError(
                "The torch optimizer has stepped already, and its states would be lost. Give libzero.shard a new one, "
                "then load the states: opt.load_state_dict(old.state_dict())."
            )


def _device_of(model: torch.nn.Module, device: torch.device | str | None, group: _C.Group) -> torch.device:
    """Where the model is to train."""
    here = _device.of(model)
    if device is None:
        return here
    there = _device.resolved(device, group)
    if here.type != "cpu" and here != there:
        raise ConfigError(
            f"libzero.shard was given device='{there}', and the model lies on {here}. Leave `device` out, or move the model "
            f"before: model.to('{there}')."
        )
    return there


def _check_shapes(model: torch.nn.Module) -> None:
    # A lazy module's, before its first forward pass.
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"'{name}' has no shape yet (a lazy module). Run the model forward once, on inputs of the shapes to come, "
                "before the torch optimizer and libzero.shard."
            )


def _place(value: Any) -> Any:
    # Tells whose elements a tensor has, whether these are there or not.
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return _tensor.storage_of(value), value.storage_offset(), value.shape, value.stride()


def _plain(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _list_of(parameters: torch.Tensor | Iterable[torch.Tensor] | None) -> list[torch.Tensor]:
    if parameters is None:
        return []
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


class Gathered:
    """What `gathered` returns: a context manager."""

    # `parameters`: as the engine takes them, none for all; `whole`: what they are.
    def __init__(
        self,
        engine: _C.Engine,
        parameters: list[torch.Tensor],
        whole: list[torch.Tensor],
        write: bool,
        modifier_rank: int | None,
    ) -> None:
        self._engine, self._parameters, self._whole = engine, parameters, whole
        self._write, self._rank = write or modifier_rank is not None, modifier_rank
        self._scope: _C.Gathered | None = None

    def __enter__(self) -> Gathered:
        self._scope = self._engine.gathered(self._parameters, self._write, self._rank)
        self._release = _tensor.hold(self._whole)
        return self

    def __exit__(self, *exception: object) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            self._release()
            scope.close()


def gathered(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    write: bool = False,
    modifier_rank: int | None = None,
) -> Gathered:
    """As `opt.gathered`, of the optimizer that the parameters (or a module's) belong to."""
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    wanted = _list_of(parameters)
    owners = {id(owner): owner for owner in map(owner_of, wanted) if owner is not None}
    if len(owners) != 1:
        raise ConfigError(
            f"libzero.gathered was given parameters of {len(owners)} sharded models; they must be of one."
            + ("" if owners else " Give the model to libzero.shard first.")
        )
    return next(iter(owners.values())).gathered(wanted, write, modifier_rank)
