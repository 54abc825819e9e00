"""`opt.state`: the optimizer's states by parameter, as torch's optimizers have them.

Note [States as a view]
The states lie on all ranks, so reading one makes a whole copy on each rank, and writing one sets it on its owners: both
are collective, and rank 0's values count. What the program writes to a copy in place (`exp_avg.mul_(0.9)`) goes to the
owners at the next access of `opt.state`, `step`, save or load. A copy is of the moment: a step makes it out of date,
and writing to it after that is an error."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import _options, _zero1
from ._C import ConfigError, Error

if TYPE_CHECKING:
    from ._shard import ShardedOptimizer


class Owners(Protocol):
    """Where the states are. Every function is collective."""

    def fetch(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's states on every rank; {} where it has none."""

    def problem(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> str:
        """What keeps the parameter from having these; "": nothing. Not collective."""

    def store(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        """Puts rank 0's `states` in the place of all that the parameter has; {}: it has none then."""

    def store_one(self, parameter: torch.Tensor, key: str, value: Any) -> None:
        """Sets rank 0's value of one state."""


def _uses(value: torch.Tensor) -> tuple[int, int]:
    """References to a tensor in Python, and tensors of its storage."""
    return sys.getrefcount(value), torch._C._storage_Use_Count(value.untyped_storage()._cdata)


def _lone_uses() -> tuple[int, int]:
    held = [("", torch.zeros(1, dtype=torch.float32, device="cpu"), 0)]
    for _, value, _ in held:
        return _uses(value)
    raise AssertionError


class States(MutableMapping):  # type: ignore[type-arg]
    """Note [States as a view]."""

    def __init__(self, optimizer: ShardedOptimizer, owners: Owners) -> None:
        self._optimizer, self._owners = weakref.ref(optimizer), owners
        self._group = optimizer.group
        self._lent: list[tuple[Any, torch.Tensor, int]] = []  # (parameter, key), a copy, its version
        self._old: list[tuple[Any, weakref.ref[torch.Tensor], int]] = []  # of earlier steps
        self._packing = False
        self.era = 0

    def _parameters(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _name(self, parameter: Any) -> str:
        optimizer = self._optimizer()
        if not isinstance(parameter, torch.Tensor) or optimizer is None:
            raise Error(f"opt.state has states of the model's parameters alone, and was given {parameter!r}.")
        return optimizer.name_of(parameter)

    # --- As a mapping.

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        self._name(parameter)
        return _ParameterStates(self, parameter)

    def __setitem__(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        self._name(parameter)
        values = dict(states)
        told = _zero1.send_object(self.problem(parameter, values) if self._group.rank == 0 else "", 0, self._group)
        if told:
            raise ConfigError(told)
        self.put(parameter, values)

    def put(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        """The same, of what `problem` has none with."""
        self.write_back()
        self._forget(parameter)
        self._owners.store(parameter, states)

    def problem(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> str:
        return self._owners.problem(parameter, states)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(f"parameter '{self._name(parameter)}', which has no states of the optimizer")
        self[parameter] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.write_back()
        return iter([parameter for parameter in self._parameters() if self._owners.fetch(parameter)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, parameter: object) -> bool:
        known = isinstance(parameter, torch.Tensor) and any(parameter is each for each in self._parameters())
        return known and bool(self.fetch(parameter))  # type: ignore[arg-type]

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        states = self.fetch(parameter)
        if not states and default:
            return default[0]
        del self[parameter]
        return states

    def items(self) -> Any:
        return self._packed() if self._packing else super().items()

    def clear(self) -> None:
        for parameter in self._parameters():
            self[parameter] = {}

    def __repr__(self) -> str:
        return "<the optimizer's states, on all ranks: opt.state[p]>"

    # --- For torch's state_dict.

    @contextlib.contextmanager
    def packing(self) -> Iterator[None]:
        """Inside, `items()` gives plain dicts on rank 0, and nothing on the others."""
        self._packing = True
        try:
            yield
        finally:
            self._packing = False

    def _packed(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        self.write_back()
        for parameter in self._parameters():
            states = self._owners.fetch(parameter)
            if states and self._group.rank == 0:
                yield parameter, {key: each.cpu() if _is_tensor(each) else each for key, each in states.items()}

    # --- Copies that the program has.

    def fetch(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies, which `write_back` looks at."""
        self.write_back()
        states = self._owners.fetch(parameter)
        self._lent += [((parameter, key), each, each._version) for key, each in states.items() if _is_tensor(each)]
        return states

    def store_one(self, parameter: torch.Tensor, key: str, value: Any) -> None:
        self.write_back()
        self._forget(parameter, key)
        self._owners.store_one(parameter, key, value)

    def write_back(self) -> None:
        """What was written in place goes to the owners. Collective."""
        for (parameter, key), reference, version in self._old:
            value = reference()
            if value is not None and value._version != version:
                raise Error(
                    f"opt.state of parameter '{self._name(parameter)}': '{key}' was written in a copy that was read "
                    "before the last step, which does not know it. Read opt.state[p] again after each step."
                )
        if not self._lent:
            return
        written = _flags(value._version != version for _, value, version in self._lent)
        everywhere = self._group.all_gather_control(written, "opt.state").view(self._group.size, -1)
        lent, self._lent = self._lent, []
        for rank in range(self._group.size):
            for place in (everywhere[rank] != everywhere[0]).nonzero().flatten().tolist():
                (parameter, key), _, _ = lent[place]
                raise Error(
                    f"opt.state of parameter '{self._name(parameter)}': '{key}' was written on some ranks and not on "
                    f"others (rank 0 and rank {rank} differ). Write it on every rank: rank 0's values count."
                )
        for (parameter, key), value, version in lent:
            if value._version != version:
                self._owners.store_one(parameter, key, value)
        del everywhere
        for index in range(len(lent)):
            where, value, _ = lent[index]
            lent[index] = (where, value, value._version)
        del value, where
        # A copy that nobody else has need not stay. The ranks agree: their memory may differ.
        alone = _flags(_uses(value) <= _LONE for _, value, _ in lent)
        on_all = self._group.all_gather_control(alone, "opt.state").view(self._group.size, -1).all(0).tolist()
        self._lent = [each for each, gone in zip(lent, on_all) if not gone]

    def stepped(self) -> None:
        """The copies are out of date."""
        self.era += 1
        self._old = [each for each in self._old if each[1]() is not None]
        self._old += [(where, weakref.ref(value), version) for where, value, version in self._lent]
        self._lent.clear()

    def _forget(self, parameter: torch.Tensor, key: str | None = None) -> None:
        self._lent = [
            each for each in self._lent if each[0][0] is not parameter or (key is not None and each[0][1] != key)
        ]


def _flags(values: Iterable[bool]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _ParameterStates(MutableMapping):  # type: ignore[type-arg]
    """The states of a parameter. Reads them once a step."""

    def __init__(self, states: States, parameter: torch.Tensor) -> None:
        self._states, self._parameter = states, parameter
        self._era, self._values = -1, {}  # type: tuple[int, dict[str, Any]]

    def _now(self) -> dict[str, Any]:
        if self._era != self._states.era:
            self._values = self._states.fetch(self._parameter)
            self._era = self._states.era
        return self._values

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._now() and self._values[key] is value:
            return  # an operation in place has given its own result back
        self._era = -1
        self._states.store_one(self._parameter, key, value)

    def __delitem__(self, key: str) -> None:
        raise Error(
            f"'{key}' cannot be taken out of the states of a parameter: they are there together. Use opt.state[p] = {{}}"
            " (or del opt.state[p]) to begin anew, or opt.state[p][key].zero_()."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._now()))

    def __len__(self) -> int:
        return len(self._now())

    def clear(self) -> None:
        self._era = -1
        self._states[self._parameter] = {}

    def __repr__(self) -> str:
        return repr(self._now())


_LONE = _lone_uses()


class EngineStates:
    """Owners of the engine's states. A parameter that has had no update has none, unless the program gave it some."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._given: set[str] = set()
        self._group_of = {each: index for index, ids in enumerate(optimizer._members) for each in ids}

    def _of(self, parameter: torch.Tensor) -> tuple[ShardedOptimizer, str, tuple[str, ...], bool, float]:
        # The optimizer; the parameter's name and states; whether torch counts its steps; what a state begins with
        # that the engine adds in the first update.
        optimizer = self._optimizer()
        assert optimizer is not None
        name = optimizer.name_of(parameter)
        if id(parameter) not in self._group_of:
            raise ConfigError(f"Parameter '{name}' is in no group of the optimizer.")
        index = self._group_of[id(parameter)]
        kind, group = optimizer._kinds[index], optimizer.param_groups[index]
        states, counted = _options.states_of(kind, group, parameter), _options.counts_steps(kind)
        return optimizer, name, states, counted, float(group.get("initial_accumulator_value", 0.0))

    def fetch(self, parameter: torch.Tensor) -> dict[str, Any]:
        optimizer, name, names, _, first = self._of(parameter)
        engine = optimizer._engine
        steps = engine.parameter_steps(name) if name in optimizer._trainable else 0
        if not steps and name not in self._given:
            return {}
        states = {"step": torch.tensor(float(steps), dtype=torch.float32, device="cpu")}
        states.update((key, engine.optimizer_state(name, key)) for key in names)
        if not steps and "sum" in states:
            states["sum"] += first
        return states

    def problem(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> str:
        optimizer, name, names, counted, _ = self._of(parameter)
        given = {key for key, value in states.items() if value is not None}
        wanted = {*names, "step"} if counted else set(names)
        if not given:
            return ""
        if not wanted <= given <= wanted | {"step"}:
            kind = optimizer._kinds[self._group_of[id(parameter)]].__name__
            return (
                f"Parameter '{name}' was given the optimizer states {sorted(given)}; {kind} has {sorted(wanted)}. Give "
                "it those of the same kind of optimizer, or {} to begin anew."
            )
        for key in names:
            shape, of_given = _options.shape_of(key, parameter), getattr(states[key], "shape", None)
            if of_given != shape:
                return f"State '{key}' of parameter '{name}' has the shape {of_given}; it must be {shape}."
        return ""

    def store(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        optimizer, name, names, _, _ = self._of(parameter)
        if name not in optimizer._trainable:
            if states:
                raise ConfigError(f"Parameter '{name}' was frozen at libzero.shard: it has no states of the optimizer.")
            return
        steps = float(states.get("step", 1 if states else 0))  # torch says none of SGD and Muon
        shared = torch.tensor([steps, bool(states)], dtype=torch.float64, device="cpu")
        optimizer.group.broadcast(shared, 0, "opt.state")
        steps, given = shared.tolist()
        self._given.discard(name)
        optimizer._engine.set_parameter_steps(name, int(steps))
        if given:
            self._given.add(name)
        for key in names:
            self._set(optimizer, name, key, states.get(key) if given else None, parameter)

    def store_one(self, parameter: torch.Tensor, key: str, value: Any) -> None:
        optimizer, name, names, counted, _ = self._of(parameter)
        if key != "step" and key not in names:
            known = ", ".join(("step", *names))
            raise ConfigError(f"Parameter '{name}' has no optimizer state '{key}'; it has {known}.")
        self._given.add(name)
        if key == "step":
            steps = torch.tensor([float(value)], dtype=torch.float64, device="cpu")
            optimizer.group.broadcast(steps, 0, "opt.state")
            optimizer._engine.set_parameter_steps(name, int(steps.item()))
            return
        if not counted and not optimizer._engine.parameter_steps(name):
            optimizer._engine.set_parameter_steps(name, 1)
        self._set(optimizer, name, key, value, parameter)

    def _set(
        self, optimizer: ShardedOptimizer, name: str, key: str, value: Any, parameter: torch.Tensor
    ) -> None:
        engine = optimizer._engine
        whole = torch.zeros_like(engine.optimizer_state(name, key), device="cpu")
        if optimizer.group.rank == 0 and value is not None:
            if key == "sum" and not engine.parameter_steps(name):
                value = value - self._of(parameter)[-1]
            whole.copy_(value)
        optimizer.group.broadcast(whole.view(-1), 0, "opt.state")
        engine.set_optimizer_state(name, key, whole)
