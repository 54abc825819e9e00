"""What torch's own functions do with a sharded parameter, where that would be wrong in silence.

Nothing of torch is changed before the first `shard`. What is changed then, and asks first whether a tensor is a
parameter that `shard` was given:

- Tensor.grad. The engine takes each gradient as it comes, so `.grad` is None. Code that reads or writes it while
  gradients wait for `step` would do nothing in silence (torch.nn.utils.clip_grad_norm_): it gets an error.
- Tensor.data. What is written to torch's own alias leaves no trace in the parameter's version, by which the engine
  notices writes: a sharded parameter's alias shares the version.
- Module.zero_grad, Module._apply (`to`, `half`), Tensor.share_memory_, register_post_accumulate_grad_hook.
- data_ptr and __dlpack__ outside `gathered`: errors at stage 3.
- repr, tolist, numpy, pickling: they reach for the memory without an operator, and get a copy at stage 3.
- torch.autocast: Note [Autocast].

Note [Autocast]
At stage 3 two things would keep bf16 copies of all weights until backward: autocast's cache, and autograd, which saves
the copy that an operator has read. So with a model of stage 3 alive the cache stays off, and instead of such a copy a
graph saves which parameter it is of, and makes the copy again in backward: the same bits, since the weights do not
change between (autograd's own check of that is made here)."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import _C
from ._C import Error

if TYPE_CHECKING:
    from ._shard import ShardedOptimizer

_installed = False

# The optimizers that `shard` made and that live.
_optimizers: weakref.WeakSet[ShardedOptimizer] = weakref.WeakSet()
# The one that a parameter belongs to, while both live.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The ids of its keys and of some that are gone: a quick no for most tensors.
_ids: set[int] = set()
# Storages that are whole on this rank, and how many open scopes of `gathered` hold each.
_whole: Counter[int] = Counter()

_grad = torch._C.TensorBase.grad
_data = torch._C.TensorBase.data


def own(parameters: Iterable[torch.Tensor], optimizer: ShardedOptimizer) -> None:
    """`parameters` belong to `optimizer` from now on."""
    _optimizers.add(optimizer)
    reference = weakref.ref(optimizer)
    for parameter in parameters:
        _owners[parameter] = reference
    _ids.clear()
    _ids.update(id(parameter) for parameter in _owners)


def owner_of(parameter: torch.Tensor) -> ShardedOptimizer | None:
    """The optimizer that `shard` made for this parameter, while it is open."""
    if id(parameter) not in _ids:
        return None
    reference = _owners.get(parameter)
    optimizer = reference() if reference is not None else None
    return optimizer if optimizer is not None and optimizer.open else None


def set_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets `.grad` of a parameter of a sharded model: for what updates it itself."""
    with torch._C.DisableTorchFunction():  # a mode (set_default_device) would ask _set_grad
        _grad.__set__(parameter, gradient)


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, whether its bytes are there or not."""
    return tensor.untyped_storage()._cdata


def hold(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Says that these are whole on this rank until the function that it returns is called."""
    keys = [storage_of(parameter) for parameter in parameters]
    _whole.update(keys)

    def release() -> None:
        _whole.subtract(keys)
        for key in keys:
            if not _whole[key]:
                del _whole[key]
        keys.clear()

    return release


def install() -> None:
    """Changes the methods of torch that a sharded parameter needs otherwise; once."""
    global _installed
    if _installed:
        return
    _installed = True
    tensor = torch.Tensor
    tensor.grad = property(_get_grad, _set_grad, _delete_grad, _grad.__doc__)  # type: ignore[assignment]
    tensor.data = property(_get_data, _data.__set__, _data.__delete__, _data.__doc__)  # type: ignore[assignment]
    for name in ("__repr__", "tolist", "__reduce_ex__"):
        setattr(tensor, name, _copying(getattr(tensor, name)))
    for name in ("numpy", "__array__"):
        setattr(tensor, name, _copying(getattr(tensor, name), read_only=True))
    for name, instead in _ADDRESSES.items():
        setattr(tensor, name, _address(getattr(tensor, name), instead))
    _wrap(tensor, "share_memory_", _share_memory)
    _wrap(tensor, "__deepcopy__", _deepcopy)
    _wrap(tensor, "register_post_accumulate_grad_hook", _register_hook)
    _wrap(torch.nn.Module, "zero_grad", _zero_grad)
    _wrap(torch.nn.Module, "_apply", _apply)
    _wrap(torch.autocast, "__enter__", _enter_autocast)
    _wrap(torch.autocast, "__exit__", _exit_autocast)


def _wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(method, self, *arguments, **keywords)

    setattr(owner, name, functools.update_wrapper(wrapped, method))


# --- Gradients and values.


def _get_grad(self: torch.Tensor) -> torch.Tensor | None:
    gradient = _grad.__get__(self)
    if gradient is None and id(self) in _ids:
        owner = owner_of(self)
        if owner is not None and owner.pending and self.requires_grad:
            raise Error(
                f"The gradient of parameter '{owner.name_of(self)}' was taken by libzero: its .grad is empty. Use "
                "opt.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_, opt.grad_norm for the norm, "
                "opt.gradient(p) and opt.set_gradient(p, value) for a parameter's own, opt.zero_grad() to drop all. "
                "(opt: what libzero.shard returned.)"
            )
    return gradient


def _set_grad(self: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if id(self) in _ids:
        owner = owner_of(self)
        # Outside a pass a gradient would wait for nobody; None drops nothing then.
        if owner is not None and (gradient is not None or owner.pending):
            what = "Dropping" if gradient is None else "Setting"
            raise Error(
                f"{what} .grad of parameter '{owner.name_of(self)}' changes nothing: libzero keeps its gradient. Use "
                "opt.set_gradient(p, value) between backward and step, with None to drop it, opt.zero_grad() to drop "
                "those of all. "
                "(opt: what libzero.shard returned.)"
            )
    _grad.__set__(self, gradient)


def _delete_grad(self: torch.Tensor) -> None:
    _grad.__delete__(self)


def _get_data(self: torch.Tensor) -> torch.Tensor:
    # At stage 3 the pager notices writes to any alias.
    if id(self) in _ids and owner_of(self) is not None and not _C.is_sharded(self):
        return self.detach()
    return _data.__get__(self)


def _register_hook(method: Any, self: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    handle = method(self, hook)
    owner = owner_of(self)
    if owner is not None:  # torch has put the hook in the place of the engine's
        owner._engine.rehook()
    return handle


def _zero_grad(method: Any, self: torch.nn.Module, set_to_none: bool = True) -> None:
    mine = list(self.parameters())
    owned = {id(owner): owner for owner in map(owner_of, mine) if owner is not None}
    owners = {key: owner for key, owner in owned.items() if owner.pending or not set_to_none}
    for key, owner in owned.items():
        if key not in owners:
            owner.forget_zeros(mine)
    for owner in owners.values():
        those = {id(parameter) for parameter in mine}
        if not all(id(each) in those for group in owner.param_groups for each in group["params"]):
            raise Error(
                "zero_grad() of a part of a sharded model: libzero drops the gradients of all its parameters or of "
                "none. Call opt.zero_grad(), or opt.set_gradient(p, None) for single ones. (opt: what "
                "libzero.shard returned.)"
            )
        owner.zero_grad(set_to_none)
    if owners:
        others = [each for each in mine if owner_of(each) is None and each.grad is not None]
        for each in others:
            each.grad = None if set_to_none else torch.zeros_like(each.grad)
    else:
        method(self, set_to_none)


# --- Conversions.


def _apply(method: Any, self: torch.nn.Module, function: Any, *arguments: Any, **keywords: Any) -> Any:
    if getattr(function, "checks_owners", False):
        return method(self, function, *arguments, **keywords)

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        result = function(tensor)
        owner = owner_of(tensor)
        if owner is not None and isinstance(result, torch.Tensor) and (
            result.dtype != tensor.dtype or result.device != tensor.device or storage_of(result) != storage_of(tensor)
        ):
            raise Error(
                f"Parameter '{owner.name_of(tensor)}' is sharded: it stays {tensor.dtype} on {tensor.device}. Convert "
                "the model (to, half, float, cuda, to_empty) before libzero.shard; for training in bf16 give "
                "libzero.shard bf16=True."
            )
        return result

    checked.checks_owners = True  # type: ignore[attr-defined]
    return method(self, checked, *arguments, **keywords)


# --- Memory.


def _absent(tensor: torch.Tensor) -> bool:
    return _C.is_sharded(tensor) and storage_of(tensor) not in _whole


def _copying(method: Any, read_only: bool = False) -> Any:
    # `read_only`: what is written to the copy would be lost.
    def wrapped(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not _absent(self):
            return method(self, *arguments, **keywords)
        if read_only and self.requires_grad:
            return method(self, *arguments, **keywords)  # torch's own refusal
        with torch.no_grad():
            copy = _data.__get__(self).clone()
        result = method(_like(self, copy), *arguments, **keywords)
        if read_only:
            result.flags.writeable = False
        return result

    return functools.update_wrapper(wrapped, method)


def _deepcopy(method: Any, self: torch.Tensor, memo: dict[int, Any]) -> Any:
    if not _absent(self):
        return method(self, memo)
    if id(self) not in memo:
        with torch.no_grad():
            memo[id(self)] = _like(self, _data.__get__(self).clone())
    return memo[id(self)]


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


# Also where the bytes are there by chance: the address would be another's soon. Inside operators they are held.
_ADDRESSES = {
    "data_ptr": "The address holds inside `with libzero.gathered(p):`; opt.parameter(p) is a copy.",
    "__dlpack__": "Use a copy (p.detach().clone()), or do so inside `with libzero.gathered(p):`.",
}


def _address(method: Any, instead: str) -> Any:
    def wrapped(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if _C.is_sharded(self) and not _C.is_gathered(self):
            raise Error(f"{method.__name__}() of {_described(self)}, whose bytes come and go (stage 3). {instead}")
        return method(self, *arguments, **keywords)

    return functools.update_wrapper(wrapped, method)


def _share_memory(method: Any, self: torch.Tensor) -> torch.Tensor:
    if _C.is_sharded(self) or owner_of(self) is not None:
        raise Error(
            f"share_memory_() of {_described(self)}: its memory is libzero's. Share the model before libzero.shard, or "
            "share a copy (p.clone())."
        )
    return method(self)


def _described(tensor: torch.Tensor) -> str:
    owner = owner_of(tensor)
    return f"parameter '{owner.name_of(tensor)}'" if owner is not None else "a sharded parameter"


# --- Autocast.


def _paged() -> bool:
    return any(optimizer.open and optimizer.paged for optimizer in _optimizers)


def _enter_autocast(method: Any, self: torch.autocast) -> Any:
    result = method(self)
    hooked = False
    if self._enabled and not torch.compiler.is_compiling() and _paged():
        torch.set_autocast_cache_enabled(False)
        # Hooks that are there are those of an outer scope, or the program's (a checkpoint recomputes): they stay.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    if hooked:
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, unpack)
    _hooked_scopes(self).append(hooked)
    return result


def _exit_autocast(method: Any, self: torch.autocast, *exception: Any) -> Any:
    scopes = _hooked_scopes(self)
    if scopes and scopes.pop():
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return method(self, *exception)


def _hooked_scopes(autocast: torch.autocast) -> list[bool]:
    # One autocast object may be entered several times (as a decorator).
    return autocast.__dict__.setdefault("_libzero_scopes", [])


class _Cast:
    """A cast of a parameter, as a graph saves it."""

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self.parameter = parameter
        self.version = parameter._version
        self.dtype = tensor.dtype
        self.view = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> torch.Tensor:
        _check_version(self.parameter, self.version)
        with torch.no_grad():
            return self.parameter.detach().to(self.dtype).as_strided(*self.view)


def _pack(tensor: torch.Tensor) -> Any:
    return pack(tensor, _C.is_sharded)


def pack(tensor: torch.Tensor, sharded: Callable[[torch.Tensor], bool]) -> Any:
    """What a graph saves of a tensor: of a cast of a parameter that is sharded, how to make it again."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is not None and node.name() == "ToCopyBackward0" and base.dtype == tensor.dtype:
        leaf = getattr(node.next_functions[0][0], "variable", None)
        if leaf is not None and sharded(leaf) and leaf.shape == base.shape:
            return _Cast(leaf, tensor)
    # Detached: an operator's own result would hold the graph that holds it.
    return tensor.detach(), None if tensor.is_inference() else tensor._version


def unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, _Cast):
        return packed.tensor()
    tensor, version = packed
    _check_version(tensor, version)
    return tensor


def _check_version(tensor: torch.Tensor, version: int | None) -> None:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "One of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
            f"{version}."
        )


# --- The torch optimizer.


def guard(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
    """`optimizer`, from which `sharded` was made, does what the new one does or says so, while that is open."""
    weak = weakref.ref(sharded)

    def replacement() -> ShardedOptimizer | None:
        now = weak()
        return now if now is not None and now.open and not now.runs_inner else None

    def refusing(what: str, instead: str) -> Callable[..., None]:
        def refuse(*_: Any) -> None:
            if replacement() is not None:
                raise Error(
                    f"{what} of the torch optimizer that was given to libzero.shard: {instead} (opt: what "
                    "libzero.shard returned.)"
                )

        return refuse

    optimizer.register_step_pre_hook(refusing("step()", "it has no gradients any more. Call opt.step()."))
    optimizer.register_state_dict_pre_hook(
        refusing("state_dict()", "its states are in opt now. Call opt.state_dict().")
    )
    optimizer.register_load_state_dict_pre_hook(
        refusing("load_state_dict()", "its states are in opt now. Call opt.load_state_dict(...).")
    )
    refuse_group = refusing(
        "add_param_group()", "the engine's groups are fixed. Add it before libzero.shard, or shard the model anew."
    )
    add, zero = type(optimizer).add_param_group, type(optimizer).zero_grad
    inner = weakref.ref(optimizer)

    def add_param_group(param_group: dict[str, Any]) -> None:
        refuse_group()
        if (given := inner()) is not None:
            add(given, param_group)

    def zero_grad(set_to_none: bool = True) -> None:
        if (now := replacement()) is not None:
            now.zero_grad(set_to_none)
        elif (given := inner()) is not None:
            zero(given, set_to_none)

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def has_stepped(*_: Any) -> None:
        if (given := inner()) is not None:  # schedulers that act on it ask
            given._opt_called = True  # type: ignore[attr-defined]

    sharded.register_step_post_hook(has_stepped)
