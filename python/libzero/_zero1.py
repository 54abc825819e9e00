"""ZeRO-1 around any torch optimizer (1910.02054, section 5.1).

Note [Partitioned updates]
The engine keeps parameters and gradients whole on every rank (its stage 0), reduces, clips and looks for what is not
finite; its own update changes nothing. The torch optimizer itself makes the update: while it steps, its groups hold
the parameters that this rank owns, with their mean gradients, and so its states are of those alone. Then the owners
send the new values to all. With bf16 the optimizer updates fp32 masters, which the owners keep.

At stage 0 each rank owns all parameters, and nothing is sent."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from . import _C, _tensor
from ._C import ConfigError, Error
from ._options import put

if TYPE_CHECKING:
    from ._shard import ShardedOptimizer

# New values travel in buffers of this many bytes.
_BUCKET_BYTES = 32 << 20


def check(optimizer: torch.optim.Optimizer, model: torch.nn.Module, native: bool, stage: int, fp16: bool) -> None:
    """Throws ConfigError for an optimizer that cannot be run so."""
    kind = type(optimizer).__name__
    if stage > 1:
        why = "libzero has none of its own" if native else "with native=False torch's is run"
        raise ConfigError(
            f"{kind} at stage {stage}: {why}, and runs it as it is, at stages 0 and 1. Use stage 1; or, for stages 2 "
            "and 3, AdamW, Adam, SGD, Adagrad, Adafactor or Muon with native=True, or an `optimizer` section of the "
            "configuration (which also has Lamb and Lion) and optimizer=None."
        )
    if fp16:
        raise ConfigError(f"{kind} with fp16: torch's optimizers are run in fp32 and bf16. Use bf16=True.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS updates all parameters by one line search: it cannot be sharded. Use AdamW or SGD.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("SparseAdam needs sparse gradients, which libzero makes dense. Use Adam or AdamW.")
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"'{name}' makes sparse gradients (sparse=True), which libzero makes dense, and {kind} would update "
                "all of its rows. Make it with sparse=False."
            )
    mine = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(id(parameter) not in mine for parameter in given)
    if unknown:
        raise ConfigError(
            f"The optimizer has {unknown} parameters that the model does not have. Make it over model.parameters() of "
            "the model that you give to libzero.shard."
        )
    theirs = {id(parameter) for parameter in given}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in theirs:
            raise ConfigError(f"Parameter '{name}' is in no group of the optimizer. Add it to one, or freeze it.")


def engine_config(settings: dict[str, Any], device: torch.device) -> str:
    """The configuration of the engine below: Note [Partitioned updates]."""
    changed = json.loads(json.dumps(settings))
    changed.setdefault("zero_optimization", {})["stage"] = 0
    # The optimizer's masters are the ones. On a device the engine has no kernels without some of its own.
    if changed.get("bf16", {}).get("enabled") and device.type == "cpu":
        changed["bf16"]["bf16_master_weights_and_grads"] = True
    return json.dumps(changed)


class _Item:
    """A parameter of the optimizer's."""

    def __init__(self, parameter: torch.Tensor, owner: int) -> None:
        self.parameter = parameter
        self.owner = owner
        self.updated = parameter  # by the optimizer: the parameter, or its fp32 master
        self.original: torch.Tensor | None = None  # before it became bf16


class PartitionedUpdates:
    """Each rank updates the parameters that it owns, with the mean gradients, and sends them to all."""

    # `group`: that of the model's device.
    def __init__(self, optimizer: torch.optim.Optimizer, group: _C.Group, settings: dict[str, Any]) -> None:
        self.running = False
        self._optimizer = optimizer
        self._group, self._rank = group, group.rank
        self._stage = int(settings["zero_optimization"]["stage"])
        self._micro_batches = int(settings["gradient_accumulation_steps"])
        if settings.get("clip_by_previous_norm"):
            raise ConfigError(
                "clip_by_previous_norm is true, and torch's optimizer is run as it is, which clips by the norm of its own "
                "step. Leave it out, or take an optimizer that libzero has (AdamW, Adam, SGD, Adagrad, Adafactor, Muon)."
            )
        self._clipping = float(settings["gradient_clipping"])
        self._largest = float(settings.get("gradient_clipping_value", 0.0))
        self._gradients: list[tuple[_Item, torch.Tensor]] = []
        parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        owners = _deal(parameters, group.size) if self._stage else [group.rank] * len(parameters)
        self._items = [_Item(*pair) for pair in zip(parameters, owners)]
        if settings["bf16"]["enabled"]:
            self._keep_originals()

    def _keep_originals(self) -> None:
        for item in self._items:
            if item.parameter.dtype != torch.float32:
                continue
            value = item.parameter.detach().to(self._group.device, copy=True).contiguous()
            self._group.broadcast(value.view(-1), 0, "masters of the optimizer")
            if item.owner == self._rank:
                item.original = value

    def start(self) -> None:
        """The engine has taken the parameters over."""
        for item in self._items:
            if item.owner == self._rank and item.parameter.dtype != torch.float32:
                value = item.original if item.original is not None else item.parameter.detach().float()
                item.updated = torch.nn.Parameter(value, item.parameter.requires_grad)
            item.original = None

    def set_gradient_clipping(self, max_norm: float) -> None:
        self._clipping = max_norm

    # --- A step.

    def before_step(self, sharded: ShardedOptimizer) -> None:
        """Takes the mean gradients at the end of an accumulation. Collective."""
        self._gradients.clear()
        engine = sharded._engine
        trained = [item for item in self._items if sharded.name_of(item.parameter) in sharded._trainable]
        for mine, theirs in zip(sharded.param_groups, self._optimizer.param_groups):
            if mine is not theirs:  # the program has put another in its place
                theirs.update({key: value for key, value in mine.items() if key != "params"})
        if engine.micro_batches + 1 < self._micro_batches:
            return
        self._compare_groups()
        for item in trained:
            # The first call completes the sums, on all ranks; the others are local.
            if item is not trained[0] and item.owner != self._rank:
                continue
            gradient = engine.gradient(sharded.name_of(item.parameter))
            if gradient is not None and item.owner == self._rank:
                self._gradients.append((item, gradient))

    def _compare_groups(self) -> None:
        # Hyper-parameters must be the same on all ranks, as the engine's are.
        mine = [
            {key: _number(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        told = torch.tensor([zlib.crc32(repr([mine, self._clipping]).encode())], dtype=torch.int64, device="cpu")
        everywhere = self._group.all_gather_control(told, "hyper-parameters").tolist()
        for rank, each in enumerate(everywhere):
            if each != everywhere[0]:
                raise Error(
                    f"opt.step(): rank {rank} has another learning rate, hyper-parameter or gradient clipping than rank 0 "
                    f"(learning rates of rank {self._rank}: {[float(group['lr']) for group in mine if 'lr' in group]}). Set the "
                    "same on every rank, from numbers that all ranks share: for a schedule that follows the loss, its "
                    "mean over ranks."
                )

    def after_step(self, sharded: ShardedOptimizer, result: dict[str, Any]) -> None:
        """Updates what this rank owns, unless a gradient was not finite, and sends it. Collective."""
        gradients, self._gradients = self._gradients, []
        if not result["updated"]:
            return
        norm = result["grad_norm"]
        factor = self._clipping / (norm + 1e-6) if 0 < self._clipping < norm else 1.0
        with self._updating(sharded):
            for item, gradient in gradients:
                if factor < 1:
                    gradient.mul_(factor)
                if self._largest:
                    gradient.clamp_(-self._largest, self._largest)
                _tensor.set_grad(item.updated, gradient)
            del gradients
            try:
                self._optimizer.step()
            finally:
                for item in self._items:
                    _tensor.set_grad(item.updated, None)

    def own(self, sharded: ShardedOptimizer, name: str) -> Any:
        """An attribute of the optimizer's own class. A function runs as a step does, on what each rank owns, and what
        it writes to parameters goes to all: collective."""
        value = getattr(self._optimizer, name)
        if not callable(value):
            return value

        @torch.no_grad()
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._updating(sharded):
                return value(*arguments, **keywords)

        return call

    @contextlib.contextmanager
    def _updating(self, sharded: ShardedOptimizer) -> Iterator[None]:
        # The parameters of all ranks become those that the optimizer writes inside.
        with sharded.gathered(write=True):
            self._follow_writes()
            with self._owned():
                yield
            for item in self._items:
                if item.updated is not item.parameter:
                    item.parameter.copy_(item.updated)
            if self._stage:
                self._send()

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        # The optimizer's groups hold what this rank owns.
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        items = iter(self._items)
        self.running = True
        try:
            for group in groups:
                mine = [item for item in (next(items) for _ in group["params"]) if item.owner == self._rank]
                group["params"] = [item.updated for item in mine]
            yield
        finally:
            self.running = False
            for group, parameters in zip(groups, whole):
                group["params"] = parameters

    def _follow_writes(self) -> None:
        # What the program has written to a parameter goes to its master, unless that rounds to it.
        for item in self._items:
            if item.updated is not item.parameter:
                rounded = item.updated.detach().to(item.parameter.dtype)
                if not torch.equal(rounded, item.parameter.detach()):
                    item.updated.data.copy_(item.parameter)

    def _send(self) -> None:
        group = self._group
        for owner in range(group.size):
            for bucket in _buckets([item.parameter for item in self._items if item.owner == owner]):
                values = [parameter.detach() for parameter in bucket]
                if owner == group.rank:
                    flat = torch.cat([value.reshape(-1) for value in values])
                else:
                    flat = values[0].new_empty(sum(value.numel() for value in values))
                group.broadcast(flat, owner, "new parameters")
                if owner != group.rank:
                    for value, piece in zip(values, flat.split([value.numel() for value in values])):
                        value.copy_(piece.view(value.shape))

    # --- States.

    def memory(self) -> int:
        """Bytes of the optimizer's states and masters on this rank."""
        tensors = [value for state in self._optimizer.state.values() for value in state.values()]
        tensors += [item.updated for item in self._items if item.updated is not item.parameter]
        return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))

    def sent(self) -> int:
        """Bytes of new values that this rank sends after an update, beside what the engine sends."""
        mine = [item.parameter for item in self._items if item.owner == self._rank]
        return sum(each.numel() * each.element_size() for each in mine) if self._stage else 0

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Its fp32 master, where it has one. Collective."""
        item = self._item(parameter)
        if parameter.dtype == torch.float32:
            return None
        mine = item.owner == self._rank
        value = item.updated.detach().clone() if mine else parameter.new_empty(parameter.shape, dtype=torch.float32)
        if self._stage:
            self._group.broadcast(value.view(-1), item.owner, "parameter")
        return value

    def optimizer_state(self, parameter: torch.Tensor, name: str, state: str) -> torch.Tensor:
        """Collective."""
        states = self._state_of(self._item(parameter))
        if not isinstance(states.get(state), torch.Tensor):
            known = ", ".join(key for key, value in states.items() if isinstance(value, torch.Tensor)) or "none"
            raise ConfigError(f"Parameter '{name}' has no optimizer state '{state}'; it has {known}.")
        return states[state]

    def _item(self, parameter: torch.Tensor) -> _Item:
        for item in self._items:
            if item.parameter is parameter:
                return item
        raise ConfigError("The parameter is in no group of the optimizer.")

    def _state_of(self, item: _Item) -> dict[str, Any]:
        mine = dict(self._optimizer.state.get(item.updated, {})) if item.owner == self._rank else {}
        return send_object(mine, item.owner, self._group) if self._stage else copy.deepcopy(mine)

    # As _state.Owners.

    def fetch(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._state_of(self._item(parameter))

    def problem(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> str:
        return ""  # torch's own optimizer says

    def store(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        item, values = self._item(parameter), send_object(dict(states), 0, self._group)
        if item.owner == self._rank:
            self._optimizer.state.pop(item.updated, None)
            if values:
                self._optimizer.state[item.updated] = {key: _beside(item.updated, key, each) for key, each in values.items()}

    def store_one(self, parameter: torch.Tensor, key: str, value: Any) -> None:
        item, sent = self._item(parameter), send_object(value, 0, self._group)
        if item.owner == self._rank:
            self._optimizer.state[item.updated][key] = _beside(item.updated, key, sent)

    def load_state_dict(self, sharded: ShardedOptimizer, state_dict: dict[str, Any]) -> None:
        """Rank 0's counts; each owner keeps the states of its parameters. Collective."""
        group = sharded.group
        groups = saved_groups(sharded, state_dict)
        states: list[dict[str, Any]] = []
        for index in range(len(self._items)):
            saved = send_object(state_dict["state"].get(index, {}) if self._rank == 0 else {}, 0, group)
            states.append(saved if self._items[index].owner == self._rank else {})
        mine = self._optimizer.param_groups
        whole = [each["params"] for each in mine]
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        items = iter(zip(self._items, states))
        position = 0
        for saved_group in groups:
            indices = []
            for item, saved in (next(items) for _ in saved_group["params"]):
                if item.owner != self._rank:
                    continue
                if saved:
                    packed["state"][position] = saved
                indices.append(position)
                position += 1
            packed["param_groups"].append({**saved_group, "params": indices})
        with self._owned():
            self._optimizer.load_state_dict(packed)  # which makes new groups
        loaded, self._optimizer.param_groups = self._optimizer.param_groups, mine
        for each, new, parameters in zip(mine, loaded, whole):
            for key, value in new.items():
                if key != "params":
                    put(each, key, value)
            each["params"] = parameters
        for ours, each in zip(sharded.param_groups, mine):
            ours.update(each)

    def restart(self) -> None:
        """The weights are others: states begin anew."""
        self._optimizer.state.clear()
        for item in self._items:
            if item.updated is not item.parameter:
                item.updated.data.copy_(item.parameter)

    def refuse(self, function: str) -> None:
        raise Error(
            f"{function} does not have the states of {type(self._optimizer).__name__}, which torch keeps. Use "
            "opt.state_dict() and opt.full_state_dict(), which are whole on rank 0, and torch.save."
        )


def _deal(parameters: list[torch.Tensor], ranks: int) -> list[int]:
    """The owner of each: the largest first, to the rank that has the fewest bytes so far (then the lowest)."""
    owners = [0] * len(parameters)
    loads = [0] * ranks
    for index in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += parameters[index].numel()
    return owners


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in sorted(parameters, key=lambda each: str(each.dtype)):
        added = parameter.numel() * parameter.element_size()
        if bucket and (size + added > _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += added
    if bucket:
        yield bucket


def send_object(value: Any, root: int, group: _C.Group) -> Any:
    """`root`'s value, on every rank. Tensors that are not on the CPU are on the group's device. Collective."""
    content = torch.empty(0, dtype=torch.uint8, device="cpu")
    if group.rank == root:
        file = io.BytesIO()
        torch.save(value, file)
        content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    if group.size > 1:
        size = torch.tensor([content.numel()], dtype=torch.int64, device="cpu")
        _send_text(size, root, group, "size of states")
        if group.rank != root:
            content = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
        _send_text(content, root, group, "states")
    elsewhere = set()

    def onto_cpu(storage: Any, location: str) -> Any:
        if location != "cpu":
            elsewhere.add(storage._cdata)
        return storage

    def placed(each: Any) -> Any:
        moves = isinstance(each, torch.Tensor) and each.untyped_storage()._cdata in elsewhere
        return each.to(group.device) if moves else each

    return tree_map(placed, torch.load(io.BytesIO(content.numpy().tobytes()), onto_cpu, weights_only=False))


def _send_text(content: torch.Tensor, root: int, group: _C.Group, label: str) -> None:
    # A text of the host, by what carries the device's tensors.
    if group.device.type == "cpu":
        group.broadcast(content, root, label)
    else:
        there = content.to(group.device)
        group.broadcast(there, root, label)
        content.copy_(there)


def _beside(parameter: torch.Tensor, key: str, value: Any) -> Any:
    # A state is where its parameter is; torch's optimizers keep the count of steps where they like.
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and key != "step" else value


def _number(value: Any) -> Any:
    # Without the device on which it is, which differs from rank to rank.
    return tree_map(lambda each: each.tolist() if isinstance(each, torch.Tensor) else each, value)


def saved_groups(
    sharded: ShardedOptimizer, state_dict: dict[str, Any], problem: Callable[[], str] = str
) -> list[dict[str, Any]]:
    """The groups of rank 0's state dict. Throws ConfigError, on every rank, unless it is a state dict of as many
    parameters in the same groups, and `problem`, which is asked on rank 0, has none. Collective."""
    told, groups = "", None
    if sharded.group.rank == 0:
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            told = f"What opt.load_state_dict was given on rank 0 has no '{missing[-1]}': it is no optimizer's state dict."
        else:
            groups = state_dict["param_groups"]
            mine = [len(group["params"]) for group in sharded.param_groups]
            theirs = [len(group["params"]) for group in groups]
            told = problem()
            if mine != theirs:
                told = f"The state dict has groups of {theirs} parameters; this optimizer has {mine}."
    told, groups = send_object((told, groups), 0, sharded.group)
    if told:
        raise ConfigError(told)
    return groups
