"""Normalisations as the families write them, one function for each `NormKind`.

x: [..., size]; weight and bias: [size], or None. Sources: the `*RMSNorm` and `*LayerNorm` classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wazn.dtypes import FLOAT32
from wazn.model.spec import Norm, NormKind
from wazn.simulate.ops import (
    add_scalar,
    cat,
    layer_norm,
    mean,
    mul,
    power,
    rsqrt,
    split,
    sub,
    to,
)
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["NORMS", "NormFunction", "PerHeadNorm"]

NormFunction = Callable[[Tape, Tensor, "Tensor | None", "Tensor | None", int], Tensor]


def rms(tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int) -> Tensor:
    """LlamaRMSNorm: weight * (fp32 normalised).to(dtype)."""
    dtype = x.dtype
    x = to(tape, x, FLOAT32)
    variance = mean(tape, power(tape, x), size)
    x = mul(tape, x, rsqrt(tape, add_scalar(tape, variance)))
    assert weight is not None
    return mul(tape, weight, to(tape, x, dtype))


def rms_gemma(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """GemmaRMSNorm: (fp32 normalised * (1.0 + weight.float())).type_as(x)."""
    assert weight is not None
    output = _normalised(tape, to(tape, x, FLOAT32), size)
    output = mul(tape, output, add_scalar(tape, to(tape, weight, FLOAT32)))
    return to(tape, output, x.dtype)


def _normalised(tape: Tape, x: Tensor, size: int) -> Tensor:
    return mul(tape, x, rsqrt(tape, add_scalar(tape, mean(tape, power(tape, x), size))))


def rms_cast_last(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """Olmo2RMSNorm: (weight * fp32 normalised).to(dtype)."""
    dtype = x.dtype
    x = to(tape, x, FLOAT32)
    variance = mean(tape, power(tape, x), size)
    x = mul(tape, x, rsqrt(tape, add_scalar(tape, variance)))
    assert weight is not None
    return to(tape, mul(tape, weight, x), dtype)


def rms_fp32(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """HeliumRMSNorm: (weight.to(float32) * fp32 normalised).to(dtype)."""
    dtype = x.dtype
    x = to(tape, x, FLOAT32)
    variance = mean(tape, power(tape, x), size)
    x = mul(tape, x, rsqrt(tape, add_scalar(tape, variance)))
    assert weight is not None
    return to(tape, mul(tape, to(tape, weight, FLOAT32), x), dtype)


def layer_fp32(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """OlmoLayerNorm: layer_norm of an fp32 copy, cast back."""
    return to(tape, layer_norm(tape, to(tape, x, FLOAT32), weight, bias, size), x.dtype)


def layer_cohere(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """CohereLayerNorm: mean and variance by hand in fp32."""
    dtype = x.dtype
    x = to(tape, x, FLOAT32)
    mean_of_row = mean(tape, x, size)
    variance = mean(tape, power(tape, sub(tape, x, mean_of_row)), size)
    x = mul(tape, sub(tape, x, mean_of_row), rsqrt(tape, add_scalar(tape, variance)))
    assert weight is not None
    x = mul(tape, to(tape, weight, FLOAT32), x)
    return to(tape, x, dtype)


def layer_1p(
    tape: Tape, x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int
) -> Tensor:
    """NemotronLayerNorm1P: layer_norm with weight + 1; under autocast in its lower type."""
    assert weight is not None
    weight = add_scalar(tape, weight)
    lower = tape.autocast_dtype
    if lower is None:
        return layer_norm(tape, x, weight, bias, size)
    x, weight = to(tape, x, lower), to(tape, weight, lower)
    bias = None if bias is None else to(tape, bias, lower)
    with tape.autocast(None):
        return layer_norm(tape, x, weight, bias, size)


NORMS: dict[NormKind, NormFunction] = {
    NormKind.RMS: rms,
    NormKind.RMS_GEMMA: rms_gemma,
    NormKind.RMS_CAST_LAST: rms_cast_last,
    NormKind.RMS_FP32: rms_fp32,
    NormKind.LAYER: layer_norm,
    NormKind.LAYER_FP32: layer_fp32,
    NormKind.LAYER_COHERE: layer_cohere,
    NormKind.LAYER_1P: layer_1p,
}


class PerHeadNorm:
    """One layer_norm for each head, joined by cat (StableLmLayerNormPerHead)."""

    __slots__ = ("spec", "weights")

    def __init__(self, spec: Norm, weights: Sequence[Parameter]) -> None:
        self.spec = spec
        self.weights = tuple(weights)

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [B, h, S, d]; returns the same shape."""
        tape.label = self.spec.name
        heads = len(self.weights)
        states_per_heads = split(tape, x, [x.numel // heads] * heads)
        return cat(
            tape,
            [
                layer_norm(tape, states, weight, None, self.spec.size)
                for weight, states in zip(self.weights, states_per_heads, strict=True)
            ],
        )
