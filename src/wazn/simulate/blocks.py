"""Decoder layers: where norms and residual additions stand."""

from __future__ import annotations

from collections.abc import Callable

from wazn.model.spec import LayerSpec, ResidualLayout
from wazn.simulate.context import Context
from wazn.simulate.modules import NormModule
from wazn.simulate.ops import add
from wazn.simulate.tape import Tensor

__all__ = ["LAYOUTS", "LayerModule"]

Branch = Callable[[Context, Tensor], Tensor]


class LayerModule:
    """One decoder layer; `checkpointed` says whether backward runs it again."""

    __slots__ = ("attention", "checkpointed", "index", "mlp", "norms", "spec")

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        *,
        attention: Branch,
        mlp: Branch,
        norms: tuple[NormModule, ...],
    ) -> None:
        self.spec = spec
        self.index = index
        self.attention = attention
        self.mlp = mlp
        self.norms = norms
        self.checkpointed = False

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        return LAYOUTS[self.spec.layout](self, context, x)


def pre_norm(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """x += attention(norm(x)); x += mlp(norm(x)) (LlamaDecoderLayer)."""
    tape = context.tape
    first, second = layer.norms
    residual = x
    x = first(tape, x)
    x = layer.attention(context, x)
    tape.label = "residual"
    x = add(tape, residual, x)
    residual = x
    x = second(tape, x)
    x = layer.mlp(context, x)
    tape.label = "residual"
    return add(tape, residual, x)


LAYOUTS: dict[ResidualLayout, Callable[[LayerModule, Context, Tensor], Tensor]] = {
    ResidualLayout.PRE: pre_norm,
}
