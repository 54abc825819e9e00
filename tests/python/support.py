"""For test scripts that run on several ranks: `python test_x.py [CASE ...]` starts them itself, under `zero launch`.

A case is a function whose name begins with test_; parts of names choose among them. The program's path is in
ZERO_PROGRAM (default: build/release/zero). Exit status 77: something that the tests need is not installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_RANKS = "LIBZERO_TEST_RANKS"


def need(*packages: str) -> None:
    """Ends the script with status 77 where one cannot be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            print(f"skipped: {error}; scripts/python_environment.sh installs what the tests need")
            sys.exit(77)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def launch(ranks: int, command: Sequence[str], timeout: float = 280, **variables: str) -> int:
    """Runs a Python script on so many ranks; its exit status."""
    program = os.environ.get("ZERO_PROGRAM", "build/release/zero")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    whole = [program, "launch", "-n", str(ranks), "--", sys.executable, *command]
    return subprocess.run(whole, env=environment, timeout=timeout, check=False).returncode


def run(names: dict[str, Any], ranks: Sequence[int], argv: Sequence[str], here: str) -> None:
    """Runs the cases of a script, all of them on each number of ranks."""
    cases = {
        name: case
        for name, case in names.items()
        if name.startswith("test_") and callable(case) and (not argv or any(part in name for part in argv))
    }
    if _RANKS not in os.environ:
        failed = [count for count in ranks if launch(count, [here, *argv], **{_RANKS: str(count)}) != 0]
        print(f"{len(cases)} cases on {', '.join(map(str, ranks))} ranks: " + (f"FAILED on {failed}" if failed else "passed"))
        sys.exit(1 if failed else 0)
    import torch

    import libzero

    torch.set_num_threads(1)
    first = libzero.group(timeout=60).rank == 0
    for name, case in cases.items():
        start = time.monotonic()
        try:
            case()
        except BaseException:
            traceback.print_exc()
            print(f"FAILED {name} on rank {libzero.group().rank}", flush=True)
            os._exit(1)  # the launcher ends the others
        if first:
            print(f"passed {name} on {os.environ[_RANKS]} ranks in {time.monotonic() - start:.1f} s", flush=True)


def equal(got: Any, expected: Any, where: str) -> None:
    """The same numbers, bit for bit, in tensors, floats, and what holds them."""
    import torch

    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), f"{where}: {got} is not {expected}"
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: {list(got)} are not {list(expected)}"
        for key, value in expected.items():
            equal(got[key], value, f"{where}: {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {len(got)} are not {len(expected)}"
        for index, value in enumerate(expected):
            equal(got[index], value, f"{where}: {index}")
    else:
        assert got == expected, f"{where}: {got} is not {expected}"


def raises(kind: type[BaseException], part: str, function: Callable[[], Any]) -> str:
    """The message of what `function` throws, which must be of this kind and have this part."""
    try:
        function()
    except kind as error:
        assert part in str(error), f"'{part}' is not in: {error}"
        return str(error)
    raise AssertionError(f"no {kind.__name__} with '{part}'")


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
def shared_folder() -> Iterator[pathlib.Path]:
    """A folder that all ranks have, as long as rank 0 is inside."""
    import torch

    import libzero

    group = libzero.group()
    made = tempfile.mkdtemp(prefix="libzero-") if group.rank == 0 else ""
    text = torch.zeros(256, dtype=torch.uint8)
    text[: len(made)] = torch.tensor(list(made.encode()), dtype=torch.uint8)
    group.broadcast(text, 0, "folder")
    folder = pathlib.Path(bytes(text.tolist()).rstrip(b"\0").decode())
    try:
        yield folder
    finally:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
