"""What operations return, remembered: fake results without running the operation again.

A model of many equal layers asks the same questions over and over. What an operation on fake tensors returns is
settled by the operation, its constants, and the sizes, strides, offsets and types of its tensors. The first answer is
PyTorch's own; if it is of a kind that can be made again (new storages, a view of one argument, an argument itself,
constants), later ones are made from it directly. The cache inside `FakeTensorMode` does the same, at many times the
cost.

All else goes to PyTorch each time: operations whose result depends on data or that change the sizes of a tensor,
those of other packages, and tensors that are not plain fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Recall"]

_NAMESPACES = ("aten", "prims", "bitsandbytes")
_UNSETTLED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
_UNSETTLED_NAMES = ("aten::resize", "aten::_resize", "aten::set_", "aten::lift")
_CONSTANTS = {
    type(None),
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}
_UNSEEN = object()
_META = torch.device("meta")

# Looked up once: each is called for nearly every operation.
_default_dtype = torch.get_default_dtype
_make_subclass = torch.Tensor._make_subclass
_BelowModes = torch._C._DisableTorchDispatch

Maker = Callable[[list[Any]], Any]  # makes a result again, from the tensors among the arguments


class _Unsettled(Exception):
    """Sizes, types and constants do not settle the result."""


class Recall:
    """Answers operations on fake tensors, from memory where it can.

    An instance belongs to one mode of fake tensors, which must be active when it is called.
    """

    def __init__(self) -> None:
        self._makers: dict[tuple[Any, ...], Maker | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)`."""
        parts: list[Any] = [func, _default_dtype()]
        tensors: list[Any] = []
        try:
            _describe(args, parts, tensors)
            if kwargs:
                parts += kwargs
                _describe(kwargs.values(), parts, tensors)
        except _Unsettled:
            return func(*args, **kwargs)
        key = tuple(parts)
        maker: Any = self._makers.get(key, _UNSEEN)
        if maker is None:
            return func(*args, **kwargs)
        if maker is not _UNSEEN:
            return maker(tensors)
        if _is_foreach(func) and _are_lists(args, kwargs):
            result = self._one_by_one(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._makers[key] = _maker(func, result, tensors)
        return result

    def _one_by_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take an operation on lists apart: it does the same with each place, and many places are alike."""
        results = []
        for place in range(len(args[0])):
            own = tuple(arg[place : place + 1] if type(arg) is list else arg for arg in args)
            results.append(self(func, own, kwargs))
        return None if results[0] is None else [item for (item,) in results]


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[Any]) -> None:
    """Write down what settles a result; `tensors` takes the tensors among the values, in order.

    Raises: _Unsettled where a value is of a kind of which not all is written down.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:  # PyTorch computes with the values of such a tensor
                raise _Unsettled
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset())
            tensors.append(value)
        elif kind in _CONSTANTS:
            parts += (kind, value)  # the kind, because 1 == 1.0 == True
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            _describe(value, parts, tensors)
        else:
            raise _Unsettled


@cache
def _is_settled(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
        return False
    return not (_UNSETTLED.intersection(func.tags) or func.name().startswith(_UNSETTLED_NAMES))


@cache
def _is_foreach(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.name().startswith("aten::_foreach_")


def _are_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether arguments are lists of one length, longer than one, and numbers for all places."""
    lengths = {len(arg) for arg in args if type(arg) is list}
    others = [arg for arg in (*args, *kwargs.values()) if type(arg) is not list]
    return len(lengths) == 1 and lengths.pop() > 1 and not any(map(torch.is_tensor, others))


def _maker(func: Any, result: Any, tensors: list[Any]) -> Maker | None:
    """Return what makes an operation's result again for arguments like these; None where nothing can."""
    if not _is_settled(func):
        return None
    try:
        owners = _owners(tensors)
        if type(result) in (list, tuple):
            return _sequence(result, tensors, owners)
        return _single(result, tensors, owners)
    except _Unsettled:
        return None


def _sequence(
    results: list[Any] | tuple[Any, ...], tensors: list[Any], owners: dict[int, list[int]]
) -> Maker:
    new = [_address(item) for item in results if isinstance(item, torch.Tensor)]
    new = [address for address in new if address not in owners]
    if len(set(new)) < len(new):
        raise _Unsettled  # results that share one new storage
    kind = type(results)
    makers = [_single(item, tensors, owners) for item in results]
    return lambda arguments: kind([make(arguments) for make in makers])


def _single(result: Any, tensors: list[Any], owners: dict[int, list[int]]) -> Maker:
    if type(result) in _CONSTANTS:
        return lambda _: result
    if type(result) is not FakeTensor or result.constant is not None:
        raise _Unsettled
    owner, *others = owners.get(_address(result), [-1])
    if others:
        raise _Unsettled  # two arguments share one storage, and other ones need not
    if owner >= 0 and tensors[owner] is result:
        return itemgetter(owner)
    make = _new(result) if owner < 0 else _view(result, owner)
    if _looks(make(tensors)) != _looks(result):
        raise _Unsettled
    return make


def _owners(tensors: list[Any]) -> dict[int, list[int]]:
    """Return which tensors use a storage, by its address."""
    owners: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        owners.setdefault(_address(tensor), []).append(index)
    return owners


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.untyped_storage().nbytes(),
        torch._C._dispatch_key_set(tensor),
    )


def _new(result: Any) -> Maker:
    """Make a tensor with a storage of its own."""
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    device, attributes = result.fake_device, dict(result.__dict__)

    def make(_: list[Any]) -> Any:
        with _BelowModes():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        return _faked(bare, device, attributes)

    return make


def _view(result: Any, owner: int) -> Maker:
    """Make a tensor on the storage of one of the arguments."""
    shape, stride, dtype = result.shape, result.stride(), result.dtype
    offset = result.storage_offset()
    device, attributes = result.fake_device, dict(result.__dict__)

    def make(arguments: list[Any]) -> Any:
        storage = arguments[owner].untyped_storage()
        with _BelowModes():
            bare = torch.empty(0, dtype=dtype, device=_META)
            bare.set_(storage, offset, shape, stride)
        return _faked(bare, device, attributes)

    return make


def _faked(bare: torch.Tensor, device: torch.device, attributes: dict[str, Any]) -> Any:
    """Do what `FakeTensor.__new__` does, with attributes that it has set before."""
    made = _make_subclass(
        FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device
    )
    made.__dict__ = attributes.copy()
    return made
