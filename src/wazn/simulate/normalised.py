"""Baichuan 2's output matrix, whose rows are normalised in every forward pass.

Source: `NormHead` of modeling_baichuan.py, beside the weights of Baichuan2-7B-Base; `torch.nn.functional.normalize`,
which is `x / x.norm(2, dim, keepdim=True).clamp_min(eps).expand_as(x)`.
"""

from __future__ import annotations

from wazn.dtypes import BOOL, FLOAT32
from wazn.model.spec import Linear
from wazn.simulate.ops import div, linear
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["NormHead"]


class NormHead:
    """linear(x, normalize(weight)): a copy of the matrix, kept for backward; in fp32 first under autocast."""

    __slots__ = ("spec", "weight")

    def __init__(self, spec: Linear, weight: Parameter) -> None:
        self.spec = spec
        self.weight = weight

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        tape.label = self.spec.name
        rows = self.spec.out_features
        denominator = clamp_min(tape, vector_norm(tape, self.weight, rows))
        norm_weight = div(tape, self.weight, denominator)
        del denominator
        return linear(tape, x, norm_weight, None, out_features=rows)


def vector_norm(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """x.norm(2, 1, keepdim=True), one number for each row; saves its input and its result; fp32 under autocast."""
    dtype = x.dtype if tape.autocast_dtype is None else FLOAT32
    out = tape.new(rows, dtype)
    saved = tape.save(x, out.detach()) if x.requires_grad else ()
    numel = x.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        # self * (grad / norm).masked_fill_(norm == 0, 0), linalg_vector_norm_backward of FunctionsManual.cpp
        ratio = tape.new(numel, gradient.dtype)
        is_zero = tape.new(rows, BOOL)
        result = tape.new(numel, gradient.dtype)
        del is_zero, ratio
        return (result,)

    return tape.record(out, (x,), saved, backward)


def clamp_min(tape: Tape, x: Tensor) -> Tensor:
    """x.clamp_min(number); saves its input; backward selects by it."""
    saved = tape.save(x if x.requires_grad else None)

    def backward(gradient: Tensor) -> tuple[Tensor]:
        zero, is_above = tape.new(1, gradient.dtype), tape.new(gradient.numel, BOOL)
        result = tape.new(gradient.numel, gradient.dtype)
        del is_above, zero
        return (result,)

    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, backward)
