"""The device on which a model trains.

Note [Ranks and devices]
Each rank has one device, by its number among the ranks of its host. The tensors of a model travel between the devices by
NCCL, beside the group of ranks, which carries checks, scalars and texts in the memory of the host. Where NCCL cannot
carry them, because two ranks share a GPU or because the device is none of CUDA's, the host's group carries them too:
with the same sums, and slowly, since each collective passes through the host."""

from __future__ import annotations

import hashlib
import warnings

import torch

from . import _C
from ._C import ConfigError


def of(model: torch.nn.Module) -> torch.device:
    """The device of a model's parameters; the CPU where it has none, or where they have no values yet."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def resolved(device: torch.device | str, group: _C.Group) -> torch.device:
    """The device with its index: without one the rank's own. Throws ConfigError where there is no such device."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}, which torch takes for no device: {error}") from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type == "cuda":
        _C.load_device_plugin("cuda")  # which says what is missing
    count = _C.device_count(wanted)
    if count == 0:
        raise ConfigError(f"The device '{wanted}' cannot be used: LibTorch finds no device of the type '{wanted.type}'.")
    if wanted.index is None:
        if group.local_size == 1:
            return torch.empty(0, device=wanted).device
        return torch.device(wanted.type, group.local_rank % count)
    if wanted.index >= count:
        raise ConfigError(
            f"The device '{wanted}' does not exist: LibTorch finds {count} of the type '{wanted.type}', with the indices "
            f"0 to {count - 1}."
        )
    return wanted


def carrier(group: _C.Group, device: torch.device) -> _C.Group:
    """The same ranks, whose collectives carry tensors of `device`. Collective, except for the CPU: Note [Ranks and
    devices]."""
    if device.type == "cpu" or group.device == device:
        return group
    through_host = device.type != "cuda" or shared(group, device)
    if through_host and device.type == "cuda" and group.rank == 0:
        warnings.warn(
            "Ranks share a GPU, so what they exchange passes through the memory of the host, which is slow. Start one "
            "rank for each GPU.",
            stacklevel=5,
        )
    return _C.on_device(group, device, through_host)


def shared(group: _C.Group, device: torch.device) -> bool:
    """Whether two ranks have the same device. Collective."""
    if group.size == 1:
        return False
    digest = hashlib.sha256(_identity(device).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], dtype=torch.int64, device="cpu")
    return len(set(group.all_gather_control(mine, "devices").tolist())) < group.size


def _identity(device: torch.device) -> str:
    # Not the index: a launcher may show each rank one device, whose index is 0.
    return str(torch.cuda.get_device_properties(device).uuid)


def by_nccl(otherwise: str = "") -> bool:
    """Whether torch.distributed's group is NCCL's; `otherwise`: the backend that it will get, where there is none yet."""
    made = torch.distributed.is_initialized()
    return "nccl" in (str(torch.distributed.get_backend()) if made else otherwise)
