"""Load a model onto the tape: its weights, allocated in order, and the modules that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from wazn.dtypes import FLOAT32, INT8, UINT8, Dtype
from wazn.errors import Unsupported
from wazn.model.parameters import Group, layer_parameters, outer_parameters, v4_name
from wazn.model.parameters import Parameter as Weight
from wazn.model.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    Norm,
    NormKind,
)
from wazn.recipe import KbitPreparation, Quantization, QuantizationFormat, Recipe
from wazn.simulate.attention import Attended, AttentionModule
from wazn.simulate.attention_older import OLDER_ATTENTION
from wazn.simulate.attention_own import OWN_ATTENTION
from wazn.simulate.blocks import LayerModule
from wazn.simulate.buffers import load_buffers
from wazn.simulate.context import Context
from wazn.simulate.latent_attention import LatentAttentionModule
from wazn.simulate.listed_experts import LISTED, ListedMoeModule
from wazn.simulate.lora import AdaptedStack, Adapters, DenseModule, LoraModule
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import LinearModule, Module, NormModule
from wazn.simulate.moe import Experts, MoeModule
from wazn.simulate.normalised import NormHead
from wazn.simulate.norms import PerHeadNorm
from wazn.simulate.quantized import (
    Linear4bitModule,
    Linear8bitModule,
    QuantizationState,
    quantization_state,
)
from wazn.simulate.routing import HAS_CORRECTION_BUFFER, IN_FP32, ROUTERS, Router
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
    buffers: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a layer, or of what is outside the layers, by name; `states` by the name of the quantised
    linear.
    """

    parameters: dict[str, Parameter] = field(default_factory=dict)
    states: dict[str, QuantizationState] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]

    def get(self, name: str) -> Parameter | None:
        """Return the weight with this name, or None."""
        return self.parameters.get(name)


def load(
    tape: Tape,
    spec: ModelSpec,
    recipe: Recipe,
    targets: frozenset[str],
    trained: Trained,
    indices: Sequence[int],
) -> LoadedModel:
    """Allocate the weights of `spec` as `recipe` keeps them; adapters stand on what is named in `targets`.

    What loading holds for a moment beside the weights (a matrix before it is quantised, before it is raised to fp32)
    is left out.

    Args:
        targets: names of linears, or of stacked parameters, within their layer.
        indices: where in the whole model the layers of `spec` stand.
    """
    quantised_layers, quantised_outside = _quantised(spec, recipe)
    store = _Store(tape, recipe)
    outer = outer_parameters(spec)
    weights = Weights()
    for item in outer.before:
        is_outer_trained = trained.outside_layers(item.name)
        store.weight(weights, item, quantised_outside, is_outer_trained, store.dtype(item.group))
    by_layer: list[Weights] = []
    for index, layer in enumerate(spec.layers):
        tape.enter_layer(index)
        is_trained = partial(trained.in_layer, indices[index])
        by_layer.append(store.layer(layer, quantised_layers[index], is_trained))
    tape.enter_layer(None)
    for item in outer.after:
        is_outer_trained = trained.outside_layers(item.name)
        store.weight(weights, item, quantised_outside, is_outer_trained, store.dtype(item.group))
    adapters: list[dict[str, Parameter]] = []
    for index, layer in enumerate(spec.layers):
        tape.enter_layer(index)
        adapters.append(store.adapters(layer, targets))
        by_layer[index].parameters.update(adapters[index])
    tape.enter_layer(None)
    copies = store.modules_to_save(spec, weights)
    buffers = load_buffers(tape, spec)
    layers = tuple(
        _layer_module(layer, index, by_layer[index], recipe)
        for index, layer in enumerate(spec.layers)
    )
    own_embedding = weights[f"{spec.embedding.name}.weight"]
    embedding = copies.get(spec.embedding.name, own_embedding)
    own_head = own_embedding if spec.tied else weights[f"{spec.head.name}.weight"]
    head_weight = copies.get(spec.head.name, own_head)  # a tied head stays with the original
    projections: list[Module | None] = [
        _linear(linear, weights, recipe) for linear in spec.embedding_projections
    ] or [None, None]
    return LoadedModel(
        spec=spec,
        embedding=embedding,
        layers=layers,
        final_norm=None if spec.final_norm is None else _norm(spec.final_norm, weights),
        position_embedding=None
        if spec.position_embedding is None
        else weights[f"{spec.position_embedding.name}.weight"],
        embedding_norm=None if spec.embedding_norm is None else _norm(spec.embedding_norm, weights),
        buffers=buffers,
        project_in=projections[0],
        project_out=projections[1],
        head=_head(spec, head_weight, weights.get(f"{spec.head.name}.bias")),
        parameters=(
            *(weights[item.name] for item in outer.before),
            *(parameter for layer in by_layer for parameter in layer.parameters.values()),
            *(weights[item.name] for item in outer.after),
            *copies.values(),
        ),
    )


QuantisedNames = Mapping[str, Linear]


def _quantised(
    spec: ModelSpec, recipe: Recipe
) -> tuple[tuple[QuantisedNames, ...], QuantisedNames]:
    """Return which linears bitsandbytes replaces, by name: in each layer, and outside the layers."""
    if recipe.quantization is None:
        return ({},) * spec.num_layers, {}
    from wazn.model.linears import quantized_linears  # only a quantised base pays for it

    found = quantized_linears(spec, fused_experts=recipe.fused_experts)
    by_layer = {
        id(linears): {linear.name: linear for linear in linears} for linears in found.layers
    }
    return (
        tuple(by_layer[id(linears)] for linears in found.layers),
        {linear.name: linear for linear in found.outer},
    )


# names with `lm_head`, `embed_tokens`, `wte` or `wpe` (trl 0.13, trainer/utils.py, peft_module_casting_to_bf16)
_PUT_BACK_BY_TRL = (Group.EMBEDDING, Group.POSITION, Group.HEAD)


class _Store:
    """Allocates weights as a recipe keeps them."""

    def __init__(self, tape: Tape, recipe: Recipe) -> None:
        self.tape = tape
        self.recipe = recipe
        self.quantization = recipe.quantization
        self.preparation = KbitPreparation.NONE
        if recipe.quantization is not None:
            self.preparation = recipe.quantization.kbit_preparation

    def dtype(self, group: Group) -> Dtype:
        """Return the type of what is not quantised, fused experts included."""
        kept = self.preparation is KbitPreparation.NONE or (
            self.preparation is KbitPreparation.TRL and group in _PUT_BACK_BY_TRL
        )
        return self.recipe.precision.weight_dtype if kept else FLOAT32

    def layer(
        self, layer: LayerSpec, quantised: QuantisedNames, is_trained: Callable[[str], bool]
    ) -> Weights:
        """Return the weights of a layer."""
        weights, moe = Weights(), layer.mlp
        router_in_fp32 = isinstance(moe, MoeSpec) and moe.flavour in IN_FP32
        for item in layer_parameters(layer, fused_experts=self.recipe.fused_experts):
            dtype = (
                FLOAT32 if router_in_fp32 and item.group is Group.ROUTER else self.dtype(item.group)
            )
            self.weight(weights, item, quantised, is_trained(item.name), dtype)
        if isinstance(moe, MoeSpec) and moe.flavour in HAS_CORRECTION_BUFFER:
            weights.buffers["correction"] = self.tape.new_tagged(
                moe.num_experts, FLOAT32, Category.WEIGHTS, f"{moe.router.name}.correction"
            )
        return weights

    def weight(
        self,
        weights: Weights,
        item: Weight,
        quantised: QuantisedNames,
        requires_grad: bool,
        dtype: Dtype,
    ) -> None:
        """Allocate one weight, and its constants where it is quantised."""
        owner, _, kind = item.name.rpartition(".")
        linear = quantised.get(owner)
        numel, shape = item.num_elements, item.shape
        if self.quantization is not None and linear is not None:
            dtype = self._bias_dtype(self.quantization)
            if kind == "weight":
                is_int8 = self.quantization.format is QuantizationFormat.INT8
                numel, dtype = (numel, INT8) if is_int8 else (-(-numel // 2), UINT8)
                shape = (numel, 1)
        weights.parameters[item.name] = self.tape.parameter(
            name=item.name,
            numel=numel,
            dtype=dtype,
            requires_grad=requires_grad,
            shape=shape,
            in_embedding=item.group in (Group.EMBEDDING, Group.POSITION),
        )
        if self.quantization is not None and linear is not None and kind == "weight":
            weights.states[owner] = quantization_state(self.tape, linear, self.quantization)

    def _bias_dtype(self, quantization: Quantization) -> Dtype:
        """Return the type of a quantised linear's bias, from the first forward pass on: that of the product."""
        prepared = self.preparation is not KbitPreparation.NONE
        if quantization.computes_in_input_dtype and prepared:
            return FLOAT32  # as what comes out of the norms
        return compute_dtype(self.recipe)

    def adapters(self, layer: LayerSpec, targets: frozenset[str]) -> dict[str, Parameter]:
        """Return A, B and DoRA's magnitudes of what is adapted in a layer."""
        adapter = self.recipe.adapter
        if adapter is None:
            return {}
        from wazn.model.linears import layer_linears  # only adapters pay for it

        found: dict[str, Parameter] = {}
        for linear in layer_linears(layer, fused_experts=self.recipe.fused_experts):
            if linear.name in targets:
                rank, magnitudes = adapter.rank, linear.out_features if adapter.dora else 0
                self._pair(found, linear.name, linear, rank, magnitudes)
        if isinstance(layer.mlp, MoeSpec) and self.recipe.fused_experts:
            for name, linear, rank in stacked_targets(layer.mlp, adapter.rank):
                if name in targets:
                    self._pair(found, name, linear, rank, 0)
        return found

    def _pair(
        self,
        found: dict[str, Parameter],
        name: str,
        linear: Linear,
        rank: int,
        magnitudes: int,
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (rank, linear.in_features),
            "lora_B": (linear.out_features, rank),
        }
        if magnitudes:
            shapes["lora_magnitude_vector"] = (magnitudes,)
        for part, shape in shapes.items():
            full = f"{name}.{part}"
            found[full] = self._trained_copy(full, shape)

    def _trained_copy(self, name: str, shape: tuple[int, ...]) -> Parameter:
        numel = shape[0] if len(shape) == 1 else shape[0] * shape[1]
        return self.tape.parameter(
            name=name,
            numel=numel,
            shape=shape,
            dtype=self.recipe.precision.adapter_dtype,
            requires_grad=True,
            category=Category.ADAPTER_WEIGHTS,
        )

    def modules_to_save(self, spec: ModelSpec, weights: Weights) -> dict[str, Parameter]:
        """Return the trained copies of whole modules, in the type of the original, which stays
        (ModulesToSaveWrapper).
        """
        adapter = self.recipe.adapter
        copies: dict[str, Parameter] = {}
        for wanted in () if adapter is None else adapter.modules_to_save:
            for name in (spec.embedding.name, spec.head.name):
                if name != wanted and not name.endswith(f".{wanted}"):
                    continue
                tied_head = spec.tied and name == spec.head.name
                own = weights[f"{spec.embedding.name if tied_head else name}.weight"]
                copies[name] = self.tape.parameter(
                    name=f"{name}.modules_to_save",
                    numel=own.numel,
                    shape=own.shape,
                    dtype=own.dtype,
                    requires_grad=True,
                    category=Category.ADAPTER_WEIGHTS,
                    in_embedding=name == spec.embedding.name,
                )
                break
            else:
                raise Unsupported(
                    f"`{wanted}` cannot be trained whole beside adapters yet",
                    hint=f"`{spec.embedding.name}` and `{spec.head.name}` can",
                )
        return copies


def compute_dtype(recipe: Recipe) -> Dtype:
    """Return the type in which quantised linears compute: that of autocast, or of the weights before they were
    quantised.
    """
    return recipe.precision.autocast_dtype or recipe.precision.weight_dtype


def stacked_targets(moe: MoeSpec, rank: int) -> tuple[tuple[str, Linear, int], ...]:
    """Return what peft adapts as parameters: name, the matrix of one expert, and the rows of A (all experts; gate and
    up have two each).
    """
    hidden, intermediate = moe.expert.down.out_features, moe.expert.down.in_features
    gate_up = Linear(name="", in_features=hidden, out_features=2 * intermediate)
    down = Linear(name="", in_features=intermediate, out_features=hidden)
    experts = moe.num_experts
    return (
        (f"{moe.experts_name}.gate_up_proj", gate_up, 2 * rank * experts),
        (f"{moe.experts_name}.down_proj", down, rank * experts),
        (f"{moe.router.name}.weight", moe.router, rank),
    )


def _layer_module(layer: LayerSpec, index: int, weights: Weights, recipe: Recipe) -> LayerModule:
    def linear(spec: Linear) -> Module:
        return _linear(spec, weights, recipe)

    mlp = layer.mlp
    return LayerModule(
        layer,
        index,
        attention=_attention(layer.attention, linear, weights),
        mlp=_sparse(mlp, linear, weights, recipe)
        if isinstance(mlp, MoeSpec)
        else _mlp(mlp, linear),
        norms=tuple(_norm(norm, weights) for norm in layer.norms),
    )


def _mlp(spec: MlpSpec, linear: Callable[[Linear], Module]) -> MlpModule:
    gate = None if spec.gate is None else linear(spec.gate)
    return MlpModule(spec, gate=gate, up=linear(spec.up), down=linear(spec.down))


def _sparse(
    spec: MoeSpec, linear: Callable[[Linear], Module], weights: Weights, recipe: Recipe
) -> MoeModule | ListedMoeModule:
    if spec.flavour not in ROUTERS:
        raise Unsupported(
            f"the router of `{spec.flavour}` is counted, and not run yet",
            hint="Mixtral, Qwen, OLMoE, DeepSeek and gpt-oss are weighed",
        )
    if recipe.fused_experts:
        return _moe(spec, linear, weights)
    if spec.flavour not in LISTED:
        raise Unsupported(
            f"the experts of `{spec.flavour}` in transformers 4 are counted, and not run yet",
            hint="`--stack hf` without a version is run",
        )
    return _listed_moe(spec, linear, weights)


def _listed_moe(
    spec: MoeSpec, linear: Callable[[Linear], Module], weights: Weights
) -> ListedMoeModule:
    """transformers 4: a module per expert; its names are those of that version."""

    def named(item: Linear, prefix: str = "") -> Linear:
        return replace(item, name=v4_name(f"{prefix}{item.name}", spec), subclass=False)

    def mlp(item: MlpSpec, prefix: str = "") -> MlpModule:
        gate = None if item.gate is None else named(item.gate, prefix)
        up, down = named(item.up, prefix), named(item.down, prefix)
        return _mlp(replace(item, gate=gate, up=up, down=down), linear)

    router, shared_gate = named(spec.router), spec.shared_gate
    is_linear = spec.v4.router_is_linear
    return ListedMoeModule(
        spec,
        gate=linear(router) if is_linear else None,
        router=None
        if is_linear
        else Router(
            spec=spec,
            weight=weights[f"{router.name}.weight"],
            correction=weights.buffers.get("correction"),
        ),
        experts=[
            mlp(spec.expert, f"{spec.experts_name}.{index}.") for index in range(spec.num_experts)
        ],
        shared=None if spec.shared is None else mlp(spec.shared),
        shared_gate=None if shared_gate is None else linear(named(shared_gate)),
    )


def _moe(spec: MoeSpec, linear: Callable[[Linear], Module], weights: Weights) -> MoeModule:
    correction = weights.buffers.get("correction")
    if spec.router_correction_bias is not None:
        correction = weights[spec.router_correction_bias]
    name = spec.experts_name

    def stack(parameter_name: str) -> Parameter | AdaptedStack:
        weight = weights[parameter_name]
        lora_a = weights.get(f"{parameter_name}.lora_A")
        if lora_a is None:
            return weight
        is_router = parameter_name == f"{spec.router.name}.weight"
        return AdaptedStack(
            weight,
            lora_a=lora_a,
            lora_b=weights[f"{parameter_name}.lora_B"],
            num_matrices=1 if is_router else spec.num_experts,
        )

    return MoeModule(
        spec,
        router=Router(
            spec=spec,
            weight=stack(f"{spec.router.name}.weight"),
            bias=weights.get(f"{spec.router.name}.bias"),
            correction=correction,
        ),
        experts=Experts(
            gate_up=stack(f"{name}.gate_up_proj"),
            down=stack(f"{name}.down_proj"),
            gate_up_bias=weights.get(f"{name}.gate_up_proj_bias"),
            down_bias=weights.get(f"{name}.down_proj_bias"),
        ),
        shared=None if spec.shared is None else _mlp(spec.shared, linear),
        shared_gate=None if spec.shared_gate is None else linear(spec.shared_gate),
    )


def _attention(
    spec: AttentionSpec | LatentAttentionSpec,
    linear: Callable[[Linear], Module],
    weights: Weights,
) -> Callable[[Context, Tensor], Attended]:
    if isinstance(spec, LatentAttentionSpec):
        return _latent_attention(spec, linear, weights)
    projections = tuple(linear(item) for item in spec.projections)
    own = OWN_ATTENTION.get(spec.code) or OLDER_ATTENTION.get(spec.code)
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


def _latent_attention(
    spec: LatentAttentionSpec, linear: Callable[[Linear], Module], weights: Weights
) -> LatentAttentionModule:
    queries: tuple[Module, ...]
    if spec.q is not None:
        queries = (linear(spec.q),)
    else:
        assert spec.q_a is not None
        assert spec.q_a_norm is not None
        assert spec.q_b is not None
        queries = (linear(spec.q_a), _norm(spec.q_a_norm, weights), linear(spec.q_b))
    return LatentAttentionModule(
        spec,
        q=queries,
        kv_a=linear(spec.kv_a),
        kv_a_norm=_norm(spec.kv_a_norm, weights),
        kv_b=linear(spec.kv_b),
        output=linear(spec.output),
    )


def _linear(spec: Linear, weights: Weights, recipe: Recipe) -> Module:
    base = _base(spec, weights, recipe)
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
        quantized=not isinstance(base, LinearModule),
        clone=isinstance(base, Linear4bitModule),
    )


def _base(spec: Linear, weights: Weights, recipe: Recipe) -> DenseModule:
    weight, bias = weights[f"{spec.name}.weight"], weights.get(f"{spec.name}.bias")
    state = weights.states.get(spec.name)
    if state is None or recipe.quantization is None:
        return LinearModule(spec, weight, bias)
    if recipe.quantization.format is QuantizationFormat.INT8:
        return Linear8bitModule(spec, weight, bias, state)
    return Linear4bitModule(
        spec,
        weight,
        bias,
        state,
        recipe.quantization,
        compute_dtype=compute_dtype(recipe),
        dense_dtype=recipe.precision.weight_dtype,
    )


def _head(spec: ModelSpec, weight: Parameter, bias: Parameter | None) -> Module:
    return (
        NormHead(spec.head, weight)
        if spec.head_normalized
        else LinearModule(spec.head, weight, bias)
    )


def _norm(spec: Norm, weights: Weights) -> Module:
    if spec.kind is NormKind.LAYER_PER_HEAD:
        heads = range(spec.heads or 1)
        return PerHeadNorm(spec, [weights[f"{spec.name}.norms.{head}.weight"] for head in heads])
    return NormModule(spec, weights.get(f"{spec.name}.weight"), weights.get(f"{spec.name}.bias"))
