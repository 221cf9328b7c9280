"""Each op on the tape is the real op under fake tensors, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from wazn.simulate import ops
from wazn.simulate.attention_kernels import Shape, sdpa_flash
from wazn.simulate.norms import rms
from wazn.simulate.rotary import rotate
from wazn.simulate.tape import Tape, Tensor

torch = pytest.importorskip("torch")

from tests.agreement.compare import assert_agree, run_on_tape  # noqa: E402
from wazn.trace.opcheck import Spec, measure_op  # noqa: E402

F = torch.nn.functional
X = Spec((2, 512, 256), "bfloat16", requires_grad=True)
W = Spec((256,), "bfloat16", requires_grad=True)


def real_rms(x: Any, weight: Any) -> Any:
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + 1e-6)
    return weight * hidden.to(x.dtype)


def real_rotate(x: Any, cos: Any, sin: Any) -> Any:
    return (x * cos) + (real_rotate_half(x) * sin)


def real_rotate_half(x: Any) -> Any:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[Spec, ...]]] = {
    "linear": (
        F.linear,
        lambda t, x, w: ops.linear(t, x, w, None, out_features=384),
        (X, Spec((384, 256), requires_grad=True)),
    ),
    "linear, frozen weight": (
        F.linear,
        lambda t, x, w: ops.linear(t, x, w, None, out_features=384),
        (X, Spec((384, 256))),
    ),
    "linear with bias": (
        F.linear,
        lambda t, x, w, b: ops.linear(t, x, w, b, out_features=384),
        (X, Spec((384, 256), requires_grad=True), Spec((384,), requires_grad=True)),
    ),
    "silu": (F.silu, ops.pointwise, (X,)),
    "gelu": (F.gelu, ops.pointwise, (X,)),
    "relu": (F.relu, ops.pointwise_of_result, (X,)),
    "mul": (torch.mul, ops.mul, (X, X)),
    "mul, broadcast": (torch.mul, ops.mul, (W, X)),
    "add": (torch.add, ops.add, (X, X)),
    "pow": (lambda x: x.pow(2), ops.power, (X,)),
    "softmax in fp32": (
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda t, x: ops.softmax(t, x, ops.FLOAT32),
        (X,),
    ),
    "dropout": (lambda x: F.dropout(x, 0.1), lambda t, x: ops.dropout(t, x, 0.1), (X,)),
    "rms norm": (real_rms, lambda t, x, w: rms(t, x, w, None, 256), (X, W)),
    "rms norm, frozen weight": (
        real_rms,
        lambda t, x, w: rms(t, x, w, None, 256),
        (X, Spec((256,))),
    ),
    "rotary": (real_rotate, rotate, (X, Spec((512, 256)), Spec((512, 256)))),
}


@pytest.mark.parametrize("name", CASES)
def test_op(name: str) -> None:
    """The contract allocates, saves and frees what the op does."""
    real, contract, specs = CASES[name]
    assert_agree(measure_op(real, *specs), run_on_tape(contract, *specs))


@pytest.mark.parametrize("num_rows", [320, 9000])
@pytest.mark.parametrize("seq_len", [512, 4096])
def test_embedding(seq_len: int, num_rows: int) -> None:
    """Looking rows up, and the gradient of the table: in buffers by segment above 3,072 tokens."""
    table, tokens = Spec((num_rows, 64), requires_grad=True), Spec((1, seq_len), "int64")

    def contract(tape: Tape, weight: Tensor, indices: Tensor) -> Tensor:
        return ops.embedding(tape, weight, indices, size=64)

    def real(weight: Any, indices: Any) -> Any:
        return F.embedding(indices, weight)

    assert_agree(measure_op(real, table, tokens), run_on_tape(contract, table, tokens))


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [128, 200])
def test_flash(kv_heads: int, head_dim: int, seq_len: int) -> None:
    """The flash kernel of scaled dot product attention saves and allocates what PyTorch's operator does."""
    order = (0, 2, 1, 3)
    query = Spec((2, 8, seq_len, head_dim), requires_grad=True, memory_order=order)
    key = Spec((2, kv_heads, seq_len, head_dim), requires_grad=True, memory_order=order)

    def real(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 8)

    def contract(tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_flash(tape, q, k, v, Shape(2, seq_len, 8, kv_heads, head_dim, head_dim))

    specs = (query, key, key)
    assert_agree(measure_op(real, *specs), run_on_tape(contract, *specs))
