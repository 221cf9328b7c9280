"""Load a model onto the tape: its weights, allocated in order, and the modules that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wazn.dtypes import Dtype
from wazn.model.parameters import layer_parameters, outer_parameters
from wazn.model.spec import AttentionSpec, LayerSpec, Linear, MlpSpec, ModelSpec, Norm
from wazn.recipe import Method, Recipe
from wazn.simulate.attention import AttentionModule
from wazn.simulate.blocks import LayerModule
from wazn.simulate.lora import Adapters, LoraModule
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import LinearModule, Module, NormModule
from wazn.simulate.tape import Parameter, Tape
from wazn.timeline.events import Category

__all__ = ["LoadedModel", "load"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model on the tape. `parameters`: every weight in the order of `named_parameters()`, adapters among them."""

    spec: ModelSpec
    embedding: Parameter
    layers: tuple[LayerModule, ...]
    final_norm: NormModule | None
    head: Module
    parameters: tuple[Parameter, ...]


Weights = Mapping[str, Parameter]


def load(tape: Tape, spec: ModelSpec, recipe: Recipe, targets: frozenset[str]) -> LoadedModel:
    """Allocate the weights of `spec` as `recipe` keeps them; adapters stand on the linears named in `targets`."""
    dtype = recipe.precision.weight_dtype
    trained = recipe.method is Method.FULL
    outer = outer_parameters(spec)
    weights: dict[str, Parameter] = {}
    for item in outer.before:
        weights[item.name] = tape.parameter(
            name=item.name, numel=item.num_elements, dtype=dtype, requires_grad=trained
        )
    by_layer: list[dict[str, Parameter]] = []
    for index, layer in enumerate(spec.layers):
        tape.enter_layer(index)
        by_layer.append(_layer_weights(tape, layer, dtype, trained=trained))
    tape.enter_layer(None)
    for item in outer.after:
        weights[item.name] = tape.parameter(
            name=item.name, numel=item.num_elements, dtype=dtype, requires_grad=trained
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
    head_weight = embedding if spec.tied else weights[f"{spec.head.name}.weight"]
    return LoadedModel(
        spec=spec,
        embedding=embedding,
        layers=layers,
        final_norm=None if spec.final_norm is None else _norm(spec.final_norm, weights),
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
    tape: Tape, layer: LayerSpec, dtype: Dtype, *, trained: bool
) -> dict[str, Parameter]:
    return {
        item.name: tape.parameter(
            name=item.name, numel=item.num_elements, dtype=dtype, requires_grad=trained
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
            for part, numel in (
                ("lora_A", rank * linear.in_features),
                ("lora_B", rank * linear.out_features),
            ):
                name = f"{linear.name}.{part}"
                found[name] = tape.parameter(
                    name=name,
                    numel=numel,
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
        attention=AttentionModule(
            attention,
            projections=tuple(linear(item) for item in attention.projections),
            output=linear(attention.output),
            q_norm=None if attention.q_norm is None else _norm(attention.q_norm, weights),
            k_norm=None if attention.k_norm is None else _norm(attention.k_norm, weights),
        ),
        mlp=MlpModule(
            mlp,
            gate=None if mlp.gate is None else linear(mlp.gate),
            up=linear(mlp.up),
            down=linear(mlp.down),
        ),
        norms=tuple(_norm(norm, weights) for norm in layer.norms),
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


def _norm(spec: Norm, weights: Weights) -> NormModule:
    return NormModule(spec, weights.get(f"{spec.name}.weight"), weights.get(f"{spec.name}.bias"))


LayerCall = Callable[[LayerModule], None]
