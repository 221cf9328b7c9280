"""CUDA's autocast lists for tensors on the cpu device.

Autocast on CPU and on CUDA share their mechanism and the cache of cast weights (a leaf that requires
gradients and is fp32 is cast once per region), and differ in their lists: on CUDA, softmax, layer norm,
powers, sums and losses run in fp32; on CPU they keep the input's type. Here the entries of the CPU list
that differ are replaced by CUDA's for as long as the context lasts, and switching autocast on for either
device switches it on for both, because libraries ask whether it is on for "cuda".

Source: the lists in torch/include/ATen/autocast_mode.h (`AT_FORALL_FP32` and below); the CPU's in
aten/src/ATen/autocast_mode.cpp, `TORCH_LIBRARY_IMPL(aten, AutocastCPU, m)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["autocast_dtype", "cuda_autocast", "no_autocast"]

_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "rms_norm group_norm frobenius_norm.dim cosine_similarity nll_loss nll_loss2d kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits dist cdist "
    "renorm logsumexp"
).split()
_FP32_SET_OPT_DTYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
).split()
_PROMOTE = "addcdiv addcmul atan2 dot vdot index_put tensordot scatter_add".split()
_PLAIN_ON_CUDA = "cat stack index_copy".split()  # the CPU list widens their inputs first

_WIDTHS = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1}


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make autocast on the cpu device follow CUDA's lists while the context lasts."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing kernels is the point
            for names, policy in (
                (_FP32, _in_fp32),
                (_FP32_SET_OPT_DTYPE, _with_fp32_dtype),
                (_PROMOTE, _promoted),
            ):
                for name in names:
                    kernel = partial(policy, _operator(name))
                    library.impl(name, kernel, "AutocastCPU", allow_override=True)
            for name in _PLAIN_ON_CUDA:
                library.impl(
                    name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True
                )
        with _both_devices():
            yield
    finally:
        library._destroy()


def autocast_dtype() -> torch.dtype | None:
    """Return the type that autocast lowers to at this moment, or None when it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off for the operations inside, without ending the region and its cache."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        yield


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDTHS


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value.to(dtype)
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _in_fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with no_autocast():
        cast = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
        return operator(*_cast(args, torch.float32), **cast)


def _with_fp32_dtype(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask the operation itself for an fp32 result, unless the caller already asked for a type."""
    arguments = operator._schema.arguments
    position = [argument.name for argument in arguments].index("dtype")
    given = kwargs.get("dtype", args[position] if len(args) > position else None)
    with no_autocast():
        if given is not None or not _is_castable(args[0]):
            return operator(*args, **kwargs)
        return operator(*args[:position], **{**kwargs, "dtype": torch.float32})


def _promoted(operator: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [item for value in args for item in _flat(value) if _is_castable(item)]
    widest = max((tensor.dtype for tensor in tensors), key=_WIDTHS.__getitem__, default=None)
    with no_autocast():
        return operator(*(args if widest is None else _cast(args, widest)), **kwargs)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@contextmanager
def _both_devices() -> Iterator[None]:
    """While the context lasts, "is autocast on?" gives one answer for cpu and cuda, and either switches it on."""
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_autocast_enabled(device_type: str = "cpu") -> bool:
        return is_enabled("cpu" if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type: str = "cpu") -> torch.dtype:
        return get_dtype("cpu" if device_type == "cuda" else device_type)

    enter = torch.autocast.__init__

    def init(
        region: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if (
            device_type == "cuda"
        ):  # fp16 unless something else is said: at::autocast::autocast_gpu_dtype
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
        enter(region, device_type, dtype, enabled, cache_enabled)

    cast = torch.amp.autocast_mode._cast

    def cast_on(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "is_autocast_enabled", is_autocast_enabled),
        (torch, "get_autocast_dtype", get_autocast_dtype),
        (torch, "get_autocast_gpu_dtype", get_autocast_dtype),
        (torch.autocast, "__init__", init),
        (torch.amp.autocast_mode, "_cast", cast_on),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
