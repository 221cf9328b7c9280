"""Normalisations as the families write them, one function for each `NormKind`.

x: [..., size]; weight and bias: [size], or None. Sources: the `*RMSNorm` and `*LayerNorm` classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from wazn.dtypes import FLOAT32
from wazn.model.spec import NormKind
from wazn.simulate.ops import add_scalar, mean, mul, pow2, rsqrt, to
from wazn.simulate.tape import Tape, Tensor

__all__ = ["NORMS", "NormFunction"]

NormFunction = Callable[[Tape, Tensor, "Tensor | None", "Tensor | None", int], Tensor]


def rms(tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int) -> Tensor:
    """LlamaRMSNorm: weight * (fp32 normalised).to(dtype)."""
    dtype = x.dtype
    x = to(tape, x, FLOAT32)
    variance = mean(tape, pow2(tape, x), size)
    x = mul(tape, x, rsqrt(tape, add_scalar(tape, variance)))
    assert weight is not None
    return mul(tape, weight, to(tape, x, dtype))


NORMS: dict[NormKind, NormFunction] = {
    NormKind.RMS: rms,
}
