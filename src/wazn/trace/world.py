"""Fake tensors on the cpu device that behave as CUDA tensors do.

A `World` is a context: inside it every new tensor is fake (`torch._subclasses.FakeTensorMode`), every allocation is
recorded, and CUDA's habits replace the CPU's:

    habits     functions that take another path on CUDA (attention, dropout, normalisation), and autocast's lists
    kernels    memory that CUDA kernels take for the time of one operation
    here       what the autograd engine does in place with real tensors and refuses to do with fake ones; answers to `.item()`

Why not a fake CUDA device: a CPU build of PyTorch cannot run backward on one (no device guard).
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wazn.trace import kernels
from wazn.trace.autocast import cuda_autocast
from wazn.trace.habits import Habits
from wazn.trace.tracker import DEVICE, StorageTracker

__all__ = ["World"]

_AMPERE = (8, 0)
_NEVER_IN_A_HEALTHY_RUN = (
    "aten.any",
    "aten.isnan",
    "aten.isinf",
    "aten.logical_or",
    "aten.bitwise_or",
)


class World:
    """The context in which real library code runs without data and without a GPU.

    Args:
        capability: compute capability of the card, such as (8, 0) for an A100; it decides the attention kernel.
    """

    def __init__(self, *, capability: tuple[int, int] = _AMPERE) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = StorageTracker(_Engine(capability))
        self.capability = capability
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.fake_mode)
        self._stack.enter_context(self.tracker)
        self._stack.enter_context(cuda_autocast())
        habits = Habits(self.tracker, capability=self.capability)
        self._stack.enter_context(habits.through_backward())
        self._stack.enter_context(habits)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def materialise(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give a module that was built on `meta` fake storages, in place; what shared one goes on sharing it.

        Parameters are put into their modules anew: `Module.to` would swap them in place, which fake tensors refuse.
        """
        made: dict[int, Any] = {}
        for owner in module.modules():
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        table[name] = made.setdefault(id(tensor), None) or _fake_like(tensor)
                        made[id(tensor)] = table[name]
        return module


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_like(tensor, device=DEVICE, requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


class _Engine:
    """Runs one operation as it would run on CUDA with real tensors."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._previous: Any = None

    def __call__(
        self, tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        previous, self._previous = self._previous, func
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(tracker, args[0])
        if func is torch.ops.aten.add.Tensor and _accumulates_in_place(previous, args, kwargs):
            torch.ops.aten.add_.Tensor(*args)
            return args[0]
        workspace = kernels.workspace_of(func, args, kwargs, self._capability)
        if workspace is kernels.NO_WORKSPACE:
            return func(*args, **kwargs)
        held = [tracker.take(size, op=f"{func}: {name}") for name, size in workspace.before]
        result = func(*args, **kwargs)
        tracker.observe(result, op=str(func))
        held += [tracker.take(size, op=f"{func}: {name}") for name, size in workspace.after]
        for block_id in reversed(held):
            tracker.give_back(block_id)
        return result


def _answer(tracker: StorageTracker, tensor: torch.Tensor) -> bool | int | float:
    """Answer `.item()`: what a healthy run would see. Truth for `all()`, no NaN, one for a number."""
    if tensor.dtype is torch.bool:
        return not tracker.maker(tensor).startswith(_NEVER_IN_A_HEALTHY_RUN)
    return 1.0 if tensor.dtype.is_floating_point else 1


def _accumulates_in_place(previous: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether this addition is one that the autograd engine does in place with real tensors.

    Where two gradients meet, the engine adds the second into the first if nobody else holds it:
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`. It refuses that for tensor subclasses and under a
    dispatch mode, so with fake tensors it allocates a third. The engine asks for the device of the gradient (`prim::device`)
    right before; the counts are those of a tensor held by the buffer and by Python's view of it.
    """
    if previous is not torch.ops.prim.device.default or kwargs or len(args) != 2:
        return False
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    first, second = args
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    storage = first.untyped_storage()
    return (
        first.shape == second.shape
        and torch._debug_has_internal_overlap(first) == 0
        and first._use_count() <= _HELD_ONCE
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_HELD_ONCE
    )


_HELD_ONCE = 4
_STORAGE_HELD_ONCE = 2
