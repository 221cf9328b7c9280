"""Load a model onto the tape: its weights, allocated in order, and the modules that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from wazn.dtypes import Dtype
from wazn.model.parameters import layer_parameters, outer_parameters
from wazn.model.spec import AttentionSpec, LayerSpec, Linear, MlpSpec, ModelSpec, Norm, NormKind
from wazn.recipe import Recipe
from wazn.simulate.attention import Attended, AttentionModule
from wazn.simulate.attention_own import OWN_ATTENTION
from wazn.simulate.blocks import LayerModule
from wazn.simulate.context import Context
from wazn.simulate.lora import Adapters, LoraModule
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import LinearModule, Module, NormModule
from wazn.simulate.norms import PerHeadNorm
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.simulate.trained import Trained
from wazn.timeline.events import Category

__all__ = ["LoadedModel", "load"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model on the tape. `parameters`: every weight in the order of `named_parameters()`, adapters among them."""

    spec: ModelSpec
    embedding: Parameter
    layers: tuple[LayerModule, ...]
    final_norm: Module | None
    head: Module
    parameters: tuple[Parameter, ...]
    position_embedding: Parameter | None = None
    embedding_norm: Module | None = None
    project_in: Module | None = None
    project_out: Module | None = None


Weights = Mapping[str, Parameter]


def load(
    tape: Tape,
    spec: ModelSpec,
    recipe: Recipe,
    targets: frozenset[str],
    trained: Trained,
    indices: Sequence[int],
) -> LoadedModel:
    """Allocate the weights of `spec` as `recipe` keeps them; adapters stand on the linears named in `targets`.

    `indices`: where in the whole model the layers of `spec` stand.
    """
    dtype = recipe.precision.weight_dtype
    outer = outer_parameters(spec)
    weights: dict[str, Parameter] = {}
    for item in outer.before:
        weights[item.name] = tape.parameter(
            name=item.name,
            numel=item.num_elements,
            dtype=dtype,
            requires_grad=trained.outside_layers(item.name),
            shape=item.shape,
        )
    by_layer: list[dict[str, Parameter]] = []
    for index, layer in enumerate(spec.layers):
        tape.enter_layer(index)
        is_trained = partial(trained.in_layer, indices[index])
        by_layer.append(_layer_weights(tape, layer, dtype, is_trained))
    tape.enter_layer(None)
    for item in outer.after:
        weights[item.name] = tape.parameter(
            name=item.name,
            numel=item.num_elements,
            dtype=dtype,
            requires_grad=trained.outside_layers(item.name),
            shape=item.shape,
        )
    adapters: list[dict[str, Parameter]] = []
    for index, layer in enumerate(spec.layers):
        tape.enter_layer(index)
        adapters.append(_layer_adapters(tape, layer, recipe, targets))
    tape.enter_layer(None)
    layers = tuple(
        _layer_module(layer, index, {**by_layer[index], **adapters[index]}, recipe)
        for index, layer in enumerate(spec.layers)
    )
    embedding = weights[f"{spec.embedding.name}.weight"]
    projections = [
        LinearModule(linear, weights[f"{linear.name}.weight"], None)
        for linear in spec.embedding_projections
    ] or [None, None]
    head_weight = embedding if spec.tied else weights[f"{spec.head.name}.weight"]
    return LoadedModel(
        spec=spec,
        embedding=embedding,
        layers=layers,
        final_norm=None if spec.final_norm is None else _norm(spec.final_norm, weights),
        position_embedding=None
        if spec.position_embedding is None
        else weights[f"{spec.position_embedding.name}.weight"],
        embedding_norm=None if spec.embedding_norm is None else _norm(spec.embedding_norm, weights),
        project_in=projections[0],
        project_out=projections[1],
        head=LinearModule(spec.head, head_weight, weights.get(f"{spec.head.name}.bias")),
        parameters=(
            *(weights[item.name] for item in outer.before),
            *(
                parameter
                for base, added in zip(by_layer, adapters, strict=True)
                for parameter in (*base.values(), *added.values())
            ),
            *(weights[item.name] for item in outer.after),
        ),
    )


def _layer_weights(
    tape: Tape, layer: LayerSpec, dtype: Dtype, is_trained: Callable[[str], bool]
) -> dict[str, Parameter]:
    return {
        item.name: tape.parameter(
            name=item.name,
            numel=item.num_elements,
            dtype=dtype,
            requires_grad=is_trained(item.name),
            shape=item.shape,
        )
        for item in layer_parameters(layer)
    }


def _layer_adapters(
    tape: Tape, layer: LayerSpec, recipe: Recipe, targets: frozenset[str]
) -> dict[str, Parameter]:
    if recipe.adapter is None:
        return {}
    rank, dtype = recipe.adapter.rank, recipe.precision.adapter_dtype
    found: dict[str, Parameter] = {}
    for linear in _linears(layer):
        if linear.name in targets:
            for part, shape in (
                ("lora_A", (rank, linear.in_features)),
                ("lora_B", (linear.out_features, rank)),
            ):
                name = f"{linear.name}.{part}"
                found[name] = tape.parameter(
                    name=name,
                    numel=shape[0] * shape[1],
                    shape=shape,
                    dtype=dtype,
                    requires_grad=True,
                    category=Category.ADAPTER_WEIGHTS,
                )
    return found


def _linears(layer: LayerSpec) -> Sequence[Linear]:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MlpSpec)
    gate = () if mlp.gate is None else (mlp.gate,)
    return (*attention.projections, attention.output, *gate, mlp.up, mlp.down)


def _layer_module(layer: LayerSpec, index: int, weights: Weights, recipe: Recipe) -> LayerModule:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MlpSpec)

    def linear(spec: Linear) -> Module:
        return _linear(spec, weights, recipe)

    return LayerModule(
        layer,
        index,
        attention=_attention(attention, linear, weights),
        mlp=MlpModule(
            mlp,
            gate=None if mlp.gate is None else linear(mlp.gate),
            up=linear(mlp.up),
            down=linear(mlp.down),
        ),
        norms=tuple(_norm(norm, weights) for norm in layer.norms),
    )


def _attention(
    spec: AttentionSpec, linear: Callable[[Linear], Module], weights: Weights
) -> Callable[[Context, Tensor], Attended]:
    projections = tuple(linear(item) for item in spec.projections)
    own = OWN_ATTENTION.get(spec.code)
    if own is not None:
        return own(spec, projections=projections, output=linear(spec.output))
    return AttentionModule(
        spec,
        projections=projections,
        output=linear(spec.output),
        q_norm=None if spec.q_norm is None else _norm(spec.q_norm, weights),
        k_norm=None if spec.k_norm is None else _norm(spec.k_norm, weights),
        sinks=weights[f"{spec.output.name.rpartition('.')[0]}.sinks"] if spec.sinks else None,
    )


def _linear(spec: Linear, weights: Weights, recipe: Recipe) -> Module:
    base = LinearModule(spec, weights[f"{spec.name}.weight"], weights.get(f"{spec.name}.bias"))
    lora_a = weights.get(f"{spec.name}.lora_A")
    if lora_a is None or recipe.adapter is None:
        return base
    return LoraModule(
        spec,
        base,
        Adapters(
            lora_a=lora_a,
            lora_b=weights[f"{spec.name}.lora_B"],
            magnitude=weights.get(f"{spec.name}.lora_magnitude_vector"),
            rank=recipe.adapter.rank,
            dropout=recipe.adapter.dropout,
        ),
    )


def _norm(spec: Norm, weights: Weights) -> Module:
    if spec.kind is NormKind.LAYER_PER_HEAD:
        heads = range(spec.heads or 1)
        return PerHeadNorm(spec, [weights[f"{spec.name}.norms.{head}.weight"] for head in heads])
    return NormModule(spec, weights.get(f"{spec.name}.weight"), weights.get(f"{spec.name}.bias"))
