"""libzero's own checkpoints in the loops of other packages (accelerate, transformers, Lightning).

Note [Checkpoints of other loops]
Each rank writes its slices, as `opt.save` does, so no rank holds more than these and a buffer, and a run at any number
of ranks and stage loads them. What the loop keeps beside the states is small: the groups of the optimizer, counters,
schedulers. Rank 0 attaches it to the checkpoint, which is whole or absent, or writes it to a file of the loop's own."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import _options
from ._C import CheckpointError
from ._shard import ShardedOptimizer

# The key of the optimizer's groups where a loop keeps the states of an optimizer.
GROUPS = "libzero_groups"
_ATTACHED = "loop"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(folder, "manifest.json"))


def save(sharded: ShardedOptimizer, folder: str | os.PathLike[str], kept: Any = None) -> None:
    """Saves the states, with what rank 0 has `kept`, anything that torch.save takes. Collective."""
    attached = {}
    if sharded.group.rank == 0:
        os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        if kept is not None:
            content = io.BytesIO()
            torch.save(kept, content)
            attached[_ATTACHED] = base64.b64encode(content.getvalue()).decode("ascii")
    sharded.save(folder, attached)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a file, or a checkpoint, that a save in another form would leave beside its own."""
    if is_checkpoint(path):
        shutil.rmtree(path)
    elif os.path.isfile(path):
        os.remove(path)


def kept_in(folder: str | os.PathLike[str], weights_only: bool | None = True) -> Any:
    """What `save` was given. Reads the manifest alone."""
    attached = _manifest(folder)["files"][0].get("attached", {})
    if _ATTACHED not in attached:
        raise CheckpointError(f"'{os.fspath(folder)}' is a checkpoint of libzero that this loop has not written.")
    content = io.BytesIO(base64.b64decode(attached[_ATTACHED]))
    return torch.load(content, map_location="cpu", weights_only=weights_only)


def put_groups(sharded: ShardedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Sets the groups' hyper-parameters to those that `groups_as_saved` gave."""
    for group, values in zip(sharded.param_groups, saved, strict=True):
        for key, value in values.items():
            _options.put(group, key, value)


def _manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        return json.load(file)


class Weights(Mapping[str, torch.Tensor]):
    """The parameters and buffers in a checkpoint by all their names, for a model that is not sharded. Each is read and
    put together when it is asked for: master weights where there are some."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, manifest = os.fspath(folder), _manifest(folder)
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        self._parameters = {
            name: (index, each)
            for index, each in enumerate(manifest["parameters"])
            for name in (each["name"], *each.get("other_names", ()))
        }
        self._slices: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for file in manifest["files"]:
            for index, begin, end in file["slices"]:
                self._slices[index].append((file["name"], begin, end))
        self._first = manifest["files"][0]["name"]
        self._buffers = {each["name"] for each in manifest["buffers"]}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            return self._read(self._first, f"buffer.{name}")
        index, parameter = self._parameters[name]
        state = "master" if "master" in parameter["states"] else "parameter"
        pieces = [
            (begin, end, self._read(file, f"{state}.{parameter['name']}"))
            for file, begin, end in self._slices[index]
            if begin < end
        ]
        count, dtype = sum(end - begin for begin, end, _ in pieces), _DTYPES[parameter["states"][state]]
        whole = torch.empty(count, dtype=dtype, device="cpu")
        for begin, end, values in pieces:
            whole[begin:end] = values
        return whole.as_strided(parameter["shape"], parameter["strides"])

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._buffers

    def __len__(self) -> int:
        return len(self._parameters) + len(self._buffers)

    def _read(self, name: str, key: str) -> torch.Tensor:
        with open(os.path.join(self._folder, name), "rb") as file:
            if name not in self._headers:
                (length,) = struct.unpack("<Q", file.read(8))
                self._headers[name] = (8 + length, json.loads(file.read(length)))
            start, header = self._headers[name]
            begin, end = header[key]["data_offsets"]
            file.seek(start + begin)
            content = bytearray(file.read(end - begin))
        dtype, shape = _DTYPES[header[key]["dtype"]], header[key]["shape"]
        if not content:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(content, dtype=dtype).view(shape)
