"""Run the layers, and throw activations away where the recipe says so."""

from __future__ import annotations

from functools import partial

from wazn.recipe import Checkpointing, Recipe
from wazn.simulate.blocks import LayerModule
from wazn.simulate.context import Context
from wazn.simulate.tape import Tape, Tensor

__all__ = ["is_checkpointed", "run_layers"]


def is_checkpointed(recipe: Recipe, index: int) -> bool:
    """Say whether the layer with this index (in the whole model) is run again in backward."""
    if recipe.checkpointing is Checkpointing.EVERY_N:
        return index % recipe.checkpoint_every == 0
    return recipe.checkpointing in (
        Checkpointing.FULL,
        Checkpointing.FULL_REENTRANT,
        Checkpointing.SELECTIVE_OP,
    )


def run_layers(
    tape: Tape, layers: tuple[LayerModule, ...], recipe: Recipe, context: Context, x: Tensor
) -> Tensor:
    """x: [B, S, H]; returns the same, out of the last layer, and leaves the tape outside the layers."""
    handed: dict[int | None, Context] = {}
    for layer in layers:
        tape.enter_layer(layer.index)
        window = layer.window
        if window not in handed:
            handed[window] = context.for_layer(window)
        call = partial(layer, handed[window])
        if not layer.checkpointed:
            x = call(x)
        elif recipe.checkpointing is Checkpointing.FULL_REENTRANT:
            x = tape.checkpoint_reentrant(call, x)
        else:
            keep = recipe.checkpointing is Checkpointing.SELECTIVE_OP
            x = tape.checkpoint(call, x, keep_products=keep)
    tape.enter_layer(None)
    return x
