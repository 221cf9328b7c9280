"""Values of small tensors that a run computes from its batch: masks, positions, lengths, counts.

Fake tensors have no data, and yet code asks: is anything padded, where does a packed sequence begin, how many tokens
have labels? What answers these questions is made of token lists and of factories such as `arange`, so it can be
known: `KnownValues` computes every operation on known tensors a second time, with data. A question about a tensor
whose value is not known (a loss, the choice of a router) goes on to the engine, which answers as in a healthy run.

Followed are tensors of up to four million elements that come from known ones, and views of them. What stays fake costs
next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from wazn.errors import InputError
from wazn.trace.assumed import ASSUMED
from wazn.trace.tracker import DEVICE, StorageTracker, tensors_in

__all__ = ["KnownValues"]

_LARGEST_ELEMENTS = 4_000_000  # a batch of 30 x 128k tokens; larger masks are not followed
_LARGEST_OFFSET = 8  # of the first position: RoBERTa's, BART's and OPT's is 2
_VALUE = "_wazn_value"
_ATEN = torch.ops.aten

_FACTORIES = {
    _ATEN.arange.default,
    _ATEN.arange.start,
    _ATEN.arange.start_step,
    _ATEN.zeros.default,
    _ATEN.ones.default,
    _ATEN.full.default,
    _ATEN.scalar_tensor.default,
}
_SHUFFLES = {_ATEN.randperm.default, _ATEN.randperm.generator}  # they leave things in order
_SHAPED_BY_VALUES = {
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.repeat_interleave.Tensor,
    _ATEN.unique_consecutive.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.bincount.default,
}
_ANSWERS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default}
# The axes of the first argument that are looked up, each with its indices.
_LOOK_UP: dict[Any, Callable[[tuple[Any, ...]], list[tuple[int, Any]]]] = {
    _ATEN.embedding.default: lambda args: [(0, args[1])],
    _ATEN.index_select.default: lambda args: [(args[1], args[2])],
    _ATEN.gather.default: lambda args: [(args[1], args[2])],
    _ATEN.index.Tensor: lambda args: [
        (dim, indices) for dim, indices in enumerate(args[1]) if indices is not None
    ],
}
_TAKE_MASKS = {
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
}


class KnownValues:
    """Runs operations through `run`, and beside it on the values of the tensors that have one."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._unknown: dict[int, Any] = {}  # storages of values into which something unknown went

    def __call__(
        self, tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func(*args, **kwargs)`, or what stands for it, and return its result."""
        if (
            torch.is_inference_mode_enabled()
        ):  # composite operations arrive whole: nobody needs their parts' gradients
            with tracker:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _TAKE_MASKS and any(_is_mask(index) for index in args[1]):
            return self._with_positions(tracker, func, args, kwargs)
        if func is _ATEN.masked_select.default:
            return self._masked_select(tracker, *args)
        if func in _FACTORIES:
            result = self._run(tracker, func, args, kwargs)
            self._note(func, args, kwargs, result)
            return result
        if func in _SHUFFLES:
            result = self._run(tracker, func, args, kwargs)
            self._note(_ATEN.arange.default, args[:1], {"dtype": result.dtype}, result)
            return result
        first = args[0] if args else None
        if type(first) in (int, float):  # `torch.div(512, 256)` is a tensor as well
            return self._on_known(tracker, func, args, kwargs)
        if type(first) is list and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or self._value(first) is None:
            if func in _LOOK_UP:
                for dim, indices in _LOOK_UP[func](args):
                    self._refuse_beyond(first, dim, indices)
            result = self._run(tracker, func, args, kwargs)
            if func in ASSUMED and args[0].dtype.is_floating_point:
                self._assume(func, args, result)
            return result
        return self._on_known(tracker, func, args, kwargs)

    def _on_known(
        self, tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            values, options = self._with_values(args), self._with_values(kwargs)
        except LookupError:
            if func._schema.is_mutable:
                self._forget(args[0])
            return self._run(tracker, func, args, kwargs)
        if func in _ANSWERS:
            with torch._C._DisableTorchDispatch():
                return func(*values)
        if func in _SHAPED_BY_VALUES:
            return self._shaped(func, values, options)
        result = self._run(tracker, func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self._note(func, values, options, result)
        return result

    def _refuse_beyond(self, table: torch.Tensor, dim: int, indices: torch.Tensor) -> None:
        """Raises: InputError where a known index is beyond a table, such as that of learned positions."""
        known = self._value(indices)
        if known is None or not known.numel():
            return
        with torch._C._DisableTorchDispatch():
            last = int(known.max())
        rows = table.shape[dim]
        if last >= rows:
            length = known.shape[-1] if known.dim() else 1
            if last > length + _LARGEST_OFFSET:
                raise InputError(
                    f"index {last:,} is beyond a table of {rows:,} rows",
                    hint="is a token of the configuration, such as `image_token_id`, beyond its `vocab_size`?",
                )
            fits = max(1, length - (last - rows + 1))
            raise InputError(
                f"a sample is too long: its positions reach {last:,}, and the model's table has {rows:,} rows",
                hint=f"at most {fits:,} tokens (`--seq-len`; `--target-len` for labels)",
            )

    def _assume(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Give results the values that a healthy run gives them."""
        with torch._C._DisableTorchDispatch():
            known = ASSUMED[func](args, result)
        for tensor, value in zip(tensors_in(result), known, strict=True):
            if value is not None and isinstance(tensor, FakeTensor):
                tensor.__dict__[_VALUE] = value

    def _forget(self, written: Any) -> None:
        for tensor in tensors_in([written]):
            value = self._value(tensor)
            if value is not None:
                storage = value.untyped_storage()
                self._unknown[storage._cdata] = storage  # kept, so that its address stays its own

    def _shaped(self, func: Any, values: Any, options: Any) -> Any:
        """Return the result of an operation whose shape depends on data."""
        with torch._C._DisableTorchDispatch():
            known = func(*values, **options)
        if isinstance(known, torch.Tensor):
            return _fake_of(known)
        return tuple(_fake_of(tensor) for tensor in known)

    def _masked_select(
        self, tracker: StorageTracker, tensor: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Select as many elements as the mask has, all of them where it is not known."""
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        known, chosen = self._value(tensor), self._value(mask)
        if known is not None and chosen is not None:
            return self._shaped(_ATEN.masked_select.default, (known, chosen), {})
        numel = torch.Size(shape).numel()
        if chosen is not None:
            with torch._C._DisableTorchDispatch():
                numel = int(chosen.expand(shape).sum())
        return torch.empty((numel,), dtype=tensor.dtype, device=DEVICE)

    def _with_positions(
        self, tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Put positions in place of masks among indices, as the operation itself begins.

        Source: `expandTensors` in aten/src/ATen/native/IndexingUtils.h; a single number that is put under a mask takes
        `masked_fill` instead: `canDispatchToMaskedFill` in TensorAdvancedIndexing.cpp.
        """
        if func is not _ATEN.index.Tensor and args[2].numel() == 1 and not (args + (False,))[3]:
            return self._run(tracker, func, args, kwargs)
        indices: list[Any] = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            known = self._value(index)
            if known is None:
                positions = self._run(tracker, _ATEN.nonzero.default, (index,), {})
            else:
                positions = self._shaped(_ATEN.nonzero.default, (known,), {})
            tracker.observe(positions, op=str(_ATEN.nonzero.default))
            columns = _ATEN.unbind.int(positions, 1)
            value = self._value(positions)
            if value is not None:
                self._note(_ATEN.unbind.int, (value, 1), {}, columns)
            indices += columns
        result = self(tracker, func, (args[0], indices, *args[2:]), kwargs)
        tracker.observe(result, op=str(func))  # while the positions are there
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with its data, or None where that is not known."""
        if not isinstance(tensor, FakeTensor):
            is_plain = type(tensor) is torch.Tensor and not tensor.is_meta
            return tensor if is_plain and _is_followed(tensor) else None
        value: torch.Tensor | None = tensor.__dict__.get(_VALUE)
        if self._unknown and value is not None and value.untyped_storage()._cdata in self._unknown:
            return None
        return value

    def _with_values(self, tree: Any) -> Any:
        """Return arguments with values in place of tensors. Raises: LookupError where one is not known."""
        if isinstance(tree, torch.Tensor):
            value = self._value(tree)
            if value is None:
                raise LookupError
            return value
        if isinstance(tree, list | tuple):
            return type(tree)(self._with_values(item) for item in tree)
        if isinstance(tree, dict):
            return {name: self._with_values(item) for name, item in tree.items()}
        return tree

    def _note(self, func: Any, values: Any, options: Any, result: Any) -> None:
        """Compute the operation with data and keep that with its result."""
        results = list(tensors_in(result))
        is_followed = bool(results) and all(_is_followed(tensor) for tensor in results)
        if not (is_followed or func.is_view or func._schema.is_mutable):
            return
        options = {name: item for name, item in options.items() if name != "pin_memory"}
        try:
            with torch._C._DisableTorchDispatch():
                known = list(tensors_in(func(*values, **options)))
        except (
            NotImplementedError
        ):  # the CPU has no kernel for the type; CUDA has, as for integers' `histc`
            return
        except RuntimeError as error:
            if "not implemented for" not in str(error):
                raise
            return
        for tensor, value in zip(results, known, strict=True):
            if isinstance(tensor, FakeTensor) and not value.is_meta:
                tensor.__dict__[_VALUE] = value


def _is_followed(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _LARGEST_ELEMENTS


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fake_of(known: torch.Tensor) -> torch.Tensor:
    fake = torch.empty(known.shape, dtype=known.dtype, device=DEVICE)
    fake.__dict__[_VALUE] = known
    return fake
