"""How a test script starts its ranks, and what the scripts share.

    from support import expect, main, ranks, train  # first: finds libzero in this tree

    import libzero

    @ranks(1, 2)
    def test_it(group): ...

    main()

Run alone, the script starts itself under `zero launch` for each number of ranks, and runs there what is for so many.
The environment variable ZERO_PROGRAM names the program `zero`. Arguments: names of tests, all without."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("libzero") is None:
    sys.path.insert(0, str(_ROOT / "build/release/python"))  # ctest has it in PYTHONPATH
_SIZE = "LIBZERO_TEST_RANKS"  # set where this process is a rank
_tests: list[tuple[Callable[..., None], tuple[int, ...], bool]] = []


def ranks(*sizes: int, alone: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test for these numbers of ranks, which gets the group. `alone`: in processes of its own, where it makes the
    group itself (its argument is None)."""

    def add(test: Callable[..., None]) -> Callable[..., None]:
        _tests.append((test, sizes, alone))
        return test

    return add


def main() -> None:
    """Runs the script's tests. Ends the process: 1 where one has failed, 77 where torch is missing."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    wanted = sys.argv[1:]
    chosen = [test for test in _tests if not wanted or test[0].__name__ in wanted]
    if _SIZE in os.environ:
        _run(chosen, int(os.environ[_SIZE]))
        return
    need("torch")
    failed = []
    for size in sorted({size for _, sizes, _ in chosen for size in sizes}):
        here = [test for test in chosen if size in test[1]]
        together = [test.__name__ for test, _, alone in here if not alone]
        for names in [together] * bool(together) + [[test.__name__] for test, _, alone in here if alone]:
            if launch(size, [sys.argv[0], *names]).returncode != 0:
                failed.append(f"{', '.join(names)} on {size} ranks")
    if failed:
        print("failed: " + "; ".join(failed))
        sys.exit(1)
    print(f"{Path(sys.argv[0]).stem}: {len(chosen)} tests passed")


def need(*packages: str) -> None:
    """Ends with 77 where this Python lacks one of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            print(f"skipped: this Python has no {package} (scripts/python_environment.sh)")
            sys.exit(77)


def launch(size: int, arguments: list[str], **keywords: Any) -> subprocess.CompletedProcess[Any]:
    """Runs a Python script with its arguments on so many ranks."""
    return subprocess.run(command(size, arguments), env={**environment(), _SIZE: str(size)}, timeout=600, **keywords)


def under_launcher(size: int) -> None:
    """Goes on as one of so many ranks: a script that was started alone runs again under `zero launch`, and ends with
    that run's status; 77 where torch or transformers is missing."""
    if _SIZE in os.environ:
        return
    need("torch", "transformers")
    sys.exit(launch(size, sys.argv).returncode)


def program() -> str:
    """The program `zero`."""
    return os.environ.get("ZERO_PROGRAM", str(_ROOT / "build/release/zero"))


def command(size: int, arguments: list[str]) -> list[str]:
    """What runs a Python script with its arguments on so many ranks."""
    return [program(), "launch", "-n", str(size), "--", sys.executable, *arguments]


def environment() -> dict[str, str]:
    """Of a Python process that finds libzero, with one thread, and downloads nothing."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run(tests: list[tuple[Callable[..., None], tuple[int, ...], bool]], size: int) -> None:
    import torch

    torch.set_num_threads(1)
    failed = False
    for test, sizes, alone in tests:
        if size not in sizes:
            continue
        group = None
        if not alone:
            import libzero

            group = libzero.group(timeout=60)
        start = time.monotonic()
        try:
            test(group)
        except BaseException:
            print(f"{test.__name__} failed:")
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            failed = True
            if size > 1:
                os._exit(1)  # peers may be waiting
            continue
        if group is None or group.rank == 0:
            print(f"{test.__name__} on {size} ranks: passed ({time.monotonic() - start:.1f} s)")
    if failed:
        sys.exit(1)


@contextlib.contextmanager
def expect(kind: type[BaseException], *words: str) -> Iterator[None]:
    """What is inside must raise this, with a text that has all the words."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{type(error).__name__} says '{error}', without {missing}"
        return
    raise AssertionError(f"nothing was raised; expected {kind.__name__} about {', '.join(words)}")


def mlp(seed: int = 0) -> Any:
    """A small model, the same at each call."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch(rank: int, step: int) -> Any:
    """A micro-batch, other on each rank and step."""
    import torch

    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: Any, optimizer: Any, steps: int = 3, first: int = 0, each: Any = None) -> list[Any]:
    """Losses and gradient norms of a plain loop, which calls `each(step)` before each update."""
    seen: list[Any] = []
    for step in range(first, first + steps):
        loss = model(batch(optimizer.group.rank, step)).pow(2).mean()
        loss.backward()
        if each is not None:
            each(step)
        optimizer.step()
        seen.append((loss.item(), optimizer.grad_norm))
        optimizer.zero_grad()
    return seen


def weights(optimizer: Any) -> dict[str, Any]:
    """All parameters, whole. Collective."""
    return {name: optimizer.parameter(name) for name in optimizer._engine.parameter_names}


def difference(one: Any, other: Any, where: str = "") -> str:
    """Where two are not equal to the bit, of numbers, tensors, and lists, tuples and dicts of these; or ""."""
    import torch

    if isinstance(other, torch.Tensor):
        return "" if one.dtype == other.dtype and torch.equal(one, other) else f"{where}: {one} is not {other}"
    if isinstance(other, dict):
        if list(one) != list(other):
            return f"{where}: {list(one)} are not {list(other)}"
        return next(filter(None, (difference(one[key], other[key], f"{where}: {key}") for key in other)), "")
    if isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} are not {len(other)}"
        parts = (difference(a, b, f"{where}: {i}") for i, (a, b) in enumerate(zip(one, other)))
        return next(filter(None, parts), "")
    return "" if one == other else f"{where}: {one} is not {other}"


def same(one: Any, other: Any) -> bool:
    """Equal to the bit."""
    return not difference(one, other)


def equal(got: Any, expected: Any, where: str) -> None:
    """They must be equal to the bit."""
    found = difference(got, expected, where)
    assert not found, found


def raises(kind: type[BaseException], word: str, function: Callable[[], Any]) -> None:
    """`function` must raise this, with a text that has the word."""
    with expect(kind, word):
        function()


def through_a_file(value: Any) -> io.BytesIO:
    """What torch.save writes of it, to be loaded."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def from_rank_0(tensors: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's tensors, of the shapes of `like`, on every rank."""
    import torch

    import libzero

    group = libzero.group()
    values = {}
    for key, shape in like.items():
        values[key] = tensors[key].clone() if group.rank == 0 else torch.zeros_like(shape)
        group.broadcast(values[key].view(-1), 0, key)
    return values


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks have, as long as rank 0 is inside."""
    import torch

    import libzero

    group = libzero.group()
    made = tempfile.mkdtemp(prefix="libzero-") if group.rank == 0 else ""
    text = torch.zeros(256, dtype=torch.uint8)
    text[: len(made)] = torch.tensor(list(made.encode()), dtype=torch.uint8)
    group.broadcast(text, 0, "folder")
    folder = Path(bytes(text.tolist()).rstrip(b"\0").decode())
    try:
        yield folder
    finally:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
