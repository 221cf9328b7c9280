"""Functions that take another path on CUDA than on the CPU.

`Habits` is a function mode: it sees the calls that model code makes and sends those listed at the end of this file down
CUDA's path. Everything it calls is a real PyTorch operator with its real backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from wazn.trace.attention import sdpa_on_cuda
from wazn.trace.tracker import StorageTracker

__all__ = ["Habits"]


class Habits(TorchFunctionMode):
    """Sends function calls down CUDA's path while it is active."""

    def __init__(self, tracker: StorageTracker, *, capability: tuple[int, int]) -> None:
        super().__init__()
        self.tracker = tracker
        self.capability = capability

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what CUDA does instead."""
        kwargs = kwargs or {}
        instead = _INSTEAD.get(func)
        return func(*args, **kwargs) if instead is None else instead(self, func, *args, **kwargs)


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


_INSTEAD: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _sdpa,
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
}
