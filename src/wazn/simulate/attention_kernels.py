"""The kernels behind `scaled_dot_product_attention`, and the package flash-attn: what each saves
and allocates.

Shapes: B batch, h query heads, g key-value heads, S tokens, d head size, e value size. Queries are
[B, h, S, d], keys [B, g, S, d], values [B, g, S, e]; the result is [B, h, S, e]. A tensor in memory
order [B, S, h, d] is the usual one, as a projection leaves it; what comes out of `cat` is
`heads_first`, in memory order [B, h, S, d].
"""

from __future__ import annotations

from typing import NamedTuple

from wazn.dtypes import BOOL, FLOAT32, INT64, Dtype
from wazn.simulate.dispatch import SdpaKernel, choose_sdpa_kernel
from wazn.simulate.frames import Saved
from wazn.simulate.ops import (
    autocast,
    contiguous,
    dropout,
    expand,
    expand_copy,
    matmul,
    mul_scalar,
    narrow,
    pad,
    to,
)
from wazn.simulate.tape import SCALAR, Tape, Tensor
from wazn.units import ceil_div, round_up

__all__ = [
    "HEADS_FIRST",
    "GradientLayout",
    "Shape",
    "flash_attn",
    "matmul_heads",
    "scaled_dot_product_attention",
    "sdpa_efficient",
    "sdpa_flash",
    "sdpa_math",
    "to_heads",
]


class GradientLayout:
    """Whether the gradients of an attention's queries, keys and values are heads first in memory;
    known once its kernel is chosen.
    """

    __slots__ = ("heads_first",)

    def __init__(self, heads_first: bool = False) -> None:
        self.heads_first = heads_first


HEADS_FIRST = GradientLayout(True)


def to_heads(tape: Tape, x: Tensor, layout: GradientLayout) -> Tensor:
    """x.view([B, S, h, d]).transpose(1, 2); a gradient that is heads first in memory is copied on the way back."""

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(gradient.numel, gradient.dtype) if layout.heads_first else gradient,)

    return tape.record(x.view(x.numel), (x,), (), backward)


class Shape(NamedTuple):
    """B, S, h, g, d, e of one attention."""

    micro_batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def num_rows(self) -> int:
        """Queries of all heads: B x h x S."""
        return self.micro_batch * self.num_heads * self.seq_len


def sdpa_flash(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    heads_first: bool = False,
    cut: bool = False,
) -> Tensor:
    """_scaled_dot_product_flash_attention: saves q, k, v, the result, an fp32 log-sum-exp per head
    and token, the random state.

    The result lies in memory as the queries do. Backward makes it contiguous if they are heads
    first, and its gradient if the result is cut (which fills zeros heads first), and allocates dq,
    dk, dv, then the kernel's buffers. Source: `mha_bwd` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    needs = query.requires_grad or key.requires_grad or value.requires_grad
    saved = tape.save(query, key, value) if needs else ()
    dtype = query.dtype
    numel = query.numel
    out, logsumexp, random_seed, random_offset = tape.results(
        lambda: (
            tape.new(numel, dtype),
            tape.new(shape.num_rows, FLOAT32),
            tape.new(2, INT64),
            tape.new(1, INT64),
        )
    )
    if needs:
        saved += tape.save_result(out) + tape.save(logsumexp, random_seed, random_offset)
    numel_query, numel_key, numel_value = query.numel, key.numel, value.numel

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copies = [tape.new(numel_query, dtype) for is_needed in (cut, heads_first) if is_needed]
        gradients = (
            tape.new(numel_query, dtype),
            tape.new(numel_key, dtype),
            tape.new(numel_value, dtype),
        )
        _flash_buffers(tape, shape, dtype)
        copies.clear()
        return gradients

    return tape.record(out, (query, key, value), saved, backward)


def _flash_buffers(tape: Tape, shape: Shape, dtype: Dtype) -> None:
    """softmax_d, an fp32 accumulator of dq with rows rounded to 128 and head size to 32 (64 above
    128), and dk, dv for every query head where heads are grouped; freed again.
    """
    rows = shape.micro_batch * shape.num_heads * round_up(shape.seq_len, 128)
    head_dim = round_up(shape.head_dim, 8)
    softmax_d = tape.new(rows, FLOAT32)
    dq_accum = tape.new(rows * round_up(head_dim, 32 if head_dim <= 128 else 64), FLOAT32)
    if shape.num_heads != shape.num_kv_heads:
        dk_expanded = tape.new(shape.num_rows * head_dim, dtype)
        dv_expanded = tape.new(shape.num_rows * head_dim, dtype)
        del dv_expanded, dk_expanded
    del dq_accum, softmax_d


def flash_attn(tape: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """flash_attn_func of the package: [B, S, h, d]; saves q, k, v (padded to heads of 8), the
    result, log-sum-exp, random state.

    Source: flash_attn_interface.py, `FlashAttnFunc`, and csrc/flash_attn/flash_api.cpp of
    flash-attn 2.
    """
    needs = query.requires_grad or key.requires_grad or value.requires_grad
    head_dim, dtype = shape.head_dim, query.dtype
    padded = round_up(head_dim, 8)
    numels = tuple([tensor.numel // head_dim * padded for tensor in (query, key, value)])
    inputs = (query, key, value)
    q, k, v = inputs
    if padded != head_dim:
        q, k, v = (tape.new(numel, dtype) for numel in numels)
    out = tape.new(numels[0], dtype)
    logsumexp = tape.new(shape.num_rows, FLOAT32)
    rng_state = tape.new(2, INT64)
    saved: Saved = ()
    if needs:
        saved = tape.save(q, k, v) + tape.save_result(out) + tape.save(logsumexp, rng_state)

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = (
            tape.new(numels[0], dtype),
            tape.new(numels[1], dtype),
            tape.new(numels[2], dtype),
        )
        padded_gradient = tape.new(numels[0], dtype) if padded != head_dim else None
        _flash_buffers(tape, shape, dtype)
        del padded_gradient
        return (
            gradients[0].view(numels[0] // padded * head_dim),
            gradients[1].view(numels[1] // padded * head_dim),
            gradients[2].view(numels[2] // padded * head_dim),
        )

    result = out if padded == head_dim else out.view(query.numel)
    return tape.record(result, inputs, saved, backward)


def sdpa_efficient(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    shape: Shape,
    *,
    capability: tuple[int, int],
) -> Tensor:
    """_scaled_dot_product_efficient_attention: saves q, k, v, the bias, the result and its
    log-sum-exp, rows rounded to 32.

    The result lies in memory as [B, S, h, e]; seed and offset stay on the host. Source:
    transformers/cuda/attention.cu and attention_backward.cu, mem_eff_attention/kernel_forward.h and
    kernel_backward.h.
    """
    needs = query.requires_grad or key.requires_grad or value.requires_grad
    saved = tape.save(query, key, value, bias) if needs else ()
    dtype = query.dtype
    rows = shape.micro_batch * shape.num_heads

    def results() -> tuple[Tensor, Tensor]:
        out = tape.new(shape.num_rows * shape.value_dim, dtype)
        logsumexp = tape.new(rows * round_up(shape.seq_len, 32) if needs else 0, FLOAT32)
        if dtype.itemsize == 2 and shape.value_dim > 128:  # kNeedsOutputAccumulatorBuffer
            tape.new(out.numel, FLOAT32)
        return out, logsumexp

    out, logsumexp = tape.results(results)
    if needs:
        saved += tape.save_result(out) + tape.save(logsumexp, SCALAR, SCALAR)
    numel_query, numel_key, numel_value = query.numel, key.numel, value.numel
    workspace = _efficient_workspace(shape, dtype, capability)

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = (
            tape.new(numel_query, dtype),
            tape.new(numel_key, dtype),
            tape.new(numel_value, dtype),
        )
        held = []
        if dtype.itemsize != 2:  # (grad_out * out).sum(-1), transposed to contiguous
            held += [tape.new(gradient.numel, FLOAT32), tape.new(shape.num_rows, FLOAT32)]
        held += [tape.new(shape.num_rows, FLOAT32), tape.new(workspace, FLOAT32)]
        while held:
            held.pop()
        return gradients

    return tape.record(out, (query, key, value), saved, backward)


def _efficient_workspace(shape: Shape, dtype: Dtype, capability: tuple[int, int]) -> int:
    """Return the fp32 elements of the backward kernel's workspace."""
    half = dtype.itemsize == 2
    heads = shape.micro_batch * shape.num_heads
    block_rows, block_columns, keeps_in_registers = _efficient_tile(
        half, max(shape.head_dim, shape.value_dim), capability
    )
    needs_accumulators = half and not keeps_in_registers
    splits = ceil_div(shape.seq_len, block_columns)
    if heads >= 256 and shape.seq_len <= 2 * block_columns:
        splits = 1
    if needs_accumulators:
        splits = max(1, min(splits, 200 // heads))
    tiles = ceil_div(shape.seq_len, block_rows) * ceil_div(shape.head_dim, block_columns)
    elements = tiles * (4 + block_rows * block_columns)  # a lock, a counter and padding to 128 bits
    if needs_accumulators:
        for columns in (shape.head_dim, shape.value_dim):
            elements += splits * block_columns * round_up(columns, block_rows)
    return heads * round_up(elements, 4)


def _efficient_tile(
    half: bool, head_dim: int, capability: tuple[int, int]
) -> tuple[int, int, bool]:
    """Return the kernel's block of rows and of columns, and whether dk and dv stay in registers.

    Source: `dispatch_cutlassB_*` in mem_eff_attention/kernels/cutlassB.h; the first kernel that
    fits is taken. 128x128 needs more shared memory than the 99 KiB of compute capability 8.6, 8.9
    and 12.x.
    """
    has_much_shared_memory = capability[0] in (8, 9, 10, 11) and capability not in ((8, 6), (8, 9))
    if head_dim <= 64:
        return 64, 64, half
    if half and head_dim <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if head_dim <= 128:
        if half and has_much_shared_memory:
            return 128, 128, True
        return (64, 64, False) if half else (128, 64, False)
    return 128, 64, False


def sdpa_math(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    shape: Shape,
    *,
    probability: float,
    heads_first: bool,
    enable_gqa: bool,
) -> Tensor:
    """_scaled_dot_product_attention_math: half types are raised to fp32, scores are written out;
    the result is heads first.
    """
    dtype = query.dtype
    groups = shape.num_heads // shape.num_kv_heads
    if dtype.itemsize == 2:
        query, key, value = (
            to(tape, query, FLOAT32),
            to(tape, key, FLOAT32),
            to(tape, value, FLOAT32),
        )
    query = mul_scalar(tape, query)
    if bias is None:  # causal: ones, tril, where
        bias = _causal_bias(tape, shape, query.dtype)
    copy_key, copy_value = not heads_first, True
    if enable_gqa and groups > 1:  # repeat_interleave
        key = expand_copy(tape, key, key.numel * groups)
        value = expand_copy(tape, value, value.numel * groups)
        copy_key = copy_value = False
        groups = 1
    scores = matmul_heads(
        tape,
        query,
        mul_scalar(tape, key),
        shape,
        numel=shape.num_rows * shape.seq_len,
        copy_a=not heads_first,
        copy_b=copy_key,
        groups=groups,
    )
    probabilities = _safe_softmax(tape, scores, shape)
    probabilities = dropout(tape, probabilities, probability)
    return to(
        tape,
        matmul_heads(
            tape,
            probabilities,
            value,
            shape,
            numel=shape.num_rows * shape.value_dim,
            copy_a=False,
            copy_b=copy_value,
            groups=groups,
            merged=True,
        ),
        dtype,
    )


def _causal_bias(tape: Tape, shape: Shape, dtype: Dtype) -> Tensor:
    numel = shape.seq_len * shape.seq_len
    allowed = tape.new(numel, BOOL)
    allowed = tape.new(numel, BOOL)
    return additive_mask(tape, allowed, dtype)


def _safe_softmax(tape: Tape, scores: Tensor, shape: Shape) -> Tensor:
    """softmax that gives zeros for rows that are masked out entirely. Source: `_safe_softmax` in
    transformers/attention.cpp.
    """
    out = tape.new(scores.numel, scores.dtype)
    masked, rows = tape.new(scores.numel, BOOL), tape.new(shape.num_rows, BOOL)
    zero = tape.new(1, scores.dtype)
    del zero, rows, masked
    saved = tape.save_result(out) if scores.requires_grad else ()

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(gradient.numel, gradient.dtype),)

    return tape.record(out, (scores,), saved, backward)


def matmul_heads(
    tape: Tape,
    a: Tensor,
    b: Tensor,
    shape: Shape,
    *,
    numel: int,
    copy_a: bool,
    copy_b: bool,
    groups: int = 1,
    merged: bool = False,
) -> Tensor:
    """torch.matmul of [B, h, ., .] and [B, h, ., .]: a batched product of [B * h, ., .].

    An operand in memory order [B, S, h, d] (`copy_a`, `copy_b`) is copied, unless there is one
    sample or one head only; b is broadcast where it has fewer heads by the factor `groups`.
    `merged`: the heads of the result are merged next, so its gradient comes as [B, S, h, d] and is
    copied as well.
    """
    # arguments, their casts and their copies all live until the call returns
    cast_b = autocast(tape, b)
    cast_a = autocast(tape, a)
    copies = shape.micro_batch > 1 and shape.num_heads > 1
    left = contiguous(tape, cast_a) if copies and copy_a else cast_a
    if groups > 1:
        broadcast = expand_copy if copies else expand
        right = broadcast(tape, cast_b, cast_b.numel * groups)
    else:
        right = contiguous(tape, cast_b) if copies and copy_b else cast_b
    out = matmul(tape, left, right, numel=numel)
    return to_heads(tape, out, HEADS_FIRST) if copies and merged else out


def additive_mask(tape: Tape, mask: Tensor, dtype: Dtype) -> Tensor:
    """where(mask, 0, -inf): a boolean mask as a bias (`convert_boolean_attn_mask`)."""
    infinity, zero = tape.new(1, dtype), tape.new(1, dtype)
    bias = tape.new(mask.numel, dtype)
    del zero, infinity
    return bias


def scaled_dot_product_attention(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shape: Shape,
    *,
    probability: float,
    capability: tuple[int, int],
    enable_gqa: bool,
    heads_first: bool,
    layout: GradientLayout,
) -> tuple[Tensor, bool]:
    """Return the result, and whether it is heads first in memory; say the same of the gradients in `layout`.

    Causal where no mask is given.

    mask: [B, 1, S, S], boolean or a bias.
    """
    if tape.autocast_dtype is not None:
        query, key, value = autocast(tape, query), autocast(tape, key), autocast(tape, value)
        if mask is not None and mask.dtype is not BOOL:
            mask = autocast(tape, mask)
    with_grad = tape.grad_enabled and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    kernel = choose_sdpa_kernel(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dtype=query.dtype,
        masked=mask is not None,
        dropout=probability,
        enable_gqa=enable_gqa,
        needs_gradient=with_grad,
        capability=capability,
    )
    if mask is not None and mask.dtype is BOOL:
        mask = additive_mask(tape, mask, query.dtype)
    if kernel is SdpaKernel.FLASH:
        if shape.num_heads > 1 and shape.head_dim % 8:
            layout.heads_first = True
        return _padded_flash(tape, query, key, value, shape, heads_first=heads_first)
    if kernel is SdpaKernel.EFFICIENT:
        if mask is not None and shape.seq_len % 8:
            # rows must start at multiples of 8 elements: a padded copy is sliced (preprocess_mask)
            mask = tape.new(mask.numel // shape.seq_len * round_up(shape.seq_len, 8), mask.dtype)
        out = sdpa_efficient(tape, query, key, value, mask, shape, capability=capability)
        return out, False
    with tape.autocast(None):  # inside the operator
        out = sdpa_math(
            tape,
            query,
            key,
            value,
            mask,
            shape,
            probability=probability,
            heads_first=heads_first,
            enable_gqa=enable_gqa,
        )
    layout.heads_first = shape.num_heads > 1
    return out, True


def _padded_flash(
    tape: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, *, heads_first: bool
) -> tuple[Tensor, bool]:
    """The flash kernel with heads padded to a multiple of 8 and the result cut again (`pad_last_dim`)."""
    head_dim = shape.head_dim
    if head_dim % 8 == 0:
        out = sdpa_flash(tape, query, key, value, shape, heads_first=heads_first)
        return out, heads_first
    padded = round_up(head_dim, 8)
    numel = query.numel
    query = pad(tape, query, query.numel // head_dim * padded)
    key = pad(tape, key, key.numel // head_dim * padded)
    value = pad(tape, value, value.numel // head_dim * padded)
    out = sdpa_flash(
        tape, query, key, value, shape._replace(head_dim=padded), heads_first=True, cut=True
    )
    return narrow(tape, out, numel), True
