"""Functions that take another path on CUDA than on the CPU.

`Habits` is a function mode: it sees the calls that model code makes and sends those listed at the end of
this file down CUDA's path. Everything it calls is a real PyTorch operator with its real backward.

It also keeps host and device apart. Both are the cpu device here; what a factory makes without naming a
device is in host memory, as in a real run, and so is what is computed from such tensors alone. They are
not counted. Where code names `cuda`, or a card by its number, the world's device is put in its place; the text
`cpu` is the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors

from wazn.trace.attention import sdpa_on_cuda
from wazn.trace.autocast import autocast_dtype, no_autocast
from wazn.trace.tracker import DEVICE, ROUNDING_BYTES, StorageTracker, tensors_in

__all__ = ["Habits"]


class Habits(TorchFunctionMode):
    """Sends function calls down CUDA's path while it is active."""

    def __init__(self, tracker: StorageTracker, *, capability: tuple[int, int]) -> None:
        super().__init__()
        self.tracker = tracker
        self.capability = capability

    @contextmanager
    def through_backward(self) -> Iterator[None]:
        """Keep the mode on inside backward while the context lasts.

        A mode is off while the call that it was handed runs, and backward runs model code again where it
        was checkpointed.
        """
        original = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self in _get_current_function_mode_stack():
                return original(*args, **kwargs)
            with self:
                return original(*args, **kwargs)

        torch.autograd._engine_run_backward = run_backward
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = original

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what CUDA does instead."""
        if not kwargs:
            kwargs = {}
        elif "device" in kwargs:
            kwargs = {**kwargs, "device": _stand_in(kwargs["device"])}
        instead = _INSTEAD.get(func)
        if instead is not None:
            return instead(self, func, *args, **kwargs)
        if func in _FACTORIES and kwargs.get("device") in (None, "cpu"):
            with self.tracker.going_to("host"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _stand_in(device: Any) -> Any:
    """Return the world's device for one that names a card: `cuda`, `cuda:0`, such a `torch.device`, a number."""
    if isinstance(device, torch.device):
        return DEVICE if device.type == "cuda" else device
    if isinstance(device, str):
        return DEVICE if device.startswith("cuda") else device
    return DEVICE if type(device) is int else device


def _sdpa(
    habits: Habits,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return sdpa_on_cuda(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        capability=habits.capability,
    )


def _dropout(
    habits: Habits,
    func: Any,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """On CUDA dropout is one kernel that keeps a 1-byte mask.

    Source: `dropout` and `is_fused_kernel_acceptable` in aten/src/ATen/native/Dropout.cpp.
    """
    if training and 0 < p < 1 and not inplace and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, training, inplace)


def _torch_dropout(
    habits: Habits, func: Any, input: torch.Tensor, p: float, train: bool
) -> torch.Tensor:
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, train)


def _softmax(
    habits: Habits,
    func: Any,
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """From fp16 to fp32 softmax is one kernel on CUDA, without a raised copy of its input; from bf16 it is two.

    Source: `softmax` in aten/src/ATen/native/SoftMax.cpp.
    """
    if input.dtype is torch.float16 and dtype is torch.float32 and dim is not None:
        with no_autocast():
            return torch.ops.aten._softmax.default(input, dim, True)
    return func(input, dim, _stacklevel, dtype)


def _log_softmax(
    habits: Habits,
    func: Any,
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same for `log_softmax`."""
    if input.dtype is torch.float16 and dtype is torch.float32 and dim is not None:
        with no_autocast():
            return torch.ops.aten._log_softmax.default(input, dim, True)
    return func(input, dim, _stacklevel, dtype)


def _rms_norm(
    habits: Habits,
    func: Any,
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """On CUDA one kernel that keeps its input and an fp32 number per row; autocast raises it to fp32.

    Source: `rms_norm_symint` in aten/src/ATen/native/layer_norm.cpp: mixed types take the composite path.
    """
    if autocast_dtype() is not None:
        input, weight = input.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype is not input.dtype:
        return func(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, len(normalized_shape), weight)


class _FusedRmsNorm(torch.autograd.Function):
    """`_fused_rms_norm`: the operator itself has no kernel for the cpu device."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, num_dims: int, weight: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.empty_like(input)
        rows = input.shape[: input.dim() - num_dims] + (1,) * num_dims
        rstd = torch.empty(rows, dtype=torch.float32, device=input.device)
        ctx.save_for_backward(input, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, _grad_out: torch.Tensor) -> tuple[Any, ...]:
        input, _, weight = ctx.saved_tensors
        needs_input, _, needs_weight = ctx.needs_input_grad
        grad_input = torch.empty_like(input) if needs_input else None
        return grad_input, None, torch.empty_like(weight) if needs_weight else None


def _to(habits: Habits, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A tensor that moves between host and device is copied; here both have one device type."""
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype):
        return func(tensor, args[0])
    if args:
        args = (_stand_in(args[0]), *args[1:])
    to_host = _names_the_host(habits, *args, **kwargs)
    is_on_host = habits.tracker.is_on_host(tensor)
    if to_host is None or to_host is is_on_host:
        return func(tensor, *args, **kwargs)
    with habits.tracker.going_to("device" if is_on_host else "host"):
        moved = func(tensor, *args, **kwargs)
        return torch.clone(moved) if moved is tensor else moved


def _names_the_host(habits: Habits, *args: Any, **kwargs: Any) -> bool | None:
    """Say whether arguments of `Tensor.to` name the host ("cpu", or a tensor that is there); None for
    neither.
    """
    for item in (*args, *kwargs.values()):
        if isinstance(item, str | torch.device):
            return isinstance(item, str) and item == "cpu"
        if isinstance(item, torch.Tensor):
            return habits.tracker.is_on_host(item)
    return None


def _parse_to(habits: Habits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The arguments of `Module.to`: a card's number needs a card, and the text that names the host is kept."""
    named = args[0] if args else kwargs.get("device")
    if type(named) is int:
        args = (DEVICE, *args[1:])
    device, *rest = func(*args, **kwargs)
    is_host = isinstance(named, str) and named == "cpu"
    return (named if is_host else device, *rest)


def _tensor(habits: Habits, func: Any, data: Any, **kwargs: Any) -> torch.Tensor:
    """A list of numbers may hold tensors, whose numbers PyTorch reads from memory without asking anybody.

    Source: `infer_scalar_type` and `recursive_store` in torch/csrc/utils/tensor_new.cpp.
    """
    if isinstance(data, list | tuple):
        dtypes = [tensor.dtype for tensor in tensors_in(data)]
        if dtypes:
            kwargs.setdefault("dtype", dtypes[0])
            data = _numbers(data)
    if kwargs.get("device") in (None, "cpu"):
        with habits.tracker.going_to("host"):
            return func(data, **kwargs)
    return func(data, **kwargs)


def _numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_numbers(item) for item in data]
    return data.tolist() if isinstance(data, torch.Tensor) else data


def _cpu(habits: Habits, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(habits, torch.Tensor.to, tensor, "cpu")


def _cuda(habits: Habits, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(habits, torch.Tensor.to, tensor, DEVICE)


def _is_cuda(habits: Habits, func: Any, tensor: torch.Tensor) -> bool:
    return not habits.tracker.is_on_host(tensor)


def _get_device(habits: Habits, func: Any, tensor: torch.Tensor) -> int:
    return -1 if habits.tracker.is_on_host(tensor) else 0


def _equal(habits: Habits, func: Any, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal is asked of a gradient that should be one: yes, unless their values are known."""
    try:
        result: bool = func(first, second)
    except DataDependentOutputException:
        return first.shape == second.shape
    return result


def _data_ptr(habits: Habits, func: Any, tensor: torch.Tensor) -> int:
    """A fake tensor has no address; who asks for one asks whether two tensors share memory, or whether it is aligned.

    The allocator hands out multiples of 512.
    """
    offset_bytes: int = tensor.storage_offset() * tensor.element_size()
    return tensor.untyped_storage()._cdata * ROUNDING_BYTES + offset_bytes


def _deepcopy(
    habits: Habits, func: Any, tensor: torch.Tensor, memo: dict[int, Any]
) -> torch.Tensor:
    """A copy in a block of its own, where the tensor is; PyTorch's copies the storage, which a fake one refuses."""
    if id(tensor) not in memo:
        made = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = made
        noted = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
        made.__dict__.update(deepcopy(noted, memo))  # what libraries noted on it
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def _pin_memory(
    habits: Habits, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Pinned memory is host memory, of an allocator of its own: a copy that is not counted.

    Source: `_pin_memory` in aten/src/ATen/native/Memory.cpp.
    """
    with habits.tracker.going_to("host"):
        return torch.clone(tensor)


# Factories leave their result in host memory unless a device is named; libraries write the host as the
# text "cpu" and pass the model's device on as an object.
_FACTORIES = {*_device_constructors(), torch.get_rng_state}

_INSTEAD: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _sdpa,
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.softmax: _softmax,
    F.log_softmax: _log_softmax,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch.Tensor.to: _to,
    torch.tensor: _tensor,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.get_device: _get_device,
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch._C._nn._parse_to: _parse_to,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_cuda.__get__: _is_cuda,
}
