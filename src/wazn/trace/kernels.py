"""Memory that CUDA kernels take for the time of one operation.

The rehearsal sees what an operation returns. Some kernels also allocate buffers that die before they
return; these are listed here by operation, each with the line of PyTorch that allocates it. `before` is
allocated ahead of the results, `after` behind them; all of it is freed when the operation returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from wazn.units import KIB, MIB, ceil_div, round_up

__all__ = [
    "NO_WORKSPACE",
    "Workspace",
    "cublas_workspace_bytes",
    "flash_backward",
    "flash_varlen_backward",
    "takes_workspace",
    "workspace_of",
]

_FP32_BYTES = 4
_INT64_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Buffers of one operation: (what it is, requested bytes), in the order in which they are allocated."""

    before: tuple[tuple[str, int], ...] = ()
    after: tuple[tuple[str, int], ...] = ()


NO_WORKSPACE = Workspace()


def workspace_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: tuple[int, int]
) -> Workspace:
    """Return what the CUDA kernels of one operation allocate beside its results."""
    rule = _rule_of(operator)
    if rule is None:
        return NO_WORKSPACE
    named = {
        argument.name: value
        for argument, value in zip(operator._schema.arguments, args, strict=False)
    }
    with (
        torch._C._DisableTorchDispatch()
    ):  # rules look at sizes and at views, which nobody need see
        return rule({**named, **kwargs}, capability)


def takes_workspace(operator: Any) -> bool:
    """Say whether `workspace_of` has a rule for an operation."""
    return _rule_of(operator) is not None


@cache
def _rule_of(operator: Any) -> Callable[[dict[str, Any], tuple[int, int]], Workspace] | None:
    return _RULES.get(operator) or _RULES_BY_NAME.get(str(operator))


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace that PyTorch gives each cuBLAS handle: 8.125 MiB, 32 MiB on Hopper and Blackwell.

    Source: `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB


def _copy_unless_contiguous(name: str, tensor: torch.Tensor) -> tuple[tuple[str, int], ...]:
    if tensor.is_contiguous():
        return ()
    return ((name, tensor.numel() * tensor.element_size()),)


def flash_backward(query: torch.Tensor, key: torch.Tensor) -> Workspace:
    """Return the buffers of FlashAttention-2's dense backward; tensors are [B, S, H, D].

    Source: `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, the same code as
    in flash-attn.
    """
    batch, queries, heads, head_dim = query.shape
    rows = batch * round_up(queries, 128)
    return _flash_buffers(key, rows=rows, heads=heads, head_dim=head_dim)


def flash_varlen_backward(
    query: torch.Tensor, key: torch.Tensor, *, num_sequences: int
) -> Workspace:
    """Return the buffers for sequences laid end to end; tensors are [T, H, D]. Source: `mha_varlen_bwd`,
    ibidem.
    """
    tokens, heads, head_dim = query.shape
    return _flash_buffers(key, rows=tokens + 128 * num_sequences, heads=heads, head_dim=head_dim)


def _flash_buffers(key: torch.Tensor, *, rows: int, heads: int, head_dim: int) -> Workspace:
    rounded_dim = round_up(head_dim, 32 if head_dim <= 128 else 64)
    buffers = [
        ("softmax_d", heads * rows * _FP32_BYTES),
        ("dq_accum", rows * heads * rounded_dim * _FP32_BYTES),
    ]
    key_heads = key.shape[-2]
    if key_heads != heads:  # grouped heads: one gradient per query head, summed at the end
        expanded_bytes = key.numel() // key_heads * heads * key.element_size()
        buffers += [("dk_expanded", expanded_bytes), ("dv_expanded", expanded_bytes)]
    return Workspace(after=tuple(buffers))


def _sdpa_flash_backward(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """`_flash_attention_backward` in attention_backward.cu makes the gradient and the output contiguous
    first.
    """
    grad_out, query, key, out = (
        named[name].transpose(1, 2) for name in ("grad_out", "query", "key", "out")
    )
    copies = _copy_unless_contiguous("grad_out", grad_out) + _copy_unless_contiguous("out", out)
    return Workspace(before=copies, after=flash_backward(query, key).after)


def _efficient_forward(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """An fp32 copy of the output where it does not stay in registers.

    Source: `kNeedsOutputAccumulatorBuffer` in mem_eff_attention/kernel_forward.h: half types, value size
    over 128.
    """
    value: torch.Tensor = named["value"]
    batch, heads, _, value_dim = value.shape
    if value.element_size() == _FP32_BYTES or value_dim <= 128:
        return NO_WORKSPACE
    queries = named["query"].shape[2]
    return Workspace(after=(("output_accum", batch * queries * heads * value_dim * _FP32_BYTES),))


def _efficient_backward(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """Source: `_efficient_attention_backward` in attention_backward.cu and
    mem_eff_attention/kernel_backward.h.
    """
    grad_out, query, key, value = (named[name] for name in ("grad_out_", "query", "key", "value"))
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = key.shape[2], value.shape[3]
    rows = batch * heads * queries
    is_half = query.element_size() == 2
    before = _copy_unless_contiguous("grad_out", grad_out.transpose(1, 2))
    after = [("delta", rows * _FP32_BYTES)]
    if not is_half:  # (grad_out * out).sum(-1), transposed to contiguous
        after = [
            ("grad_out * out", rows * value_dim * _FP32_BYTES),
            ("delta, rows first", rows * _FP32_BYTES),
            *after,
        ]
    block_rows, block_columns, keeps_in_registers = _efficient_tile(
        is_half, max(head_dim, value_dim), capability
    )
    needs_accumulators = is_half and not keeps_in_registers
    splits = ceil_div(keys, block_columns)
    if batch * heads >= 256 and keys <= 2 * block_columns:
        splits = 1
    if needs_accumulators:
        splits = max(1, min(splits, 200 // (batch * heads)))
    tiles = ceil_div(queries, block_rows) * ceil_div(head_dim, block_columns)
    elements = tiles * (4 + block_rows * block_columns)  # a lock, a counter and padding to 128 bits
    if needs_accumulators:
        for columns in (head_dim, value_dim):
            elements += splits * block_columns * round_up(columns, block_rows)
    workspace_bytes = batch * heads * round_up(elements, 4) * _FP32_BYTES
    return Workspace(before=before, after=(*after, ("workspace", workspace_bytes)))


def _efficient_tile(
    is_half: bool, head_dim: int, capability: tuple[int, int]
) -> tuple[int, int, bool]:
    """Return the kernel's block of rows and of columns, and whether dk and dv stay in registers.

    Source: `dispatch_cutlassB_*` in mem_eff_attention/kernels/cutlassB.h; the first kernel that fits is
    taken. 128x128 needs more shared memory than the 99 KiB of compute capability 8.6, 8.9 and 12.x.
    """
    has_much_shared_memory = capability[0] in (8, 9, 10, 11) and capability not in ((8, 6), (8, 9))
    if head_dim <= 64:
        return 64, 64, is_half
    if is_half and head_dim <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if head_dim <= 128:
        if is_half and has_much_shared_memory:
            return 128, 128, True
        return (64, 64, False) if is_half else (128, 64, False)
    return 128, 64, False


def _safe_softmax(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """Find rows that are masked out entirely. Source: `_safe_softmax` in transformers/attention.cpp."""
    scores: torch.Tensor = named["self"]
    rows = scores.numel() // scores.shape[named["dim"]]
    zero_bytes = scores.element_size()
    return Workspace(
        after=(("masked", scores.numel()), ("masked rows", rows), ("zero", zero_bytes))
    )


_MOST_TOKENS_WITHOUT_SORTING = 3072
_ROWS_PER_THREAD = 10


def _embedding_backward(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """Sum the gradients of equal tokens in fp32, by segments of the sorted tokens.

    Source: `embedding_dense_backward_cuda` in aten/src/ATen/native/cuda/Embedding.cu and
    `embedding_backward_cuda_kernel` in EmbeddingBackwardKernel.cu; its buffers have a size for the worst
    case. The sort's own scratch memory, freed before the large buffer is allocated, is left out.
    """
    grad, indices = named["grad_output"], named["indices"]
    tokens, width = indices.numel(), grad.shape[-1]
    before = _copy_unless_contiguous("grad", grad)
    if tokens <= _MOST_TOKENS_WITHOUT_SORTING:
        return Workspace(before=before)
    index_bytes = tokens * indices.element_size()
    segments = min(tokens, named["num_weights"])
    partial_segments = tokens // _ROWS_PER_THREAD + segments
    segment_bytes = segments * indices.element_size()
    return Workspace(
        before=(*before, ("sorted tokens", index_bytes), ("original positions", index_bytes)),
        after=(
            ("segment offsets", index_bytes),
            ("number of segments", _INT64_BYTES),
            ("partials per segment", segment_bytes),
            ("partials per segment, offsets", segment_bytes),
            ("number of partials", _INT64_BYTES),
            ("partial offsets", partial_segments * indices.element_size()),
            ("partial sums", partial_segments * width * max(_FP32_BYTES, grad.element_size())),
        ),
    )


_CHUNK_ELEMENTS = 65536


def _foreach_norm(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """One number per chunk and tensor. Source: `foreach_tensor_norm_cuda` in cuda/ForeachReduceOp.cu."""
    tensors: list[torch.Tensor] = named["self"]
    chunks = max(ceil_div(tensor.numel(), _CHUNK_ELEMENTS) for tensor in tensors)
    number_bytes = max(_FP32_BYTES, tensors[0].element_size())
    return Workspace(before=(("norms of chunks", len(tensors) * chunks * number_bytes),))


_LARGEST_FUSED_ROWS = 1536


def _gemm_4bit(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """The weight and its scales, spelt out for the product.

    Source: bitsandbytes 0.50, `_dequant_linear_fallback` in backends/cuda/ops.py, which is taken above
    1,536 rows (tokens). Below, a kernel may read the packed weight directly; by card and shape, in a table
    that is not modelled.
    """
    inputs: torch.Tensor = named["A"]
    rows = inputs.numel() // inputs.shape[-1]
    if rows <= _LARGEST_FUSED_ROWS:
        return NO_WORKSPACE
    before: tuple[tuple[str, int], ...] = ()
    if named.get("absmax_8bit") is not None:
        scale_bytes = named["absmax_8bit"].numel() * _FP32_BYTES
        before = (("scales", scale_bytes), ("scales with offset", scale_bytes))
    weight_bytes = math.prod(named["shapeB"]) * inputs.element_size()
    return Workspace(before=(*before, ("weight", weight_bytes)))


def _int8_scaled_mm(named: dict[str, Any], capability: tuple[int, int]) -> Workspace:
    """The product in int32, and its value in fp16 where the result is of another type.

    Source: bitsandbytes 0.50, `int8_linear_matmul` and `int8_mm_dequant` in backends/cuda/ops.py.
    """
    inputs: torch.Tensor = named["A"]
    numel = inputs.numel() // inputs.shape[-1] * named["B"].shape[0]
    product = ("product in int32", numel * 4)
    if named.get("dtype") in (None, torch.float16):
        return Workspace(before=(product,))
    return Workspace(before=(product, ("value in fp16", numel * 2)))


_ATEN = torch.ops.aten
_RULES: dict[Any, Callable[[dict[str, Any], tuple[int, int]], Workspace]] = {
    _ATEN._scaled_dot_product_flash_attention_backward.default: _sdpa_flash_backward,
    _ATEN._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _ATEN._safe_softmax.default: _safe_softmax,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
    _ATEN._foreach_norm.Scalar: _foreach_norm,
}

# Operators of other packages, which may not be imported here.
_RULES_BY_NAME = {
    "bitsandbytes.gemm_4bit.default": _gemm_4bit,
    "bitsandbytes.int8_scaled_mm.default": _int8_scaled_mm,
}
