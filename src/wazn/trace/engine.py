"""Operations as they run on CUDA with real tensors, where fake ones or the CPU would differ.

`Engine` stands between the tracker and the fake tensors. It answers questions for values, does in place
what autograd does in place with real tensors only, and takes the workspaces of kernels and of cuBLAS.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from wazn.trace import kernels
from wazn.trace.recall import Recall
from wazn.trace.tracker import DEVICE, StorageTracker
from wazn.units import ceil_div, round_up

__all__ = ["Engine"]

# The counts that PyTorch reports for a tensor, and for its storage, that only the engine's buffer holds
# while an operation looks at it from Python. A test compares the outcome with the real engine's.
_HELD_ONCE = 4
_STORAGE_HELD_ONCE = 2


class Engine:
    """Runs one operation as it would run on CUDA with real tensors.

    Args:
        capability: compute capability of the card.
        matmul_workspaces: whether the first matrix product of a thread allocates the workspace of cuBLAS.
    """

    def __init__(self, capability: tuple[int, int], *, matmul_workspaces: bool) -> None:
        self._capability = capability
        self._recall = Recall()
        self._threads_without_workspace = {"forward", "backward"} if matmul_workspaces else set()

    def __call__(
        self, tracker: StorageTracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `func(*args, **kwargs)`, or what stands for it, and return its result."""
        if not _is_special(func):
            return self._recall(func, args, kwargs)
        previous = tracker.previous
        if func is _ATEN._local_scalar_dense.default:
            return _answer(tracker, args[0])
        if func is _ATEN.nonzero.default:
            return _nonzero(args[0])
        if func is _ATEN._grouped_mm.default:
            return _grouped_mm(*args, **kwargs)
        if func is _ATEN.histc.default and not args[0].dtype.is_floating_point:
            return _integers_histc(*args, **kwargs)
        in_place = _IN_PLACE.get(func)
        if in_place is not None and _fills_zeros_in_place(previous):
            return self._recall(in_place, args, kwargs)
        if func is _ATEN.add.Tensor and _accumulates_in_place(previous, args, kwargs):
            return self._recall(_ATEN.add_.Tensor, args, kwargs)
        if self._threads_without_workspace and func in _MATMULS:
            self._first_matmul(tracker)
        workspace = kernels.workspace_of(func, args, kwargs, self._capability)
        if workspace is kernels.NO_WORKSPACE:
            return _as_on_cuda(tracker, func, args, self._recall(func, args, kwargs))
        held = [tracker.take(size, op=f"{func}: {name}") for name, size in workspace.before]
        result = _as_on_cuda(tracker, func, args, self._recall(func, args, kwargs))
        tracker.observe(result, op=str(func))
        held += [tracker.take(size, op=f"{func}: {name}") for name, size in workspace.after]
        for block_id in reversed(held):
            tracker.give_back(block_id)
        return result

    def _first_matmul(self, tracker: StorageTracker) -> None:
        """Each handle of cuBLAS keeps one workspace; backward has a thread, thus a handle, of its own."""
        thread = "forward" if torch._C._current_autograd_node() is None else "backward"
        if thread in self._threads_without_workspace:
            self._threads_without_workspace.remove(thread)
            size = kernels.cublas_workspace_bytes(self._capability)
            tracker.take(size, op=f"cublas workspace: {thread}")


_ATEN = torch.ops.aten
_MATMULS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_IN_PLACE = {
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
}
_ZEROS = ("aten.new_zeros", "aten.zeros")
_SPECIAL = {  # every operation that this module asks for; the others pass it by
    *_MATMULS,
    *_IN_PLACE,
    _ATEN._grouped_mm.default,
    _ATEN._local_scalar_dense.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN.add.Tensor,
    _ATEN.histc.default,
    _ATEN.native_layer_norm.default,
    _ATEN.nonzero.default,
}


@cache
def _is_special(func: Any) -> bool:
    return func in _SPECIAL or kernels.takes_workspace(func)


def _fills_zeros_in_place(previous: Any) -> bool:
    """Say whether a backward formula now fills the zeros that it made one operation ago.

    With real tensors it fills them in place; for tensor subclasses the formula takes the out-of-place
    operation ("for composite compliance"): `value_selecting_reduction_backward`, `index_backward` and
    `gather_backward` in torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native.
    """
    return str(previous).startswith(_ZEROS) and torch._C._current_autograd_node() is not None


def _as_on_cuda(tracker: StorageTracker, func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Put right what a result has of the CPU."""
    if func is _ATEN.native_layer_norm.default and args[0].element_size() == 2:
        # statistics in fp32: aten/src/ATen/native/cuda/layer_norm_kernel.cu, `toAccumulateType`
        out, mean, rstd = result
        return out, mean.to(torch.float32), rstd.to(torch.float32)
    if func is _ATEN._scaled_dot_product_efficient_attention.default:
        # seed and offset on the host: Note [Seed and Offset Device] in transformers/cuda/attention.cu
        tracker.keep_on_host(result[2:])
    return result


def _answer(tracker: StorageTracker, tensor: torch.Tensor) -> bool | int | float:
    """Answer `.item()` as a healthy run would: `all()` holds, other conditions do not, a number is one.

    `all()`, or `sum() == numel()`, is asked of masks (nothing is padded); the rest asks for NaN, infinity,
    packed sequences.
    """
    if tensor.dtype is torch.bool:
        return tracker.maker(tensor).startswith(
            ("aten.all.", "aten._is_all_true.", "aten.eq.Scalar")
        )
    return 1.0 if tensor.dtype.is_floating_point else 1


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Answer where a tensor is not zero: everywhere; of one slice of a one-hot tensor in its share, rounded up.

    Mixtures of experts ask for the tokens of each expert: with E experts the slice is one E-th of the
    storage, and balanced routing sends it one E-th of the tokens.
    """
    numel = tensor.numel()
    slices = max(1, tensor.untyped_storage().nbytes() // tensor.element_size() // max(1, numel))
    return torch.empty((ceil_div(numel, slices), tensor.dim()), dtype=torch.int64, device=DEVICE)


def _integers_histc(tensor: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor:
    """Count integers, which CUDA does and the CPU does not; the counts are of their type.

    Source: `_histc_cuda_template` in aten/src/ATen/native/cuda/SummaryOps.cu.
    """
    return torch.empty((bins,), dtype=tensor.dtype, device=DEVICE)


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Return the grouped product in any dtype; the fake one takes bfloat16 only.

    Other dtypes fall back to one product per group, written into the same result, whose rows are padded to
    16 bytes: `_grouped_mm_fallback` and `create_grouped_gemm_output_tensor` in aten/src/ATen/native/
    GroupedMMUtils.h.
    """
    groups = [] if offsets is None else [offsets.shape[0]]
    if first.dim() == 3 and second.dim() == 3:
        groups = [first.shape[0]]
    size = [first.shape[-2], second.shape[-1]]
    per_row = round_up(size[-1], 16 // first.element_size())
    if first.dim() != second.dim():
        return torch.empty_strided(size, (per_row, 1), dtype=first.dtype, device=DEVICE)
    strides = (size[0] * per_row, per_row, 1)
    return torch.empty_strided(groups + size, strides, dtype=first.dtype, device=DEVICE)


def _accumulates_in_place(previous: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether this addition is one that the autograd engine does in place with real tensors.

    Where two gradients meet, the engine adds the second into the first if nobody else holds it:
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`. It refuses that for tensor subclasses
    and under a dispatch mode, so with fake tensors it allocates a third. The engine asks for the device of
    the gradient (`prim::device`) right before; the counts are those of a tensor held by the buffer and by
    Python's view of it.
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
        and first._use_count() <= _HELD_ONCE
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_HELD_ONCE
        and not _overlaps_itself(first)
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    with torch._C._DisableTorchDispatch():  # sizes and strides tell
        return torch._debug_has_internal_overlap(tensor) != 0
