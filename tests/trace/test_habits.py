"""Functions that take another path on CUDA. Sizes are counted from the shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from wazn.trace.opcheck import Spec, measure_op

X = Spec((2, 8, 64), "bfloat16", requires_grad=True)
HALF_BYTES, FP32_BYTES, MASK_BYTES = 2 * 8 * 64 * 2, 2 * 8 * 64 * 4, 2 * 8 * 64


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    """CUDA's dropout is one kernel, `native_dropout`, that saves a boolean per element."""
    for dropout in (lambda x: F.dropout(x, 0.1), torch.nn.Dropout(0.1)):
        trace = measure_op(dropout, X)
        assert trace.changes("forward") == [HALF_BYTES, MASK_BYTES]
        assert trace.saved_bytes == MASK_BYTES
        assert trace.changes("backward") == [HALF_BYTES, -MASK_BYTES]


def test_dropout_of_nothing_is_nothing() -> None:
    """With probability zero, or outside training, the input is handed on."""
    assert measure_op(lambda x: F.dropout(x, 0.0), X).changes("forward") == []
    assert measure_op(torch.nn.Dropout(0.1), X, train_mode=False).changes("forward") == []


def test_softmax_raises_fp16_inside_its_kernel() -> None:
    """From fp16 to fp32 there is no raised copy; from bf16 there is: aten/src/ATen/native/SoftMax.cpp."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, dim=-1, dtype=torch.float32)

    fp16 = measure_op(softmax, Spec(X.shape, "float16", requires_grad=True))
    assert fp16.changes("forward") == [FP32_BYTES]
    assert fp16.changes("backward") == [HALF_BYTES, -FP32_BYTES]
    bf16 = measure_op(softmax, X)
    assert bf16.changes("forward") == [FP32_BYTES, FP32_BYTES, -FP32_BYTES]


def test_rms_norm_is_fused() -> None:
    """`torch.nn.RMSNorm` keeps its input and an fp32 number per row, and no fp32 copy: `rms_norm_symint`."""
    layer = torch.nn.RMSNorm(64, device="meta", dtype=torch.bfloat16)
    trace = measure_op(layer, X)
    assert trace.changes("forward") == [HALF_BYTES, 2 * 8 * 4]
    assert trace.saved_bytes == 512
    assert [size for size in trace.changes("backward") if size > 0] == [HALF_BYTES, 64 * 2]


def test_habits_hold_where_backward_computes_again() -> None:
    """Inside a checkpoint the recomputed dropout has its mask too, and the same number of tensors is saved."""
    for reentrant in (False, True):
        trace = measure_op(
            lambda x, r=reentrant: checkpoint(lambda y: F.dropout(y * 2, 0.1), x, use_reentrant=r),
            X,
        )
        assert trace.saved_bytes == 0
        assert MASK_BYTES in trace.changes("backward")


def test_masks_are_built_under_vmap() -> None:
    """transformers 5 builds masks from functions of one position; 5.10's `and_mask` asks for their device.

    By pencil: 4 x 8 truth values; nothing is copied by `.to` a device where the tensor is.
    """

    def mask(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        def one(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_seen = key <= query
            return is_seen.to(is_seen.device)

        return torch.vmap(torch.vmap(one, (None, 0)), (0, None))(queries, keys)

    trace = measure_op(mask, Spec((4,), "int64"), Spec((8,), "int64"), train_mode=False)
    assert trace.changes("forward") == [4 * 8]
