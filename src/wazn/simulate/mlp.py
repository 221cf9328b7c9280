"""Feed-forward blocks."""

from __future__ import annotations

from wazn.model.spec import MlpSpec
from wazn.simulate.context import Context
from wazn.simulate.modules import Module
from wazn.simulate.ops import mul, pointwise
from wazn.simulate.tape import Tensor

__all__ = ["MlpModule"]


class MlpModule:
    """down(act(gate(x)) * up(x)), as LlamaMLP writes it."""

    __slots__ = ("down", "gate", "spec", "up")

    def __init__(self, spec: MlpSpec, *, gate: Module | None, up: Module, down: Module) -> None:
        self.spec = spec
        self.gate = gate
        self.up = up
        self.down = down

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        tape = context.tape
        assert self.gate is not None
        hidden = self._gated(context, x)
        return self.down(tape, hidden)

    def _gated(self, context: Context, x: Tensor) -> Tensor:
        tape = context.tape
        assert self.gate is not None
        activated = pointwise(tape, self.gate(tape, x))
        up = self.up(tape, x)
        tape.label = "mlp.act_fn"
        return mul(tape, activated, up)
