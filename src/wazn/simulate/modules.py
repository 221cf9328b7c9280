"""Modules with weights: a linear, with or without adapters; a norm."""

from __future__ import annotations

from typing import Protocol

from wazn.model.spec import Linear, Norm
from wazn.simulate.norms import NORMS
from wazn.simulate.ops import add, dropout, linear, mul_scalar, to
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["LinearModule", "LoraModule", "Module", "NormModule"]


class Module(Protocol):
    """Whatever maps [..., in] to [..., out]."""

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the output."""
        ...


class LinearModule:
    """torch.nn.Linear."""

    __slots__ = ("bias", "spec", "weight")

    def __init__(self, spec: Linear, weight: Parameter, bias: Parameter | None) -> None:
        self.spec = spec
        self.weight = weight
        self.bias = bias

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        tape.label = self.spec.name
        return linear(tape, x, self.weight, self.bias, out_features=self.spec.out_features)


class LoraModule:
    """peft's lora.Linear around a base: result + lora_B(lora_A(dropout(x))) * scaling.

    Source: peft 0.21, tuners/lora/layer.py, `Linear.forward`.
    """

    __slots__ = ("base", "lora_a", "lora_b", "probability", "rank", "spec")

    def __init__(
        self,
        spec: Linear,
        base: Module,
        *,
        lora_a: Parameter,
        lora_b: Parameter,
        rank: int,
        probability: float,
    ) -> None:
        self.spec = spec
        self.base = base
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.rank = rank
        self.probability = probability

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features] in the type of the base's result."""
        result = self.base(tape, x)
        dtype = result.dtype
        tape.label = self.spec.name
        x = to(tape, x, self.lora_a.dtype)
        result = add(tape, result, mul_scalar(tape, self._delta(tape, x)))
        return to(tape, result, dtype)

    def _delta(self, tape: Tape, x: Tensor) -> Tensor:
        dropped = dropout(tape, x, self.probability) if self.probability > 0 else x
        down = linear(tape, dropped, self.lora_a, None, out_features=self.rank)
        del dropped
        return linear(tape, down, self.lora_b, None, out_features=self.spec.out_features)


class NormModule:
    """A normalisation of the kind that its spec names."""

    __slots__ = ("bias", "function", "spec", "weight")

    def __init__(self, spec: Norm, weight: Parameter | None, bias: Parameter | None) -> None:
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.function = NORMS[spec.kind]

    def __call__(self, tape: Tape, x: Tensor) -> Tensor:
        """x: [..., size]; returns the same shape."""
        tape.label = self.spec.name
        return self.function(tape, x, self.weight, self.bias, self.spec.size)
