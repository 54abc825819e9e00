"""Plans: which configurations of ZeRO fit a module on described machines, and how fast they are."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import _C, _compile, _tensor
from ._C import ConfigError
from ._shard import _check_shapes

_Loss = Callable[[torch.nn.Module, int], torch.Tensor]
_Switch = Callable[[torch.nn.Module, bool], Any]


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`; docs/zero-plan.md explains the figures. As a text it is the table of `zero plan`."""

    answer: dict[str, Any]  # all of it, as JSON: what `zero plan --json` writes
    cluster: dict[str, Any]  # the machines, as `hardware` takes them
    text: str
    # With `tokens`: the seconds and device hours that they take with the best one, and the cost where there is a price.
    training: dict[str, Any] | None = None
    # With `scale`: the fastest of each number of ranks, as a candidate with "ranks", and "training" with `tokens`.
    scale: tuple[dict[str, Any], ...] = ()

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """The best one comes first. Those that do not fit say what they lack."""
        return list(self.answer["candidates"])

    @property
    def best(self) -> dict[str, Any]:
        return dict(self.answer["candidates"][0])

    @property
    def fits(self) -> bool:
        return bool(self.best["fits"])

    @property
    def recomputed(self) -> bool:
        """The best one recomputes activations, which the program switches on."""
        return bool(self.best["recomputed"])

    @property
    def config(self) -> dict[str, Any]:
        """The best one's configuration, for `libzero.shard(config=...)`. Throws ConfigError where nothing fits."""
        if not self.fits:
            raise ConfigError(str(self.answer["zero_or_not"]))
        return self.config_of(self.best)

    @staticmethod
    def config_of(candidate: dict[str, Any]) -> dict[str, Any]:
        """A candidate's configuration, for `libzero.shard(config=...)`."""
        # Recomputation and autocast are the program's.
        left_out = ("activation_checkpointing", "torch_autocast")
        return {key: value for key, value in candidate["ds_config"].items() if key not in left_out}

    def __str__(self) -> str:
        return self.text


def plan(
    model: torch.nn.Module,
    loss: _Loss | None = None,
    *,
    batch: int,
    sequence: int | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    device: str | None = None,
    hosts: int | None = None,
    per_host: int | None = None,
    hardware: dict[str, Any] | str | os.PathLike[str] | None = None,
    here: bool = False,
    optimizer: str | dict[str, Any] = "AdamW",
    recompute: _Switch | None = None,
    most_micro_batch: int = 64,
    updates: list[str] | tuple[str, ...] = (),
    scale: tuple[int, int] | None = None,
    tokens: float | None = None,
    price: float | None = None,
) -> Plan:
    """Plans the training of any module. Nothing is trained, and no memory is taken: the module's forward and backward
    pass run on shapes alone, and the module is then as it was.

    `loss(model, n)` makes a batch of n samples, of any values and on any device, calls the model and returns the loss.
    It must not read values (`item`, branches on data). Without it the model is called as transformers' are, with
    `input_ids` and `labels` (tokens, or of classifiers of sequences one a sample). A micro-batch that the model itself
    refuses, as BatchNorm does one sample, is left out, and the text says so. `batch`: samples of a step, over all ranks.
    `sequence`: tokens of a sample (without `loss`: 1024, or what the model takes; else 1, which counts samples).
    `dtype`: "bf16", with fp32 master weights (as without autocast), or "fp32" (as with it).
    `autocast`: "bf16" or "fp16", where steps compute their loss in a scope of torch.autocast; without it, that of the
    scope that this is called in. A scope in `loss` acts too, if it is of the planned device ("cpu" of a CPU, else
    "cuda", which acts here without a GPU). `device` ("h100"),
    `hosts` (1) and `per_host` are the machines, as in `zero plan`; or `hardware`: its JSON file, or the same as a dict;
    or `here`: this machine, measured, with `per_host` ranks (2). `optimizer`: its name or a configuration's `optimizer` section.
    `recompute(model, on)` switches recomputation on or off, and lets the plan try it; transformers' models have their
    own. `updates`: times of updates to try beside those in the step, "in-backward" and "delayed". `scale`:
    numbers of ranks from and to, doubling, with the batch of a rank, for `Plan.scale`. `tokens` to train on, and `price`
    of a device for an hour: for `Plan.training` and each of `Plan.scale`. A model in evaluation mode is traced in training mode, and dropout acts as it does there.

    Throws ConfigError for what it cannot use, and Error naming an operator that cannot be traced."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"libzero.plan was given a {type(model).__name__}; the model must be a torch.nn.Module.")
    _check_shapes(model)
    autocast = _autocast_around() if autocast is None else autocast
    if autocast not in (None, "bf16", "fp16"):
        raise ConfigError(f"libzero.plan's autocast is {autocast!r}; it must be 'bf16' or 'fp16'.")
    if dtype is None:
        dtype = "bf16" if autocast is None else "fp32"
    if dtype not in ("bf16", "fp32"):
        raise ConfigError(f"libzero.plan's dtype is {dtype!r}; it must be 'bf16' or 'fp32'.")
    if (dtype, autocast) == ("bf16", "fp16"):
        raise ConfigError("libzero.plan's dtype is 'bf16', and its autocast is 'fp16': use 'bf16' for both, or dtype='fp32'.")
    _check_trainings(scale, tokens, price)
    for name, value in (("batch", batch), ("most_micro_batch", most_micro_batch), ("sequence", 1 if sequence is None else sequence)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"libzero.plan's {name} is {value!r}; it must be a whole number above 0.")
    _check_machines(here, {"hardware": hardware, "device": device, "hosts": hosts, "per_host": per_host})
    if loss is None:
        sequence = _length(model, sequence)
        loss = _language_loss(model, sequence)
    if recompute is None:
        recompute = _switch_of(model)
    if isinstance(updates, str) or not all(isinstance(each, str) for each in updates):
        raise ConfigError(f"libzero.plan's updates are {updates!r}; they must be a list of names, as ['in-backward'].")
    if not isinstance(optimizer, (str, dict)):
        raise ConfigError(
            f"libzero.plan's optimizer is a {type(optimizer).__name__}; it must be a name, as \"AdamW\", or a configuration's "
            "optimizer section."
        )
    section = {"type": optimizer, "params": {}} if isinstance(optimizer, str) else optimizer

    refused: Exception | None = None
    least = 1  # smaller micro-batches have the trace of this one, and are left out
    while True:
        failed: list[int] = []

        def traced(samples: int, recomputed: bool, cpu: bool, casts: bool, drops: bool) -> _Traced:
            where = _Casts("cpu" if cpu else "cuda", casts, drops)
            return _Traced(model, loss, recompute, max(samples, least), recomputed, where, failed)

        try:
            answer, cluster, text, training, points = _C.plan(
                traced,
                type(model).__name__,
                batch,
                sequence or 1,
                dtype,
                _json({"optimizer": section}, "optimizer"),
                "" if here else _described(device, hosts, per_host, hardware),
                2 if per_host is None else per_host,
                most_micro_batch,
                least,
                recompute is not None,
                list(updates),
                autocast or "",
                tuple(scale or (0, 0)),
                float(tokens or 0),
                float(price or 0),
            )
            break
        except Exception as error:
            by_module = failed == [least] and not isinstance(error, (_C.Error, RuntimeError))
            if not by_module or 2 * least > min(batch, most_micro_batch):
                raise (refused or error) from None
            refused = refused or error
            least *= 2
    if refused is not None:
        text += (
            f"\nMicro-batches below {least} are left out, since the model refuses them: with {least // 2}, "
            f"{type(refused).__name__}: {refused}\n"
        )
    return Plan(
        json.loads(answer),
        json.loads(cluster),
        text,
        json.loads(training) if training else None,
        tuple(json.loads(point) for point in points),
    )


def _check_trainings(scale: Any, tokens: Any, price: Any) -> None:
    ranks = scale if isinstance(scale, (tuple, list)) else ()
    if scale is not None and not (
        len(ranks) == 2 and all(isinstance(each, int) and each > 0 for each in ranks) and ranks[0] <= ranks[1]
    ):
        raise ConfigError(f"libzero.plan's scale is {scale!r}; it must be two numbers of ranks, as (8, 4096).")
    for name, value in (("tokens", tokens), ("price", price)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ConfigError(f"libzero.plan's {name} is {value!r}; it must be a number above 0.")
    if price is not None and tokens is None:
        raise ConfigError(f"libzero.plan's price is {price!r}, but there are no tokens that could cost something: give tokens=.")


def _autocast_around() -> str | None:
    """The dtype of the scope of torch.autocast that the program is in."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return names.get(torch.get_autocast_dtype(device))
    return None


def _check_machines(here: bool, given: dict[str, Any]) -> None:
    """Throws ConfigError where the machines are described twice."""
    names = [name for name, value in given.items() if value is not None]
    whole = "here" if here else "hardware"
    if not here and "hardware" not in names:
        return
    for name in names:
        if name != whole and not (here and name == "per_host"):
            raise ConfigError(f"libzero.plan was given {whole}= and {name}=, but {whole}= says which machines there are.")


def _described(device: str | None, hosts: int | None, per_host: int | None, hardware: Any) -> str:
    """Returns the machines as JSON."""
    if isinstance(hardware, (str, os.PathLike)):
        try:
            with open(hardware, encoding="utf-8") as file:
                return file.read()
        except OSError as error:
            raise ConfigError(f"The hardware file '{os.fspath(hardware)}' cannot be read: {error.strerror}.") from error
    if hardware is not None:
        if not isinstance(hardware, Mapping):
            raise ConfigError(f"libzero.plan's hardware is a {type(hardware).__name__}; it must be a file's path or a dict.")
        return _json(dict(hardware), "hardware")
    described: dict[str, Any] = {"device": "h100" if device is None else device, "hosts": 1 if hosts is None else hosts}
    if per_host is not None:
        described["per_host"] = per_host
    return json.dumps(described)


def _json(value: dict[str, Any], what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"libzero.plan's {what} cannot be written as JSON: {error}. Give numbers, texts and lists.") from error


def _length(model: torch.nn.Module, sequence: int | None) -> int:
    """Returns the tokens of a sample. Shapes alone do not say that a model has no more positions."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return sequence or 1024
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            most = min(most, module.num_embeddings - module.padding_idx - 1)  # RoBERTa's first ones are no tokens'
    if sequence is not None and sequence > most:
        raise ConfigError(
            f"libzero.plan's sequence is {sequence}, but {type(model).__name__} takes at most {most} tokens. Give at most "
            "that, or a model of more positions."
        )
    return sequence or min(1024, most)


def _language_loss(model: torch.nn.Module, sequence: int) -> _Loss:
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken or "labels" not in taken:
        raise ConfigError(
            f"{type(model).__name__} is not called with input_ids and labels, so libzero.plan needs a function of its "
            "loss: libzero.plan(model, lambda model, n: ..., batch=...)."
        )

    def loss(model: torch.nn.Module, samples: int) -> torch.Tensor:
        tokens = torch.zeros(samples, sequence, dtype=torch.long)
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    def loss_of_classes(model: Any, samples: int) -> torch.Tensor:
        tokens = torch.zeros(samples, sequence, dtype=torch.long)
        kind, classes = getattr(model.config, "problem_type", None), getattr(model.config, "num_labels", 2)
        if kind == "multi_label_classification":
            labels = torch.zeros(samples, classes)
        elif kind == "regression" or (kind is None and classes == 1):
            labels = torch.zeros((samples,) if classes == 1 else (samples, classes))
        else:
            labels = torch.zeros(samples, dtype=torch.long)
        try:
            return model(input_ids=tokens, labels=labels).loss  # type: ignore[no-any-return]
        finally:
            model.config.problem_type = kind  # which transformers fills in

    by_sample = type(model).__name__.endswith(("ForSequenceClassification", "ForNextSentencePrediction"))
    return loss_of_classes if by_sample else loss


def _switch_of(model: torch.nn.Module) -> _Switch | None:
    """Returns the switch that models of transformers have; None for other modules."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None

    def switch(model: Any, on: bool) -> None:
        # The later name comes first: the earlier one warns.
        for kind in ("activation_checkpointing", "gradient_checkpointing"):
            function = getattr(model, f"{kind}_{'enable' if on else 'disable'}", None)
            if function is not None:
                function({"use_reentrant": False}) if on else function()
                return

    return switch


def _recomputes(model: torch.nn.Module) -> bool:
    now = getattr(model, "is_activation_checkpointing", None)  # the earlier name warns
    return bool(getattr(model, "is_gradient_checkpointing", False) if now is None else now)


class _Traced:
    """A module of which a trace is under way: its parameters and buffers are others, which have shapes alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: _Loss,
        recompute: _Switch | None,
        samples: int,
        recomputed: bool,
        casts: _Casts,
        failed: list[int],
    ) -> None:
        self._model, self._loss, self._samples, self._casts, self._failed = model, loss, samples, casts, failed
        with ExitStack() as scope:
            if not model.training:
                modes = {module: module.training for module in model.modules()}
                scope.callback(lambda: [setattr(module, "training", mode) for module, mode in modes.items()])
                model.train()
            if recompute is not None:
                scope.callback(recompute, model, _recomputes(model))
                recompute(model, recomputed)
            scope.enter_context(_without_memory(model))
            scope.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:  # a compiled model runs as it is written
                scope.enter_context(torch.compiler.set_stance("force_eager"))
            if "transformers.masking_utils" in sys.modules:
                scope.enter_context(_FullSequences())
            self._scope = scope.pop_all()
        self.parameters = _compile.unwrapped(model.named_parameters())
        self.buffers = _compile.unwrapped(model.named_buffers())

    def loss(self) -> torch.Tensor:
        try:
            with self._casts.scope(self._model):
                return self._loss(self._model, self._samples)
        except Exception as error:
            self._failed.append(self._samples)
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"libzero.plan was tracing a micro-batch of {self._samples} samples.")
            raise

    def close(self) -> None:
        self._scope.close()


@dataclass(frozen=True)
class _Casts:
    """What autocast does in a trace."""

    device: str  # the planned one: "cpu" or "cuda"
    on: bool  # the whole loss is in a scope: planner/trace.cpp has switched the casts on
    drops: bool  # parameters are at stage 3: Note [Autocast] in _tensor.py

    @contextmanager
    def scope(self, model: torch.nn.Module) -> Iterator[None]:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(True)
        with ExitStack() as scope:
            scope.callback(torch.set_autocast_cache_enabled, cached)
            if self.on:
                torch.autocast_increment_nesting()
                scope.callback(torch.autocast_decrement_nesting)
            if self.drops:
                mine = {id(parameter) for parameter in model.parameters()}
                pack = functools.partial(_tensor.pack, sharded=lambda leaf: id(leaf) in mine)
                scope.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _tensor.unpack))
            scope.enter_context(_autocast_of(self.device))
            yield


@contextmanager
def _autocast_of(device: str) -> Iterator[None]:
    """While it lives, torch.autocast of the device meta is that of the planned device, and that of a planned GPU casts on
    a machine without one, too."""
    before = torch.autocast.__init__

    def init(self: torch.autocast, device_type: str, dtype: Any = None, enabled: bool = True, *more: Any, **others: Any) -> None:
        device_type = device if device_type == "meta" else device_type
        absent = device_type == device == "cuda" and not torch.cuda.is_available()
        before(self, device_type, dtype, enabled and not absent, *more, **others)
        self._enabled = self._enabled or (enabled and absent)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = before  # type: ignore[method-assign]


class _FullSequences(TorchFunctionMode):
    """Answers what transformers asks of masks' values (is anything padded, are sequences packed) as sequences without
    padding do. It then needs no mask, as in a step of such sequences."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__bool__" and arguments[0].is_meta:
            if sys._getframe(1).f_globals.get("__name__") == "transformers.masking_utils":
                return True
        return function(*arguments, **(keywords or {}))


@contextmanager
def _without_memory(model: torch.nn.Module) -> Iterator[None]:
    """While it lives, the module's parameters and buffers are on meta."""
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
    ]
    made: dict[int, torch.Tensor] = {}  # tied ones stay tied
    places = [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    for _, _, tensor in places:
        if id(tensor) in made:
            continue
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        made[id(tensor)] = torch.nn.Parameter(like, tensor.requires_grad) if is_parameter else like
    try:
        for table, name, tensor in places:
            table[name] = made[id(tensor)]
        _list_weights(model)
        yield
    finally:
        for module, attributes, parameters, buffers, not_saved in before:  # what forward has made on meta goes, too
            vars(module).clear()
            vars(module).update(attributes)
            for table, values in ((module._parameters, parameters), (module._buffers, buffers)):
                table.clear()
                table.update(values)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(not_saved)
        _list_weights(model)


def _list_weights(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):  # which has a list of them
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
