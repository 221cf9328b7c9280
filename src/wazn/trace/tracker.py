"""Which storages are alive, in order: the raw record of a rehearsal.

A `StorageTracker` is a dispatch mode that sits above the fake tensors. After every operation it looks at
the storages of the results: one that it has not seen is an allocation, and a finalizer on the storage
object records the free when the last tensor that uses it dies. Views share their storage and in-place
operations return a known one, so neither allocates.

It sees what an operation returns, not what a CUDA kernel allocates for itself meanwhile; those workspaces
are put in by `wazn.trace.kernels`, through `StorageTracker.take`.

Sizes are the requested bytes of the storage; `rounded_bytes` is what PyTorch counts as allocated for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from wazn.timeline.events import Category
from wazn.trace.places import NOWHERE, Place, Places

__all__ = [
    "DEVICE",
    "ROUNDING_BYTES",
    "StorageEvent",
    "StorageTracker",
    "rounded_bytes",
    "tensors_in",
]

DEVICE = torch.device("cpu")  # stands for the accelerator; the text "cpu" stands for the host
ROUNDING_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize


class StorageEvent(NamedTuple):
    """One allocation (`num_bytes` > 0) or one free (`num_bytes` < 0, the same size) of a storage."""

    block_id: int
    num_bytes: int
    op: str  # the operation that allocated it, such as `aten.mm.default`
    shape: tuple[int, ...]  # of the tensor that first showed the storage
    dtype: str  # such as `bfloat16`
    phase: str
    step: int
    place: Place  # where in the model and in the code


def rounded_bytes(num_bytes: int) -> int:
    """Return what PyTorch counts as allocated for a request: the next multiple of 512 bytes.

    >>> rounded_bytes(1), rounded_bytes(1024)
    (512, 1024)
    """
    return (num_bytes + ROUNDING_BYTES - 1) // ROUNDING_BYTES * ROUNDING_BYTES


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in an operation's arguments or results (nested lists and tuples)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


_DEVICE_OF = torch.ops.prim.device.default
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


@cache
def _name(func: Any) -> str:
    return str(func)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class StorageTracker(TorchDispatchMode):
    """Records every storage that operations allocate while it is active.

    `events` is the record; `current_bytes` and `peak_bytes` are sums over live storages, each rounded to
    512 bytes. `phase` and `step` are marks that the driver sets; they go into each event, as does the place
    that `places` knows. `run_operation`, if given, replaces the plain call of an operation (see
    `wazn.trace.world`). `names` says what blocks are, where somebody said so: see `name`.
    """

    def __init__(self, run_operation: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.events: list[StorageEvent] = []
        self.current_bytes = 0
        self.peak_bytes = 0
        self.phase = ""
        self.step = 0
        self.place = NOWHERE
        self.places: Places | None = None
        self.names: dict[int, tuple[Category, str]] = {}
        self.destination: str | None = (
            None  # `host` or `device` while a result is known to go there
        )
        self.previous: Any = None  # the operation that ran last
        self._run_operation = run_operation
        self._alive: dict[int, StorageEvent] = {}  # the allocation of each live block
        self._ids: dict[int, int] = {}  # address of a live storage -> its block
        self._host: set[int] = set()  # addresses of live storages in host memory
        self._deaths: dict[int, weakref.ref[Any]] = {}  # these record the frees
        self._next_id = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and record what it allocated."""
        if func is _DEVICE_OF:  # autograd asks twice for each operation
            self.previous = func
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # function modes end where operations begin
            if self.places is not None:
                self.place = self.places.here()
            if self._run_operation is not None:
                result = self._run_operation(self, func, args, kwargs or {})
            else:
                result = func(*args, **kwargs or {})
            self.previous = func
            if self._goes_to_host(args):
                self.keep_on_host(result)
            else:
                self.observe(result, op=_name(func))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operation PyTorch's wrapper against TorchDynamo: nothing is compiled here."""
        return False

    @contextmanager
    def going_to(self, destination: str) -> Iterator[None]:
        """Say where the results of the operations inside live: `host` or `device`."""
        before, self.destination = self.destination, destination
        try:
            yield
        finally:
            self.destination = before

    def _goes_to_host(self, args: tuple[Any, ...]) -> bool:
        if self.destination is not None:
            return self.destination == "host"
        if not self._host:
            return False
        if args and type(args[0]) is FakeTensor and not self.is_on_host(args[0]):  # nearly always
            return False
        found = False
        for tensor in tensors_in(args):
            if not self.is_on_host(tensor):
                return False
            found = True
        return found

    def observe(self, value: Any, *, op: str) -> None:
        """Record the storages in `value` that are new, or that changed their size."""
        if type(value) is FakeTensor:  # nearly always
            self._observe_storage(value.untyped_storage(), value, op)
            return
        for tensor in tensors_in(value):
            if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
                continue
            self._observe_storage(tensor.untyped_storage(), tensor, op)

    def maker(self, tensor: torch.Tensor) -> str:
        """Return the operation that allocated the tensor's storage, or an empty text if it is not recorded."""
        block_id = self._ids.get(tensor.untyped_storage()._cdata)
        return "" if block_id is None else self._alive[block_id].op

    def block_id(self, tensor: torch.Tensor) -> int | None:
        """Return the identity of the tensor's storage, or None if it is not recorded."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    def alive(self) -> list[StorageEvent]:
        """Return the allocations of the live blocks, in order."""
        return list(self._alive.values())

    def name(self, value: Any, category: Category, module: str = "") -> None:
        """Say what the blocks of the tensors in `value` are, and whose; what was said first stays."""
        for tensor in tensors_in(value):
            block_id = self.block_id(tensor)
            if block_id is not None:
                self.names.setdefault(block_id, (category, module))

    def keep_on_host(self, value: Any) -> None:
        """Say that the storages in `value` live in host memory: from now on they are not counted."""
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            if storage._cdata in self._host:
                continue
            if storage._cdata in self._ids:
                self._free(self._ids.pop(storage._cdata))
            else:
                self._watch(storage, storage._cdata)
            self._host.add(storage._cdata)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Say whether the tensor was declared to live in host memory; of a batch of vmap, what it wraps."""
        while _is_wrapped(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()._cdata in self._host

    def take(self, num_bytes: int, *, op: str) -> int:
        """Record an allocation that no tensor shows, and return its identity; `give_back` ends it."""
        return self._allocate(num_bytes, op, shape=(num_bytes,), dtype="uint8")

    def give_back(self, block_id: int) -> None:
        """End what `take` began."""
        self._free(block_id)

    def reset_peak(self) -> None:
        """Forget the peak so far: it becomes what is alive now."""
        self.peak_bytes = self.current_bytes

    def _observe_storage(self, storage: Any, tensor: torch.Tensor, op: str) -> None:
        address = storage._cdata
        if address in self._host:
            return
        num_bytes = storage.nbytes()
        known = self._ids.get(address)
        if known is not None:
            if self._alive[known].num_bytes == num_bytes:
                return
            self._free(known)  # resized: PyTorch allocates anew
        else:
            self._watch(storage, address)
        dtype = _dtype_name(tensor.dtype)
        self._ids[address] = self._allocate(num_bytes, op, shape=tuple(tensor.shape), dtype=dtype)

    def _watch(self, storage: Any, address: int) -> None:
        self._deaths[address] = weakref.ref(storage, partial(self._forget, address))

    def _forget(self, address: int, _: Any) -> None:
        del self._deaths[address]
        self._host.discard(address)
        block_id = self._ids.pop(address, None)
        if block_id is not None:
            self._free(block_id)

    def _allocate(self, num_bytes: int, op: str, *, shape: tuple[int, ...], dtype: str) -> int:
        block_id = self._next_id
        self._next_id += 1
        event = StorageEvent(
            block_id, num_bytes, op, shape, dtype, self.phase, self.step, self.place
        )
        self._alive[block_id] = event
        self.current_bytes += rounded_bytes(num_bytes)
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
        if num_bytes:
            self.events.append(event)
        return block_id

    def _free(self, block_id: int) -> None:
        _, num_bytes, op, shape, dtype, *_ = self._alive.pop(block_id)
        self.current_bytes -= rounded_bytes(num_bytes)
        if num_bytes:
            self.events.append(
                StorageEvent(
                    block_id, -num_bytes, op, shape, dtype, self.phase, self.step, self.place
                )
            )
