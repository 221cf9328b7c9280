"""Which kernel `scaled_dot_product_attention` takes on a card, from sizes alone.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`, of PyTorch 2.13.
cuDNN's kernel, which PyTorch may prefer on compute capability 9.0 and 10.x, is not modelled: its
workspaces are not published.
"""

from __future__ import annotations

from enum import StrEnum

from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32, Dtype

__all__ = ["SdpaKernel", "choose_sdpa_kernel"]


class SdpaKernel(StrEnum):
    """The implementations among which PyTorch chooses."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose_sdpa_kernel(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: Dtype,
    masked: bool,
    dropout: float,
    enable_gqa: bool,
    needs_gradient: bool,
    capability: tuple[int, int],
) -> SdpaKernel:
    """Return the kernel for as many queries as keys, in contiguous rows.

    Args:
        num_kv_heads: heads of the keys and values that are handed over (after `repeat_kv`).
        masked: whether a mask is handed over; else attention is causal.
        capability: compute capability of the card, such as (8, 0).
    """
    grouped = num_heads != num_kv_heads
    if grouped and not (enable_gqa and num_heads % num_kv_heads == 0):
        return SdpaKernel.MATH
    half = dtype is BFLOAT16 or dtype is FLOAT16
    if (
        half
        and not masked
        and capability >= (8, 0)
        and head_dim == value_dim <= 256
        and _flash_trains(head_dim, dropout, needs_gradient, capability)
    ):
        return SdpaKernel.FLASH
    # up to PyTorch 2.13 the efficient kernel does not know grouped heads
    if not grouped and _efficient_takes(head_dim, value_dim, dtype, half, capability):
        return SdpaKernel.EFFICIENT
    return SdpaKernel.MATH


def _flash_trains(
    head_dim: int, dropout: float, needs_gradient: bool, capability: tuple[int, int]
) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    is_small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if is_small and needs_gradient and head_dim > 192:
        return head_dim > 224 and dropout == 0
    return True


def _efficient_takes(
    head_dim: int, value_dim: int, dtype: Dtype, half: bool, capability: tuple[int, int]
) -> bool:
    """`check_head_dim_size_mem_efficient` and `check_tensor_dtype`."""
    if dtype is BFLOAT16 and capability < (8, 0):
        return False
    if not half and dtype is not FLOAT32:
        return False
    alignment = 4 if capability >= (8, 0) else 1  # minimum_gemm_alignment
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        alignment = max(alignment, 8 if half else 4)
    return head_dim % alignment == 0 and value_dim % alignment == 0
