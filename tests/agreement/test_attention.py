"""Attention kernels on the tape are PyTorch's operators (and flash-attn's) under fake tensors, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from typing import Any

import pytest

from tests.agreement.compare import assert_agree, run_on_tape
from tests.agreement.golden import Golden
from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32
from wazn.simulate.attention_kernels import (
    HEADS_FIRST,
    GradientLayout,
    Shape,
    flash_attn,
    scaled_dot_product_attention,
    to_heads,
)
from wazn.simulate.dispatch import choose_sdpa_kernel
from wazn.simulate.ops import cat, contiguous, mul_scalar
from wazn.simulate.tape import Tape, Tensor
from wazn.trace.specs import OpTrace, Spec

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (12, 0))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One attention over two samples; `heads_first`: queries and keys are joined by cat, as partial rotary ones are."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    seq_len: int = 200
    heads_first: bool = False

    @property
    def shape(self) -> Shape:
        """B, S, h, g, d, e."""
        return Shape(2, self.seq_len, self.heads, self.kv_heads, self.head_dim, self.value_dim)

    @property
    def projected(self) -> tuple[Spec, Spec, Spec]:
        """Queries, keys and values as projections leave them: [B, S, h * d]."""
        widths = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.value_dim,
        )
        q, k, v = (
            Spec((2, self.seq_len, width), self.dtype, requires_grad=True) for width in widths
        )
        return q, k, v

    def real(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """[B, h, S, d] each."""
        import torch

        q, k, v = (
            (x * 0.5).view(2, self.seq_len, -1, dim).transpose(1, 2)
            for x, dim in ((q, self.head_dim), (k, self.head_dim), (v, self.value_dim))
        )
        if self.heads_first:
            q, k = torch.cat((q,), -1), torch.cat((k,), -1)
        return q, k, v

    def tape(
        self, tape: Tape, q: Tensor, k: Tensor, v: Tensor, layout: GradientLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same; `layout`: of the gradients that the kernel gives."""
        joined = HEADS_FIRST if self.heads_first else layout
        q = to_heads(tape, mul_scalar(tape, q), joined)
        if self.kv_heads == 1:  # a single head is both orders at once
            k, v = mul_scalar(tape, k), mul_scalar(tape, v)
        else:
            k = to_heads(tape, mul_scalar(tape, k), joined)
            v = to_heads(tape, mul_scalar(tape, v), layout)
        if self.heads_first:
            q, k = cat(tape, (q,)), cat(tape, (k,))
        return q, k, v


def agree(
    golden: Golden,
    sizes: Heads,
    *,
    mask: str | None = None,
    dropout: float = 0.0,
    capability: tuple[int, int] = (8, 0),
) -> None:
    """Run scaled dot product attention both ways; `mask` is the type of one, None for causal attention."""
    enable_gqa = sizes.kv_heads != sizes.heads
    masks = () if mask is None else (Spec((2, 1, sizes.seq_len, sizes.seq_len), mask),)

    def real(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        from torch.nn import functional as F

        q, k, v = sizes.real(q, k, v)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2).contiguous()

    def contract(tape: Tape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        layout = GradientLayout()
        q, k, v = sizes.tape(tape, q, k, v, layout)
        out, heads_first = scaled_dot_product_attention(
            tape,
            q,
            k,
            v,
            mask,
            sizes.shape,
            probability=dropout,
            capability=capability,
            enable_gqa=enable_gqa,
            heads_first=sizes.heads_first,
            layout=layout,
        )
        return contiguous(tape, out) if heads_first else out

    inputs = (*sizes.projected, *masks)
    seen = golden.op(lambda: measured(real, *inputs, capability=capability))
    assert_agree(seen, run_on_tape(contract, *inputs))


def measured(real: Callable[..., Any], *inputs: Spec, capability: tuple[int, int]) -> OpTrace:
    """Run the real operators on a card of that capability."""
    from wazn.trace.opcheck import measure_op
    from wazn.trace.world import World

    return measure_op(real, *inputs, world=World(capability=capability))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads_first", [False, True])
def test_flash(kv_heads: int, head_dim: int, heads_first: bool, golden: Golden) -> None:
    """The flash kernel; queries joined by cat come heads first in memory, and the result is copied in backward."""
    agree(
        golden,
        Heads(
            heads=8,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            heads_first=heads_first,
        ),
    )


@pytest.mark.parametrize("head_dim", [36, 100])
def test_flash_pads_heads(head_dim: int, golden: Golden) -> None:
    """Heads that are no multiple of 8 are padded, and the result is cut."""
    agree(golden, Heads(heads=4, kv_heads=4, head_dim=head_dim, value_dim=head_dim))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("mask", [None, "bool", "same"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_efficient(
    dtype: str,
    head_dim: int,
    value_dim: int,
    mask: str | None,
    capability: tuple[int, int],
    golden: Golden,
) -> None:
    """The memory-efficient kernel, with a mask or in fp32: its bias, its log-sum-exp and its workspace."""
    agree(
        golden,
        Heads(heads=4, kv_heads=4, head_dim=head_dim, value_dim=value_dim, dtype=dtype),
        mask=dtype if mask == "same" else mask,
        capability=capability,
    )


@pytest.mark.parametrize("mask", ["bool", "bfloat16"])
def test_efficient_aligns_masks(mask: str, golden: Golden) -> None:
    """Rows of a mask that do not start at multiples of 8 elements are padded into a copy."""
    agree(golden, Heads(heads=4, kv_heads=4, head_dim=64, value_dim=64, seq_len=201), mask=mask)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_math(kv_heads: int, dtype: str, dropout: float, golden: Golden) -> None:
    """Heads of 6 channels: no kernel takes them in fp32, and half types are written out on old cards."""
    capability = (7, 5)
    agree(
        golden,
        Heads(heads=4, kv_heads=kv_heads, head_dim=6, value_dim=6, dtype=dtype),
        dropout=dropout,
        capability=capability,
    )


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("head_dim", [64, 36])
@pytest.mark.parametrize("heads_first", [False, True])
def test_flash_attn(kv_heads: int, head_dim: int, heads_first: bool, golden: Golden) -> None:
    """The package flash-attn takes [B, S, h, d] and keeps padded queries, keys and values."""
    sizes = Heads(
        heads=4, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, heads_first=heads_first
    )

    def real(q: Any, k: Any, v: Any) -> Any:
        from wazn.trace.flash_attn import flash_attn_func

        q, k, v = sizes.real(q, k, v)
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.reshape(2, sizes.seq_len, -1)

    def contract(tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = sizes.tape(tape, q, k, v, GradientLayout(head_dim % 8 != 0))
        out = flash_attn(tape, q, k, v, sizes.shape)
        return contiguous(tape, out) if heads_first or head_dim % 8 else out

    inputs = sizes.projected
    seen = golden.op(lambda: measured(real, *inputs, capability=(8, 0)))
    assert_agree(seen, run_on_tape(contract, *inputs))


KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the choice of a kernel depends on."""

    heads: Heads
    masked: bool
    enable_gqa: bool
    dropout: float
    needs_gradient: bool
    capability: tuple[int, int]


def choices(dtype: str) -> Iterator[Choice]:
    """Every combination of sizes below and above the kernels' limits with everything else."""
    grid = product(
        (8, 2, 1),
        (6, 64, 80, 128, 200, 224, 232, 256, 264),
        (False, True),
        (False, True),
        (0.0, 0.1),
        (False, True),
        CAPABILITIES,
    )
    for kv_heads, head_dim, masked, enable_gqa, dropout, needs_gradient, capability in grid:
        for value_dim in sorted({head_dim, 64}):
            heads = Heads(
                heads=8,
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=dtype,
                seq_len=16,
            )
            yield Choice(
                heads=heads,
                masked=masked,
                enable_gqa=enable_gqa,
                dropout=dropout,
                needs_gradient=needs_gradient,
                capability=capability,
            )


def chosen_by_tensors(dtype: str) -> list[str]:
    """The kernel that tensors of those sizes get, for each choice."""
    import torch

    from wazn.trace.attention import choose_sdpa_kernel as choose
    from wazn.trace.world import World

    @cache
    def made(heads: Heads, needs_gradient: bool) -> tuple[Any, Any, Any]:
        real = heads.real(*(tensor.make().detach() for tensor in heads.projected))
        q, k, v = (tensor.requires_grad_(needs_gradient) for tensor in real)
        return q, k, v

    chosen = []
    with World():
        additive = torch.empty((2, 1, 16, 16), dtype=getattr(torch, dtype))
        for choice in choices(dtype):
            q, k, v = made(choice.heads, choice.needs_gradient)
            mask = additive if choice.masked else None
            kernel = choose(
                q,
                k,
                v,
                mask,
                dropout_p=choice.dropout,
                is_causal=not choice.masked,
                enable_gqa=choice.enable_gqa,
                capability=choice.capability,
            )
            chosen.append(str(kernel))
    return chosen


@pytest.mark.parametrize("dtype", KINDS)
def test_dispatch(dtype: str, golden: Golden) -> None:
    """From sizes alone the same kernel is chosen as from tensors."""
    seen = golden.value(lambda: [[k, len(list(g))] for k, g in groupby(chosen_by_tensors(dtype))])
    expected = [kernel for kernel, count in seen for _ in range(count)]
    for choice, kernel in zip(choices(dtype), expected, strict=True):
        found = choose_sdpa_kernel(
            num_heads=choice.heads.heads,
            num_kv_heads=choice.heads.kv_heads,
            head_dim=choice.heads.head_dim,
            value_dim=choice.heads.value_dim,
            dtype=KINDS[dtype],
            masked=choice.masked,
            dropout=choice.dropout,
            enable_gqa=choice.enable_gqa,
            needs_gradient=choice.needs_gradient,
            capability=choice.capability,
        )
        assert found == kernel, choice
