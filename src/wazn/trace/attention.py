"""Scaled dot product attention as PyTorch runs it on CUDA: which kernel, and what it keeps.

The kernels themselves are PyTorch's own operators, with their own shapes and their own backward; what they
take for the time of one call is in `wazn.trace.kernels`.

Shape legend: B batch, H heads, G key-value heads, S queries, K keys, D head size. Tensors are [B, H, S, D].
Source of everything here: aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`, and
cuda/sdp_utils.cpp, `select_sdp_backend`.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.nn.functional as F

from wazn.trace.autocast import autocast_dtype, no_autocast

__all__ = ["SdpaKernel", "choose_sdpa_kernel", "sdpa_on_cuda"]

_HALF = (torch.float16, torch.bfloat16)


class SdpaKernel(StrEnum):
    """The implementations among which PyTorch chooses."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose_sdpa_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    capability: tuple[int, int],
) -> SdpaKernel:
    """Return the kernel that PyTorch takes for these tensors on a card of this compute capability.

    PyTorch prefers cuDNN's kernel on compute capability 9.0 and 10.x from cuDNN 9.15.1 on; that choice is
    not modelled, because the workspaces of cuDNN are not published.
    """
    fits_all = _shapes_fit(query, key, value, enable_gqa=enable_gqa)
    if fits_all and _flash_takes(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        capability=capability,
    ):
        return SdpaKernel.FLASH
    if fits_all and _efficient_takes(query, key, value, capability):
        return SdpaKernel.EFFICIENT
    return SdpaKernel.MATH


def _shapes_fit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool
) -> bool:
    """`check_tensor_shapes`, `check_batch_size_and_num_heads_dense`, `check_last_dim_stride_equals_1_dense`."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads, key_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    same_heads = heads == key_heads == value_heads
    if not (same_heads or (enable_gqa and key_heads == value_heads and heads % key_heads == 0)):
        return False
    return all(tensor.stride(-1) == 1 for tensor in (query, key, value))


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _flash_takes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    capability: tuple[int, int],
) -> bool:
    head_dim = query.shape[-1]
    if capability < (8, 0) or query.dtype not in _HALF or attn_mask is not None:
        return False
    if not head_dim == key.shape[-1] == value.shape[-1] or head_dim > 256:
        return False
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    is_small_sm = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if is_small_sm and _needs_gradient(query, key, value) and head_dim > 192:
        return head_dim > 224 and dropout_p == 0
    return True


def _efficient_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> bool:
    is_half = query.dtype in _HALF
    if query.shape[1] != key.shape[1]:  # up to PyTorch 2.13 it does not know grouped heads
        return False
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    if query.dtype not in (*_HALF, torch.float32):
        return False
    alignment = 4 if capability >= (8, 0) else 1  # minimum_gemm_alignment
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):
        alignment = max(alignment, 128 // (16 if is_half else 32))
    query_dim, key_dim, value_dim = query.shape[-1], key.shape[-1], value.shape[-1]
    return query_dim == key_dim and query_dim % alignment == 0 and value_dim % alignment == 0


def sdpa_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    capability: tuple[int, int],
) -> torch.Tensor:
    """Run scaled dot product attention along the path that PyTorch takes on CUDA."""
    lowered = autocast_dtype()
    if lowered is not None:  # the operator is on autocast's list of lower precision
        query, key, value = (tensor.to(lowered) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(lowered)
    with no_autocast():
        kernel = choose_sdpa_kernel(
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            capability=capability,
        )
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        if attn_mask is not None and kernel is SdpaKernel.EFFICIENT:
            attn_mask = _aligned(attn_mask)
        if kernel is SdpaKernel.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel is SdpaKernel.EFFICIENT:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`convert_boolean_attn_mask`: zero where attended, minus infinity elsewhere."""
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=dtype, device=mask.device))


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Pad the last dimension up to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head_dim = query.shape[-1]
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        _padded(query, 8),
        _padded(key, 8),
        _padded(value, 8),
        dropout_p,
        is_causal,
        False,
        scale=head_dim**-0.5 if scale is None else scale,
    )[0]
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        attn_mask,
        _needs_gradient(query, key, value),
        dropout_p,
        is_causal,
        scale=scale,
    )[0]
    return out


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: rows must start at multiples of 8 elements; else a padded copy is sliced."""
    strides = mask.stride()
    if strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`_scaled_dot_product_attention_math`: half types are raised to fp32, scores are written out."""
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = query.float(), key.float(), value.float()
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    query = query * root
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        allowed = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        attn_mask = _additive(allowed, query.dtype)
        del allowed
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ (key.transpose(-2, -1) * root)
    if attn_mask is not None:
        scores.add_(attn_mask)
    probabilities = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        probabilities = torch.native_dropout(probabilities, dropout_p, True)[0]
    return (probabilities @ value).to(dtype)
