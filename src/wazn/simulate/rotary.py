"""Rotary position embeddings as the families apply them."""

from __future__ import annotations

from wazn.simulate.ops import add, cat, mul, narrow, neg
from wazn.simulate.tape import Tape, Tensor

__all__ = ["rotate", "rotate_half"]


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """cat((-x2, x1)) of the two halves of the last axis (modeling_llama.py)."""
    first = narrow(tape, x, x.numel // 2)
    second = narrow(tape, x, x.numel // 2)
    return cat(tape, (neg(tape, second), first))


def rotate(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    return add(tape, mul(tape, x, cos), mul(tape, rotate_half(tape, x), sin))
