"""Feed-forward blocks."""

from __future__ import annotations

from wazn.model.spec import MlpSpec
from wazn.simulate.activations import ACTIVATIONS, ActivationFunction
from wazn.simulate.context import Context
from wazn.simulate.modules import Module
from wazn.simulate.ops import add, dropout, mul, split
from wazn.simulate.tape import Tape, Tensor

__all__ = ["MlpModule"]


class MlpModule:
    """down(act(gate(x)) * up(x)), the same with gate and up in one matrix, or down(act(up(x)))."""

    __slots__ = ("activation", "down", "gate", "spec", "up")

    def __init__(self, spec: MlpSpec, *, gate: Module | None, up: Module, down: Module) -> None:
        self.spec = spec
        self.gate = gate
        self.up = up
        self.down = down
        self.activation: ActivationFunction = ACTIVATIONS[spec.activation]

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        tape = context.tape
        if self.gate is not None:
            x = self.down(tape, self._gated(tape, x))
        elif self.spec.fused_gate_up:
            x = self._fused(tape, x)
        else:
            x = self.up(tape, x)
            tape.label = "mlp.act"
            x = self.activation(tape, x)
            x = self.down(tape, x)
        tape.label = "mlp.dropout"
        return dropout(tape, x, self.spec.dropout)

    def with_residual(self, context: Context, x: Tensor, residual: Tensor) -> Tensor:
        """down(act(up(x))) + residual, where the code adds it inside (BloomMLP, MptMLP)."""
        tape = context.tape
        x = self._activated(tape, self.up(tape, x))
        output = self.down(tape, x)
        tape.label = "residual"
        return add(tape, residual, dropout(tape, output, self.spec.dropout))

    def _gated(self, tape: Tape, x: Tensor) -> Tensor:
        """LlamaMLP: what is multiplied dies with the product."""
        assert self.gate is not None
        activated = self._activated(tape, self.gate(tape, x))
        up = self.up(tape, x)
        tape.label = "mlp.act"
        return mul(tape, activated, up)

    def _activated(self, tape: Tape, x: Tensor) -> Tensor:
        tape.label = "mlp.act"
        return self.activation(tape, x)

    def _fused(self, tape: Tape, x: Tensor) -> Tensor:
        """Phi3MLP: `up_states` stays alive until the end."""
        up_states = self.up(tape, x)
        tape.label = "mlp.act"
        half = up_states.numel // 2
        gate, up_states = split(tape, up_states, (half, half))
        up_states = mul(tape, up_states, self.activation(tape, gate))
        return self.down(tape, up_states)
