"""Attention kernels on the tape are PyTorch's operators (and flash-attn's) under fake tensors, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

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

torch = pytest.importorskip("torch")

from tests.agreement.compare import assert_agree, run_on_tape  # noqa: E402
from wazn.trace.attention import choose_sdpa_kernel as chosen_by_tensors  # noqa: E402
from wazn.trace.flash_attn import flash_attn_func  # noqa: E402
from wazn.trace.opcheck import Spec, measure_op  # noqa: E402
from wazn.trace.world import World  # noqa: E402

F = torch.nn.functional
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (12, 0))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One attention over two samples; `heads_first`: queries and keys are joined by cat, as partial rotary embeddings do."""

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
    world = World(capability=capability)
    assert_agree(measure_op(real, *inputs, world=world), run_on_tape(contract, *inputs))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads_first", [False, True])
def test_flash(kv_heads: int, head_dim: int, heads_first: bool) -> None:
    """The flash kernel; queries joined by cat come heads first in memory, and the result is copied in backward."""
    agree(
        Heads(
            heads=8,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            heads_first=heads_first,
        )
    )


@pytest.mark.parametrize("head_dim", [36, 100])
def test_flash_pads_heads(head_dim: int) -> None:
    """Heads that are no multiple of 8 are padded, and the result is cut."""
    agree(Heads(heads=4, kv_heads=4, head_dim=head_dim, value_dim=head_dim))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("mask", [None, "bool", "same"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_efficient(
    dtype: str, head_dim: int, value_dim: int, mask: str | None, capability: tuple[int, int]
) -> None:
    """The memory-efficient kernel, with a mask or in fp32: its bias, its log-sum-exp and its workspace."""
    agree(
        Heads(heads=4, kv_heads=4, head_dim=head_dim, value_dim=value_dim, dtype=dtype),
        mask=dtype if mask == "same" else mask,
        capability=capability,
    )


@pytest.mark.parametrize("mask", ["bool", "bfloat16"])
def test_efficient_aligns_masks(mask: str) -> None:
    """Rows of a mask that do not start at multiples of 8 elements are padded into a copy."""
    agree(Heads(heads=4, kv_heads=4, head_dim=64, value_dim=64, seq_len=201), mask=mask)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_math(kv_heads: int, dtype: str, dropout: float) -> None:
    """Heads of 6 channels: no kernel takes them in fp32, and half types are written out on old cards."""
    capability = (7, 5)
    agree(
        Heads(heads=4, kv_heads=kv_heads, head_dim=6, value_dim=6, dtype=dtype),
        dropout=dropout,
        capability=capability,
    )


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("head_dim", [64, 36])
@pytest.mark.parametrize("heads_first", [False, True])
def test_flash_attn(kv_heads: int, head_dim: int, heads_first: bool) -> None:
    """The package flash-attn takes [B, S, h, d] and keeps padded queries, keys and values."""
    sizes = Heads(
        heads=4, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, heads_first=heads_first
    )

    def real(q: Any, k: Any, v: Any) -> Any:
        q, k, v = sizes.real(q, k, v)
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.reshape(2, sizes.seq_len, -1)

    def contract(tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = sizes.tape(tape, q, k, v, GradientLayout(head_dim % 8 != 0))
        out = flash_attn(tape, q, k, v, sizes.shape)
        return contiguous(tape, out) if heads_first or head_dim % 8 else out

    inputs = sizes.projected
    assert_agree(measure_op(real, *inputs), run_on_tape(contract, *inputs))


def test_dispatch() -> None:
    """From sizes alone the same kernel is chosen as from tensors."""
    kinds = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
    grid = product(
        kinds,
        (8, 2, 1),
        (6, 64, 80, 128, 200, 224, 232, 256, 264),
        (False, True),
        (False, True),
        (0.0, 0.1),
        (False, True),
        CAPABILITIES,
    )
    with World():
        for name, kv_heads, head_dim, masked, gqa, dropout, grad, capability in grid:
            for value_dim in {head_dim, 64}:
                sizes = Heads(
                    heads=8,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    dtype=name,
                    seq_len=16,
                )
                made = (tensor.make().detach() for tensor in sizes.projected)
                q, k, v = (tensor.requires_grad_(grad) for tensor in sizes.real(*made))
                mask = torch.empty((2, 1, 16, 16), dtype=q.dtype) if masked else None
                expected = chosen_by_tensors(
                    q,
                    k,
                    v,
                    mask,
                    dropout_p=dropout,
                    is_causal=not masked,
                    enable_gqa=gqa,
                    capability=capability,
                )
                found = choose_sdpa_kernel(
                    num_heads=8,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    dtype=kinds[name],
                    masked=masked,
                    dropout=dropout,
                    enable_gqa=gqa,
                    needs_gradient=grad,
                    capability=capability,
                )
                assert found == str(expected), (name, kv_heads, head_dim, value_dim, masked)
