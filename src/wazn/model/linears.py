"""Which modules of a model are linears: what LoRA may adapt and what bitsandbytes replaces.

transformers 5 keeps experts and most routers as plain parameters, which are no linears; 4.x has a module for each.
`fused_experts` says which of the two, as in `wazn.model.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wazn.model.parameters import (
    in_creation_order,
    layer_parameters,
    outer_parameters,
    v4_name,
)
from wazn.model.spec import (
    AttentionSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    MoeSpec,
)

__all__ = [
    "QuantizedLinears",
    "attention_linears",
    "layer_linears",
    "outer_linears",
    "quantized_linears",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLinears:
    """What becomes 4-bit or 8-bit: per layer (equal layers share one tuple) and outside the layers."""

    layers: tuple[tuple[Linear, ...], ...]
    outer: tuple[Linear, ...]


def attention_linears(layer: LayerSpec) -> tuple[Linear, ...]:
    """Return the projections of a layer's attention, the output one last."""
    attention = layer.attention
    if isinstance(attention, AttentionSpec):
        return (*attention.projections, attention.output)
    parts = (
        attention.q,
        attention.q_a,
        attention.q_b,
        attention.kv_a,
        attention.kv_b,
        attention.output,
    )
    return tuple(part for part in parts if part is not None)


def layer_linears(layer: LayerSpec, *, fused_experts: bool = True) -> tuple[Linear, ...]:
    """Return every linear of a layer in the order in which its modules were created, names relative to the layer."""
    found = [*attention_linears(layer)]
    mlp = layer.mlp
    if not isinstance(mlp, MoeSpec):
        found += _mlp(mlp)
        return tuple(in_creation_order(found, layer.registration))
    found += _moe(mlp, fused=fused_experts)
    if fused_experts:
        return tuple(in_creation_order(found, layer.registration))
    found = in_creation_order(found, mlp.v4.registration or layer.registration)
    return tuple(replace(linear, name=v4_name(linear.name, mlp)) for linear in found)


def outer_linears(spec: ModelSpec) -> tuple[Linear, ...]:
    """Return the linears outside the layers, the head last."""
    projections = in_creation_order(list(spec.embedding_projections), spec.registration)
    return (*projections, spec.head)


def quantized_linears(spec: ModelSpec, *, fused_experts: bool = True) -> QuantizedLinears:
    """Return the linears that bitsandbytes replaces when transformers loads the model with its default exceptions.

    Those exceptions are the head and the module that holds the last of all parameters, which in a model with a tied
    head and a final norm without weight (OLMo 1B) is a matrix of the last layer.

    Source: `get_keys_to_not_convert` and `replace_with_bnb_linear` of transformers 5.24; the same functions of 4.57.
    """
    made: dict[int, tuple[Linear, ...]] = {}
    layers = []
    for layer in spec.layers:
        key = id(layer)
        if key not in made:
            linears = layer_linears(layer, fused_experts=fused_experts)
            made[key] = tuple(
                linear for linear in linears if not (fused_experts and linear.subclass)
            )
        layers.append(made[key])
    if not outer_parameters(spec).after:
        last = layer_parameters(spec.layers[-1], fused_experts=fused_experts)[-1].name
        kept = last.removesuffix(".weight")
        layers[-1] = tuple(linear for linear in layers[-1] if linear.name != kept)
    return QuantizedLinears(layers=tuple(layers), outer=outer_linears(spec)[:-1])


def _mlp(mlp: MlpSpec) -> list[Linear]:
    return [mlp.up, mlp.down] if mlp.gate is None else [mlp.gate, mlp.up, mlp.down]


def _moe(moe: MoeSpec, *, fused: bool) -> list[Linear]:
    found = []
    if moe.router_is_linear if fused else moe.v4.router_is_linear:
        found.append(moe.router)
    if not fused and moe.v4.listed:
        expert = in_creation_order(_mlp(moe.expert), moe.v4.expert_registration)
        found += [
            replace(linear, name=f"{moe.experts_name}.{index}.{linear.name}")
            for index in range(moe.num_experts)
            for linear in expert
        ]
    if moe.shared is not None:
        found += _mlp(moe.shared)
    if moe.shared_gate is not None:
        found.append(moe.shared_gate)
    return found
