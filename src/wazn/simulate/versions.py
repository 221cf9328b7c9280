"""What a family's class has in some releases and not in others, beside what attention and the loss
ask for: buffers, other code.
"""

from __future__ import annotations

from dataclasses import replace

from wazn.dtypes import BOOL, FLOAT32
from wazn.facts.stacks import CausalBuffers, Habits
from wazn.model.spec import AttentionSpec, LayerSpec, ModelSpec, Norm, NormKind, RotaryKind
from wazn.recipe import Recipe
from wazn.simulate.attention_older import OLDER_OPT
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import Category

__all__ = ["as_written", "make_buffers"]

_OWN = "own"


def as_written(spec: ModelSpec, habits: Habits) -> ModelSpec:
    """Return the model with the norms and the rotary code that its class has at that version;
    layers that were equal stay so.
    """
    is_newest = habits.norm_code == _OWN and habits.rotary_code == _OWN
    if is_newest and not habits.own_attention_code:
        return spec
    made: dict[int, LayerSpec] = {}
    for layer in spec.layers:
        if id(layer) not in made:
            made[id(layer)] = _layer(layer, habits)
    return replace(
        spec,
        layers=tuple(made[id(layer)] for layer in spec.layers),
        final_norm=_norm(spec.final_norm, habits),
    )


def _layer(layer: LayerSpec, habits: Habits) -> LayerSpec:
    attention, is_older = layer.attention, habits.own_attention_code
    is_opt_448 = habits.minor <= (4, 48)  # it views its heads without a copy since
    if isinstance(attention, AttentionSpec):
        code = attention.rotary_code if habits.rotary_code == _OWN else habits.rotary_code
        attention = replace(
            attention,
            code=OLDER_OPT if attention.code == "opt" and is_opt_448 else attention.code,
            rotary_code=code,
            rotary_concat=attention.rotary_concat and code == attention.rotary_code,
            views_last=attention.views_last or is_older,
            q_norm=_norm(attention.q_norm, habits),
            k_norm=_norm(attention.k_norm, habits),
        )
    norms = tuple(replace(norm, kind=_kind(norm, habits)) for norm in layer.norms)
    return replace(layer, attention=attention, norms=norms)


def _norm(norm: Norm | None, habits: Habits) -> Norm | None:
    return None if norm is None else replace(norm, kind=_kind(norm, habits))


def _kind(norm: Norm, habits: Habits) -> NormKind:
    return norm.kind if habits.norm_code == _OWN else NormKind(habits.norm_code)


def make_buffers(tape: Tape, spec: ModelSpec, recipe: Recipe, habits: Habits) -> list[Tensor]:
    """Allocate what the layers store beside their weights: cos and sin of every position, squares of booleans.

    What the newest release has as well, frequencies and GPT-Neo's squares, is `load_buffers`'s.
    """
    positions = spec.max_positions
    if positions is None:
        return []
    buffers: list[Tensor] = []
    square = positions * positions
    # in the type that the model is built in; peft's helper raises parameters, not buffers
    table_dtype = FLOAT32 if habits.family == "gpt_neox" else recipe.precision.weight_dtype
    if habits.causal_buffers is CausalBuffers.ONE:
        buffers.append(tape.new_tagged(square, BOOL, Category.WEIGHTS, "causal mask"))
    for index in range(spec.num_layers):
        tape.enter_layer(index)
        if habits.causal_buffers is CausalBuffers.PER_LAYER and habits.family != "gpt_neo":
            buffers.append(tape.new_tagged(square, BOOL, Category.WEIGHTS, "causal mask"))
        attention = spec.layers[index].attention
        rotates = (
            not isinstance(attention, AttentionSpec) or attention.rotary is not RotaryKind.NONE
        )
        if habits.rotary_stored and rotates and spec.rotary_dim:
            buffers += [
                tape.new_tagged(positions * spec.rotary_dim, table_dtype, Category.WEIGHTS, name)
                for name in ("cos", "sin")
            ]
    tape.enter_layer(None)
    return buffers
