"""For ports of other engines' tests: their names, runs at several stages, the table.

A port is written here from what the other's test checks; the names are theirs. What a port returns must be the same
bits at all its stages."""

from __future__ import annotations

import copy
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import libzero

GROUP = libzero.group(timeout=120)
SETTINGS: dict[str, Any] = {"unit_bytes": 2000, "stage3_max_live_parameters": 0}  # parameters come and go all the time
ALL = (0, 1, 2, 3)


@dataclass
class Port:
    name: str
    run: Callable[[int], Any] | None
    stages: Sequence[int] = ALL
    why: str = ""  # where there is none
    bits: Sequence[Sequence[int]] = (ALL,)  # stages whose results are equal


class Suite:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.ports: list[Port] = []

    def port(
        self, name: str, stages: Sequence[int] = ALL, bits: Sequence[Sequence[int]] = (ALL,)
    ) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
        """Declares a port, which takes the stage."""

        def add(function: Callable[[int], Any]) -> Callable[[int], Any]:
            self.ports.append(Port(name, function, stages, bits=bits))
            return function

        return add

    def does_not_apply(self, name: str, why: str) -> None:
        self.ports.append(Port(name, None, why=why))

    def main(self) -> int:
        """Runs those whose names contain an argument (all without arguments), and prints the table."""
        torch.set_num_threads(1)
        rows = []
        failed = passed = 0
        for port in self.ports:
            if sys.argv[1:] and not any(word in port.name for word in sys.argv[1:]):
                continue
            if port.run is None:
                rows.append(f"{port.name}: does not apply: {port.why}")
                continue
            problems = self._problems(port)
            failed += bool(problems)
            passed += not problems
            rows.append(f"{port.name}: " + ("; ".join(problems) if problems else "passed at " + stages_text(port.stages)))
            if GROUP.rank == 0:
                print(rows[-1], flush=True)
        if GROUP.rank == 0:
            apart = [row for row in rows if "does not apply" in row]
            print(*apart, sep="\n")
            print(f"{self.peer}: {passed} of {passed + failed} pass; {len(apart)} do not apply", flush=True)
        return 1 if failed else 0

    @staticmethod
    def _problems(port: Port) -> list[str]:
        assert port.run is not None
        problems = []
        results: dict[int, Any] = {}
        for stage in port.stages:
            torch.manual_seed(42)
            try:
                results[stage] = port.run(stage)
                bad = 0
            except libzero.CommError:
                raise
            except Exception as error:
                traceback.print_exc()
                bad = 1
                problems.append(f"FAILED at stage {stage}: {type(error).__name__}: {str(error)[:300]}")
            gc.collect()  # an engine that a failure has left behind
            flags = GROUP.all_gather_control(torch.tensor([bad], dtype=torch.int64))
            if flags.any() and not bad:
                problems.append(f"FAILED at stage {stage} on another rank")
        for stages in port.bits:
            equal = [results[stage] for stage in stages if stage in results and results[stage] is not None]
            if any(each != equal[0] for each in equal):
                problems.append(f"FAILED: stages {list(stages)} differ: {equal}")
        return problems


def stages_text(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **SETTINGS, **more.pop("zero_optimization", {})}
    return {"gradient_clipping": 0, "zero_optimization": zero, **more}


def adam(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


Batches = Sequence[Any]  # what each rank's part of a step is, the same list on every rank


class Pair:
    """A sharded model and, beside it, the same one that plain PyTorch trains on the batches of all ranks."""

    def __init__(
        self,
        model: torch.nn.Module,
        stage: int,
        optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adam,
        rtol: float = 1e-5,
        atol: float = 1e-6,
        **config: Any,
    ) -> None:
        self.model = model
        self.reference = copy.deepcopy(model)
        self.reference_optimizer = optimizer(self.reference)
        self.optimizer = libzero.shard(model, optimizer(model), config_of(stage, **config))
        self.near = {"rtol": rtol, "atol": atol}
        self.losses: list[float] = []

    def backward(self, loss_of: Callable[[torch.nn.Module, Any], torch.Tensor], parts: Batches) -> None:
        """One micro-batch of both; losses and gradients are compared by `check_gradients`."""
        for rank, part in enumerate(parts):
            expected = loss_of(self.reference, part)
            (expected / len(parts)).backward()
            if rank == GROUP.rank:
                here = expected.detach().clone()
        loss = loss_of(self.model, parts[GROUP.rank])
        loss.backward()
        torch.testing.assert_close(loss.detach(), here, **self.near)
        self.losses.append(loss.item())

    def check_gradients(self) -> None:
        for name, parameter in self.reference.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = self.optimizer.gradient(name)
            if parameter.grad is None:
                assert gradient is None or not gradient.any(), f"{name} has a gradient where there is none"
            else:
                assert gradient is not None, f"{name} has no gradient"
                torch.testing.assert_close(gradient, parameter.grad, **self.near, msg=lambda m, n=name: f"{n}: {m}")

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference_optimizer.step()
        self.reference_optimizer.zero_grad()

    def check_weights(self, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """As the model itself and as the optimizer say them. Looser than gradients: Adam's first steps divide small
        gradients by themselves."""
        for (name, parameter), expected in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            value = parameter.detach().clone()
            torch.testing.assert_close(value, expected.detach(), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            if parameter.requires_grad:
                assert torch.equal(value, self.optimizer.parameter(name)), name

    def close(self) -> list[float]:
        self.optimizer.close()
        return self.losses


def parts_of(make: Callable[[], Any]) -> list[Any]:
    """A batch for each rank, the same list on every rank."""
    return [make() for _ in range(GROUP.size)]


def train(
    pair: Pair, loss_of: Callable[[torch.nn.Module, Any], torch.Tensor], make: Callable[[], Any], steps: int = 5,
    micro_batches: int = 1,
) -> list[float]:
    """Trains both and compares everything after every step."""  # fmt: skip
    for _ in range(steps):
        for _ in range(micro_batches):
            pair.backward(loss_of, parts_of(make))
        pair.check_gradients()
        pair.step()
        pair.check_weights()
    return pair.close()


def raises(kinds: Any, words: Iterable[str], function: Callable[[], Any]) -> None:
    try:
        function()
    except kinds as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"nothing was raised, where an error with {list(words)} should be")
