"""Low-rank adapters as peft 0.21 computes them: plain LoRA, DoRA, and adapters of stacked expert weights.

Shapes: x [..., in_features]; lora_A [rank, in_features]; lora_B [out_features, rank]; a DoRA magnitude [out_features].
Sources: peft/tuners/lora/layer.py (`Linear`, `ParamWrapper`), bnb.py (`Linear4bit`, `Linear8bitLt`), dora.py,
variants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from wazn.dtypes import FLOAT32, Dtype
from wazn.model.spec import Linear
from wazn.simulate.ops import (
    add,
    add_scalar,
    contiguous,
    div,
    dropout,
    linear,
    matmul,
    mul,
    mul_scalar,
    to,
)
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["AdaptedStack", "Adapters", "DenseModule", "LoraModule", "value_of", "while_adapted"]

Result = TypeVar("Result")


class DenseModule(Protocol):
    """A linear whose weight can be had as one dense matrix [out_features, in_features]."""

    bias: Parameter | None

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the output."""
        ...

    def dense_weight(self, tape: Tape) -> Tensor:
        """Return the weight, dequantised where it is stored otherwise."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """The weights of one adapter; `magnitude` is there with DoRA only."""

    lora_a: Parameter
    lora_b: Parameter
    magnitude: Parameter | None
    rank: int
    dropout: float


class LoraModule:
    """result + lora_B(lora_A(dropout(x))) * scaling, around a linear.

    quantized: the base is a linear of bitsandbytes, whose wrapper in peft differs: under autocast it leaves the
    casting of the input to autocast; without, it casts what it adds, not the sum. clone: it copies the base's result
    first (4 bits only).
    """

    __slots__ = ("adapters", "base", "clone", "quantized", "spec")

    def __init__(
        self,
        spec: Linear,
        base: DenseModule,
        adapters: Adapters,
        *,
        quantized: bool = False,
        clone: bool = False,
    ) -> None:
        self.spec = spec
        self.base = base
        self.adapters = adapters
        self.quantized = quantized
        self.clone = clone

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features] in the type of the base's result."""
        if self.quantized:
            return self._on_quantized(tape, x)
        result = self.base(tape, x)
        dtype = result.dtype
        tape.label = self.spec.name
        x = to(tape, x, self.adapters.lora_a.dtype)
        if self.adapters.magnitude is None:
            result = add(tape, result, mul_scalar(tape, self._delta(tape, x)))
        else:
            result = self._dora(tape, x, result)
        return to(tape, result, dtype)

    def _on_quantized(self, tape: Tape, x: Tensor) -> Tensor:
        result = self.base(tape, x)
        tape.label = self.spec.name
        if self.clone:
            result = contiguous(tape, result)
        dtype = result.dtype
        requires_conversion = tape.autocast_dtype is None
        if requires_conversion:
            x = to(tape, x, self.adapters.lora_a.dtype)
        if self.adapters.magnitude is None:
            output = mul_scalar(tape, self._delta(tape, x))
            if requires_conversion:
                output = to(tape, output, dtype)
            return add(tape, result, output)
        result = self._dora(tape, x, result)
        return to(tape, result, dtype) if requires_conversion else result

    def _delta(self, tape: Tape, x: Tensor) -> Tensor:
        dropped = dropout(tape, x, self.adapters.dropout) if self.adapters.dropout > 0 else x
        down = linear(tape, dropped, self.adapters.lora_a, None, out_features=self.adapters.rank)
        del dropped
        return linear(tape, down, self.adapters.lora_b, None, out_features=self.spec.out_features)

    def _dora(self, tape: Tape, x: Tensor, result: Tensor) -> Tensor:
        """DoraLinearVariant.forward: with dropout the base's product is computed again on the dropped input."""
        base_result: Tensor | None = result
        if self.adapters.dropout > 0:
            x = dropout(tape, x, self.adapters.dropout)
            base_result = None
        return add(tape, result, self._dora_layer(tape, x, base_result))

    def _dora_layer(self, tape: Tape, x: Tensor, base_result: Tensor | None) -> Tensor:
        """DoraLinearLayer.forward; the norm of the merged weight takes no part in backward."""
        adapters = self.adapters
        assert adapters.magnitude is not None
        lora_weight = self._lora_weight(tape)
        lora_weight = to(tape, lora_weight, x.dtype)
        weight = self.base.dense_weight(tape)
        weight = to(tape, weight, x.dtype)
        weight_norm = self._weight_norm(tape, weight, lora_weight.detach())
        mag_norm_scale = div(tape, adapters.magnitude, weight_norm)
        down = linear(tape, x, adapters.lora_a, None, out_features=adapters.rank)
        lora_result = linear(tape, down, adapters.lora_b, None, out_features=self.spec.out_features)
        del down
        if base_result is None:
            base_result = linear(tape, x, weight, None, out_features=self.spec.out_features)
        elif self.base.bias is not None:
            base_result = add(tape, base_result, self.base.bias)  # base_result - bias
        left = mul(tape, add_scalar(tape, mag_norm_scale), base_result)
        right = mul_scalar(tape, mul(tape, mag_norm_scale, lora_result))
        return add(tape, left, right)

    def _lora_weight(self, tape: Tape) -> Tensor:
        """get_lora_weight: both adapters applied to the identity matrix."""
        adapters, in_features = self.adapters, self.spec.in_features
        eye = tape.new(in_features * in_features, adapters.lora_a.dtype)
        down = linear(tape, eye, adapters.lora_a, None, out_features=adapters.rank, is_matrix=True)
        out_features = self.spec.out_features
        return linear(tape, down, adapters.lora_b, None, out_features=out_features, is_matrix=True)

    def _weight_norm(self, tape: Tape, weight: Tensor, lora_weight: Tensor) -> Tensor:
        """get_weight_norm: one number per row of weight + scaling * lora_weight."""
        dtype = weight.dtype
        weight = add(tape, weight, mul_scalar(tape, lora_weight))
        norm_dtype = weight.dtype if tape.autocast_dtype is None else FLOAT32
        norm = tape.new(self.spec.out_features, norm_dtype)
        return to(tape, norm, dtype).detach()


class AdaptedStack:
    """peft's ParamWrapper on a frozen parameter, a matrix or a stack of them: the adapted weight is spelt out whole.

    `enter` makes the weight once, for the check of `torch.nn.utils.parametrize`; `value` makes it once more where the
    module asks for it, and keeps it until the module returns and `leave` is called.
    """

    __slots__ = ("_made", "_make", "base", "lora_a", "lora_b", "num_matrices")

    def __init__(
        self, base: Parameter, *, lora_a: Parameter, lora_b: Parameter, num_matrices: int
    ) -> None:
        self.base = base
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.num_matrices = num_matrices
        self._make: Callable[[], Tensor] | None = None
        self._made: Tensor | None = None

    @property
    def dtype(self) -> Dtype:
        """Of the weight, adapted or not."""
        return self.base.dtype

    def enter(self, tape: Tape) -> None:
        """Begin to adapt the weight."""
        self._make = self._of_one(tape) if self.num_matrices == 1 else self._of_many(tape)
        self._make()

    def leave(self) -> None:
        """Forget the adapted weight."""
        self._make = self._made = None

    def value(self) -> Tensor:
        """Return the adapted weight."""
        assert self._make is not None
        if self._made is None:
            self._made = self._make()
        return self._made

    def _of_one(self, tape: Tape) -> Callable[[], Tensor]:
        """A delta of the weight's size (`get_delta_weight`), added where the weight is asked for."""
        numel = self.base.numel
        delta = mul_scalar(tape, matmul(tape, self.lora_b, self.lora_a, numel=numel))
        delta = to(tape, delta, self.dtype)
        return lambda: add(tape, self.base, delta)

    def _of_many(self, tape: Tape) -> Callable[[], Tensor]:
        """Both factors in the type of the weight (`get_delta_factors`), and one baddbmm without autocast."""
        weight_b = _by_expert(tape, self.lora_b)
        lhs, rhs = to(tape, weight_b, self.dtype), to(tape, self.lora_a, self.dtype)
        return lambda: _baddbmm(tape, self.base, lhs, rhs)


def _by_expert(tape: Tape, weight: Tensor) -> Tensor:
    """weight.reshape(out, r, E).permute(2, 0, 1): a view whose gradient is copied back into the order of the weight."""

    def backward(gradient: Tensor) -> tuple[Tensor]:
        return (tape.new(gradient.numel, gradient.dtype).view_with_base(),)

    return tape.record(weight.detach(), (weight,), (), backward)


def value_of(weight: Tensor | AdaptedStack) -> Tensor:
    """Return a weight that may be adapted, where it is used."""
    return weight.value() if isinstance(weight, AdaptedStack) else weight


def while_adapted(
    tape: Tape, weights: Sequence[Tensor | AdaptedStack], run: Callable[[], Result]
) -> Result:
    """Run with those of the weights adapted that are to be, the first one outermost.

    Not a context manager: a recomputation ends in an exception, and contextlib would keep its frames, and their
    tensors, in a cycle.
    """
    stacks = [weight for weight in weights if isinstance(weight, AdaptedStack)]
    try:
        for stack in stacks:
            stack.enter(tape)
        return run()
    finally:
        for stack in stacks:
            stack.leave()


def _baddbmm(tape: Tape, base: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """torch.baddbmm(base, lhs, rhs, alpha=scaling) with a frozen base; each gradient is a product, then scaled."""
    saved = tape.save(lhs, rhs)
    numel_lhs, numel_rhs = lhs.numel, rhs.numel

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        product = tape.new(numel_lhs, gradient.dtype)
        for_lhs = tape.new(numel_lhs, gradient.dtype)
        del product
        product = tape.new(numel_rhs, gradient.dtype)
        for_rhs = tape.new(numel_rhs, gradient.dtype)
        del product
        return for_lhs, for_rhs

    return tape.record(tape.new(base.numel, base.dtype), (lhs, rhs), saved, backward)
