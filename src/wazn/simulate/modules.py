"""Modules with weights: a linear, a norm."""

from __future__ import annotations

from typing import Protocol

from wazn.model.spec import Linear, Norm
from wazn.simulate.norms import NORMS
from wazn.simulate.ops import add, linear, view
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["LinearModule", "Module", "NormModule"]


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
        spec = self.spec
        if spec.subclass:
            # input @ weight.T: of a view, autocast caches no cast (FalconLinear)
            out = linear(tape, x, view(tape, self.weight), None, out_features=spec.out_features)
            return out if self.bias is None else add(tape, out, self.bias)
        return linear(
            tape, x, self.weight, self.bias, out_features=spec.out_features, conv1d=spec.conv1d
        )

    def dense_weight(self, tape: Tape) -> Tensor:
        """Return the weight as it is."""
        return self.weight


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
