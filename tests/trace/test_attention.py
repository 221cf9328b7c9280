"""Attention as PyTorch runs it on CUDA. Expected sizes are counted from the shapes in PyTorch's source."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from wazn.trace.attention import SdpaKernel, choose_sdpa_kernel
from wazn.trace.opcheck import OpTrace, Spec, measure_op
from wazn.trace.world import World

A100, RTX_4090, H100, T4 = (8, 0), (8, 9), (9, 0), (7, 5)


def heads_of(
    heads: int, *, tokens: int = 512, dim: int = 128, dtype: str = "bfloat16", grad: bool = True
) -> Spec:
    """[2, heads, tokens, dim], laid out in memory as [2, tokens, heads, dim] like a projection's output."""
    return Spec((2, heads, tokens, dim), dtype, requires_grad=grad, memory_order=(0, 2, 1, 3))


def sizes(trace: OpTrace, phase: str) -> list[int]:
    return [size for size in trace.changes(phase) if size > 0]


@pytest.mark.parametrize(
    ("dtype", "dim", "mask", "capability", "expected"),
    [
        ("bfloat16", 128, None, A100, SdpaKernel.FLASH),
        ("float16", 128, None, A100, SdpaKernel.FLASH),
        ("float32", 128, None, A100, SdpaKernel.EFFICIENT),  # flash takes half types only
        ("bfloat16", 128, "bfloat16", A100, SdpaKernel.EFFICIENT),  # and no mask
        ("bfloat16", 256, None, A100, SdpaKernel.FLASH),  # and heads up to 256
        ("bfloat16", 264, None, A100, SdpaKernel.EFFICIENT),
        ("float16", 128, None, T4, SdpaKernel.EFFICIENT),  # and compute capability 8.0 or newer
        ("bfloat16", 128, None, T4, SdpaKernel.MATH),  # the other takes bf16 from 8.0 on
        ("bfloat16", 208, None, RTX_4090, SdpaKernel.EFFICIENT),  # no backward for 193 to 224
        ("bfloat16", 256, None, RTX_4090, SdpaKernel.FLASH),
        ("bfloat16", 100, "bfloat16", A100, SdpaKernel.MATH),  # not a multiple of 8
        ("bfloat16", 100, None, A100, SdpaKernel.FLASH),  # padded before the kernel
        ("float32", 4, None, A100, SdpaKernel.EFFICIENT),  # fp32: multiples of 4
        ("float32", 6, None, A100, SdpaKernel.MATH),
    ],
)
def test_the_kernel_that_pytorch_takes(
    dtype: str, dim: int, mask: str | None, capability: tuple[int, int], expected: SdpaKernel
) -> None:
    """The rules of `select_sdp_backend` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
    with World():
        query = heads_of(4, tokens=64, dim=dim, dtype=dtype).make()
        attn_mask = None if mask is None else Spec((2, 1, 64, 64), mask).make()
        kernel = choose_sdpa_kernel(
            query,
            query,
            query,
            attn_mask,
            dropout_p=0.0,
            is_causal=attn_mask is None,
            enable_gqa=False,
            capability=capability,
        )
    assert kernel is expected


def test_grouped_heads_without_flash_are_written_out() -> None:
    """Only flash knows fewer key-value heads than query heads: an fp32 run with grouped heads takes the math path."""
    with World():
        query = heads_of(8, dtype="float32").make()
        key = heads_of(2, dtype="float32").make()
        options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": True, "capability": A100}
        assert (
            choose_sdpa_kernel(query, key, key, None, enable_gqa=True, **options) is SdpaKernel.MATH
        )
        assert (
            choose_sdpa_kernel(query, query, query, None, enable_gqa=True, **options)
            is SdpaKernel.EFFICIENT
        )


def test_flash_saves_its_output_and_a_number_per_row() -> None:
    """Beside q, k and v: out like q, logsumexp [B, H, S] fp32, two uint64 of random state and one unused.

    `mha_fwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    q = heads_of(8)
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    out, lse = 2 * 8 * 512 * 128 * 2, 2 * 8 * 512 * 4
    assert sizes(trace, "forward") == [out, lse, 16, 8]
    assert trace.saved_bytes == out + lse + 512 + 512


def test_flash_backward_accumulates_dq_in_fp32() -> None:
    """dq, dk, dv; then softmax_d [B, H, S] and dq_accum [B, S, H, D], both fp32, S rounded up to 128: `mha_bwd`."""
    q = heads_of(8, tokens=500)
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    grad = 2 * 8 * 500 * 128 * 2
    assert sizes(trace, "backward") == [
        *[grad] * 3,
        2 * 8 * 512 * 4,
        2 * 512 * 8 * 128 * 4,
    ]


def test_flash_expands_the_gradients_of_grouped_heads() -> None:
    """With 2 key-value heads for 8, dk and dv are also written once per query head, in the inputs' type."""
    q, kv = heads_of(8), heads_of(2)
    trace = measure_op(F.scaled_dot_product_attention, q, kv, kv, is_causal=True, enable_gqa=True)
    grad_q, grad_kv = 2 * 8 * 512 * 128 * 2, 2 * 2 * 512 * 128 * 2
    assert sizes(trace, "backward") == [
        grad_q,
        grad_kv,
        grad_kv,
        2 * 8 * 512 * 4,
        2 * 512 * 8 * 128 * 4,
        grad_q,
        grad_q,
    ]


@pytest.mark.parametrize(("dim", "rounded"), [(64, 64), (80, 96), (96, 96), (160, 192), (192, 192)])
def test_flash_rounds_the_head_in_its_accumulator(dim: int, rounded: int) -> None:
    """Up to 128 to a multiple of 32, above to a multiple of 64."""
    q = heads_of(4, dim=dim)
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert sizes(trace, "backward")[-1] == 2 * 512 * 4 * rounded * 4


def test_flash_pads_heads_to_a_multiple_of_eight() -> None:
    """Heads of 100 are copied into heads of 104, and the padded copies are what is saved: `pad_last_dim`."""
    q = heads_of(4, dim=100)
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    padded = 2 * 4 * 512 * 104 * 2
    assert sizes(trace, "forward") == [padded] * 4 + [2 * 4 * 512 * 4, 16, 8]


def test_efficient_rounds_its_numbers_per_row_to_32() -> None:
    """Out and logsumexp [B, H, S rounded to 32] fp32; seed and offset stay on the host: Note [Seed and Offset]."""
    q = heads_of(4, tokens=500, dim=64, dtype="float32")
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert sizes(trace, "forward") == [2 * 4 * 500 * 64 * 4, 2 * 4 * 512 * 4]


def test_efficient_backward_in_fp32() -> None:
    """Gradients; grad_out * out and its sum, transposed; tiles of 64 x 64 fp32 and 16 bytes for each 64 queries.

    `_efficient_attention_backward` in attention_backward.cu, `workspace_size` in mem_eff_attention/kernel_backward.h;
    500 queries are 8 tiles per head, and 64 columns are one.
    """
    q = heads_of(4, tokens=500, dim=64, dtype="float32")
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    grad, rows = 2 * 4 * 500 * 64 * 4, 2 * 4 * 500 * 4
    tiles = 2 * 4 * 8 * (16 + 64 * 64 * 4)
    assert sizes(trace, "backward") == [grad, grad, grad, grad, rows, rows, tiles]


def test_efficient_backward_in_bf16_with_a_mask() -> None:
    """Heads of 128 on an A100 run in tiles of 128 x 128 and keep dk and dv in registers: 4 tiles per head."""
    q, mask = heads_of(4), Spec((2, 1, 512, 512))
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, mask)
    grad = 2 * 4 * 512 * 128 * 2
    assert sizes(trace, "backward") == [
        *[grad] * 3,
        2 * 4 * 512 * 4,
        2 * 4 * 4 * (16 + 128 * 128 * 4),
    ]


def test_a_mask_of_odd_length_is_padded() -> None:
    """A row of 500 bf16 does not start at a multiple of 8 elements: it is copied to 504, `preprocess_mask`."""
    q, mask = heads_of(4, tokens=500), Spec((2, 1, 500, 500))
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, mask)
    assert sizes(trace, "forward")[0] == 2 * 500 * 504 * 2


def test_a_boolean_mask_becomes_an_additive_one() -> None:
    """`convert_boolean_attn_mask`: a mask of the queries' type, zero or minus infinity."""
    q, mask = heads_of(4), Spec((2, 1, 512, 512), "bool")
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, mask)
    assert 2 * 512 * 512 * 2 in sizes(trace, "forward")


def test_math_writes_the_scores_in_fp32() -> None:
    """`_scaled_dot_product_attention_math` raises half types and saves the probabilities [B, H, S, S] in fp32.

    bf16 on a T4; saved are the raised q, k and v for their products and one matrix of probabilities.
    """
    q = heads_of(4, tokens=256, dim=64)
    with World(capability=T4) as world:
        trace = measure_op(F.scaled_dot_product_attention, q, q, q, world=world, is_causal=True)
    scores, raised = 2 * 4 * 256 * 256 * 4, 2 * 4 * 256 * 64 * 4
    assert scores + 3 * raised <= trace.saved_bytes < scores + 4 * raised
    assert trace.forward_peak_bytes > 2 * scores


def test_sdpa_is_lowered_by_autocast() -> None:
    """`scaled_dot_product_attention` is on CUDA's list of lower precision: fp32 inputs are cast and take flash."""
    q = heads_of(4, dtype="float32")
    trace = measure_op(F.scaled_dot_product_attention, q, q, q, autocast="bfloat16", is_causal=True)
    lowered = 2 * 4 * 512 * 128 * 2
    assert sizes(trace, "forward") == [lowered] * 4 + [2 * 4 * 512 * 4, 16, 8]
