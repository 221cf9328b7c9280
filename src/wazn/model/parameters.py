"""Every weight of a model, listed and counted.

Names and order are those of `model.named_parameters()` in transformers 5.24: a module's own parameters first, then
its children in the order in which the class creates them; a tied head is not listed, as it is the embedding's weight.
The order matters because optimizers make their states in it. Counts are sums over distinct layers and list no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Protocol, TypeVar

from wazn.model.spec import (
    AttentionSpec,
    EmbeddingSpec,
    LatentAttentionSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    Norm,
    NormKind,
)

__all__ = [
    "Group",
    "OuterParameters",
    "Parameter",
    "count_layer_parameters",
    "count_parameters",
    "in_creation_order",
    "layer_parameters",
    "outer_parameters",
    "parameters",
    "v4_name",
]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


class Group(StrEnum):
    """What a weight belongs to."""

    EMBEDDING = "embedding"
    POSITION = "position"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    ROUTER = "router"
    NORM = "norm"
    HEAD = "head"
    ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One weight; `layer` is its layer's index, or None outside the layers and in lists of a single layer."""

    name: str
    shape: tuple[int, ...]
    group: Group
    layer: int | None = None

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterParameters:
    """The weights outside the layers, before and after them in the order of `named_parameters()`."""

    before: tuple[Parameter, ...]
    after: tuple[Parameter, ...]


def count_parameters(spec: ModelSpec) -> int:
    """Return the number of unique parameters of the whole model, the tied head counted once."""
    counts: dict[int, int] = {}
    total = 0
    for layer in spec.layers:
        key = id(layer)
        if key not in counts:
            counts[key] = count_layer_parameters(layer)
        total += counts[key]
    outer = outer_parameters(spec)
    return total + sum(p.num_elements for p in (*outer.before, *outer.after))


def count_layer_parameters(layer: LayerSpec) -> int:
    """Return the number of parameters of one layer; the storage of its experts makes no difference."""
    return (
        _count_attention(layer.attention)
        + (_count_moe(layer.mlp) if isinstance(layer.mlp, MoeSpec) else _count_mlp(layer.mlp))
        + sum(map(_count_norm, layer.norms))
    )


def parameters(spec: ModelSpec, *, fused_experts: bool = True) -> Iterator[Parameter]:
    """Yield every weight of the model with its full name, in the order of `named_parameters()`.

    Args:
        fused_experts: experts as 3-D tensors (transformers 5), else as 4.57 stores them: mostly one module per expert.
    """
    outer = outer_parameters(spec)
    yield from outer.before
    within: dict[int, tuple[Parameter, ...]] = {}
    for index, layer in enumerate(spec.layers):
        key = id(layer)
        if key not in within:
            within[key] = layer_parameters(layer, fused_experts=fused_experts)
        prefix = spec.layer_prefix.format(index)
        for p in within[key]:
            yield Parameter(name=prefix + p.name, shape=p.shape, group=p.group, layer=index)
    yield from outer.after


def layer_parameters(layer: LayerSpec, *, fused_experts: bool = True) -> tuple[Parameter, ...]:
    """Return the weights of one layer, names relative to it, in the order of `named_parameters()`.

    Args:
        fused_experts: as transformers 5 stores them; else with the names and the order of 4.57.
    """
    mlp, order = layer.mlp, layer.registration
    found = _attention(layer.attention)
    if not isinstance(mlp, MoeSpec):
        found += _mlp(mlp, Group.MLP)
    elif fused_experts or not mlp.v4.listed:
        found += _moe(mlp, _fused_experts(mlp))
    else:
        found += _moe(mlp, _listed_experts(mlp))
    for norm in layer.norms:
        found += _norm(norm)
    if fused_experts or not isinstance(mlp, MoeSpec):
        return tuple(in_creation_order(found, order))
    found = in_creation_order(found, mlp.v4.registration or order)
    return tuple(replace(p, name=v4_name(p.name, mlp)) for p in found)


def outer_parameters(spec: ModelSpec) -> OuterParameters:
    """Return the weights outside the layers, with full names."""
    found = list(_table(spec.embedding, Group.EMBEDDING))
    if spec.position_embedding is not None:
        found += _table(spec.position_embedding, Group.POSITION)
    if spec.embedding_norm is not None:
        found += _norm(spec.embedding_norm)
    for projection in spec.embedding_projections:
        found += _linear(projection, Group.EMBEDDING)
    after: list[Parameter] = []
    if spec.final_norm is not None:
        after += _norm(spec.final_norm)
    head = _linear(spec.head, Group.HEAD)
    after += (p for p in head if not (spec.tied and p.name.endswith(".weight")))
    if spec.registration:
        order = spec.registration
        cut = order.index("layers")
        everything = in_creation_order(found + after, order)
        found = [p for p in everything if _rank(p.name, order) < cut]
        after = [p for p in everything if _rank(p.name, order) > cut]
    return OuterParameters(before=tuple(found), after=tuple(after))


def in_creation_order(found: list[N], order: tuple[str, ...]) -> list[N]:
    """Sort parts by the module that they belong to; parts of one module keep their places."""
    return sorted(found, key=lambda part: _rank(part.name, order)) if order else found


def v4_name(name: str, moe: MoeSpec) -> str:
    """Return how transformers 4.57 names what 5 calls `name`, below a layer with these experts."""
    for new, old in moe.v4.renames:
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _rank(name: str, order: tuple[str, ...]) -> int:
    for rank, module in enumerate(order):
        if name == module or name.startswith(f"{module}."):
            return rank
    return len(order)


def _linear(linear: Linear, group: Group) -> list[Parameter]:
    shape = (linear.out_features, linear.in_features)
    if linear.conv1d:
        shape = (linear.in_features, linear.out_features)
    found = [Parameter(name=f"{linear.name}.weight", shape=shape, group=group)]
    if linear.bias:
        bias = (linear.out_features,)
        found.append(Parameter(name=f"{linear.name}.bias", shape=bias, group=group))
    return found


def _norm(norm: Norm) -> list[Parameter]:
    if norm.kind is NormKind.LAYER_PER_HEAD:  # a list of modules, one per head
        return [
            Parameter(name=f"{norm.name}.norms.{head}.weight", shape=(norm.size,), group=Group.NORM)
            for head in range(norm.heads or 1)
        ]
    shape = (norm.size,) if norm.heads is None else (norm.heads, norm.size)
    return [
        Parameter(name=f"{norm.name}.{kind}", shape=shape, group=Group.NORM)
        for kind, present in (("weight", norm.weight), ("bias", norm.bias))
        if present
    ]


def _table(table: EmbeddingSpec, group: Group) -> list[Parameter]:
    return [Parameter(name=f"{table.name}.weight", shape=(table.rows, table.size), group=group)]


def _attention(attention: AttentionSpec | LatentAttentionSpec) -> list[Parameter]:
    found: list[Parameter] = []
    if isinstance(attention, AttentionSpec) and attention.sinks:
        module = attention.output.name.rpartition(".")[0]
        shape = (attention.num_heads,)
        found.append(Parameter(name=f"{module}.sinks", shape=shape, group=Group.ATTENTION))
    for part in _attention_parts(attention):
        found += _norm(part) if isinstance(part, Norm) else _linear(part, Group.ATTENTION)
    return found


def _attention_parts(attention: AttentionSpec | LatentAttentionSpec) -> list[Linear | Norm]:
    parts: tuple[Linear | Norm | None, ...]
    if isinstance(attention, AttentionSpec):
        parts = (
            *attention.projections,
            attention.output,
            attention.q_norm,
            attention.k_norm,
        )
    else:
        parts = (
            attention.q,
            attention.q_a,
            attention.q_a_norm,
            attention.q_b,
            attention.kv_a,
            attention.kv_a_norm,
            attention.kv_b,
            attention.output,
        )
    return [part for part in parts if part is not None]


def _mlp_parts(mlp: MlpSpec) -> tuple[Linear, ...]:
    return (mlp.up, mlp.down) if mlp.gate is None else (mlp.gate, mlp.up, mlp.down)


def _mlp(mlp: MlpSpec, group: Group) -> list[Parameter]:
    return [p for linear in _mlp_parts(mlp) for p in _linear(linear, group)]


def _moe(moe: MoeSpec, experts: list[Parameter]) -> list[Parameter]:
    found = _linear(moe.router, Group.ROUTER)
    if moe.router_correction_bias is not None:
        name, shape = moe.router_correction_bias, (1, moe.num_experts)
        found.append(Parameter(name=name, shape=shape, group=Group.ROUTER))
    found += experts
    if moe.shared is not None:
        found += _mlp(moe.shared, Group.MLP)
    if moe.shared_gate is not None:
        found += _linear(moe.shared_gate, Group.MLP)
    return found


def _fused_experts(moe: MoeSpec) -> list[Parameter]:
    hidden, intermediate = moe.expert.down.out_features, moe.expert.down.in_features
    experts = moe.num_experts
    shapes = {
        "gate_up_proj": (experts, 2 * intermediate, hidden),
        "down_proj": (experts, hidden, intermediate),
    }
    if moe.experts_transposed:
        shapes = {name: (e, columns, rows) for name, (e, rows, columns) in shapes.items()}
    found = []
    for name, shape in shapes.items():
        full = f"{moe.experts_name}.{name}"
        found.append(Parameter(name=full, shape=shape, group=Group.EXPERTS))
        if moe.expert_bias:
            width = 2 * intermediate if name == "gate_up_proj" else hidden
            found.append(
                Parameter(name=f"{full}_bias", shape=(experts, width), group=Group.EXPERTS)
            )
    return found


def _listed_experts(moe: MoeSpec) -> list[Parameter]:
    expert = in_creation_order(_mlp(moe.expert, Group.EXPERTS), moe.v4.expert_registration)
    return [
        Parameter(name=f"{moe.experts_name}.{index}.{p.name}", shape=p.shape, group=p.group)
        for index in range(moe.num_experts)
        for p in expert
    ]


def _count_attention(attention: AttentionSpec | LatentAttentionSpec) -> int:
    sinks = attention.num_heads if getattr(attention, "sinks", False) else 0
    return sinks + sum(
        _count_norm(part) if isinstance(part, Norm) else part.num_parameters
        for part in _attention_parts(attention)
    )


def _count_mlp(mlp: MlpSpec) -> int:
    return sum(linear.num_parameters for linear in _mlp_parts(mlp))


def _count_moe(moe: MoeSpec) -> int:
    return (
        moe.router.num_parameters
        + (moe.num_experts if moe.router_correction_bias is not None else 0)
        + moe.num_experts * _count_mlp(moe.expert)
        + (0 if moe.shared is None else _count_mlp(moe.shared))
        + (0 if moe.shared_gate is None else moe.shared_gate.num_parameters)
    )


def _count_norm(norm: Norm) -> int:
    return norm.size * (norm.heads or 1) * (norm.weight + norm.bias)
