"""Mixtures of experts on the tape are the blocks of transformers under fake tensors, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from tests.agreement.compare import DTYPES, assert_agree, run_on_tape
from tests.agreement.golden import Golden
from wazn.dtypes import FLOAT32, Dtype
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import Linear, MlpSpec, MoeSpec
from wazn.recipe import Attention
from wazn.simulate.context import Context
from wazn.simulate.lora import AdaptedStack
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import LinearModule
from wazn.simulate.moe import Experts, MoeModule
from wazn.simulate.routing import Router
from wazn.simulate.tape import Tape, Tensor
from wazn.trace.specs import OpTrace, Spec

TOKENS = (2, 512)
COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 384,
}
SIZED = {**COMMON, "moe_intermediate_size": 384, "intermediate_size": 640}
ROUTED = {**SIZED, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 0}
BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralSparseMoeBlock", {**COMMON, "num_local_experts": 8}),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        {**SIZED, "num_experts": 8, "shared_expert_intermediate_size": 512},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        {**SIZED, "num_experts": 8, "norm_topk_prob": True},
    ),
    "qwen3_moe, not normalised": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        {**SIZED, "num_experts": 8, "norm_topk_prob": False},
    ),
    "olmoe": ("olmoe", "OlmoeSparseMoeBlock", {**COMMON, "num_experts": 8}),
    "granitemoe": ("granitemoe", "GraniteMoeMoE", {**COMMON, "num_local_experts": 8}),
    "gpt_oss": ("gpt_oss", "GptOssMLP", {**COMMON, "num_local_experts": 8}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Moe", ROUTED),
    "deepseek_v2, groups": (
        "deepseek_v2",
        "DeepseekV2Moe",
        {**ROUTED, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE", {**ROUTED, "n_group": 4, "topk_group": 2}),
    "glm4_moe": ("glm4_moe", "Glm4MoeMoE", ROUTED),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        {
            **SIZED,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 0,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        "MiniMaxM2SparseMoeBlock",
        {**COMMON, "num_local_experts": 8, "head_dim": 64},
    ),
}


def real_block(name: str, dtype: str, *, trained: bool) -> Any:
    import torch
    import transformers

    family, class_name, sizes = BLOCKS[name]
    config = transformers.AutoConfig.for_model(family, **sizes)
    config._experts_implementation = "grouped_mm"
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    with torch.device("meta"):
        block = getattr(module, class_name)(config).to(getattr(torch, dtype))
    for parameter in block.parameters():
        parameter.requires_grad_(trained)
    return block


def tape_block(name: str, tape: Tape, dtype: Dtype, *, trained: bool) -> MoeModule:
    family, _, sizes = BLOCKS[name]
    moe = read_config({"model_type": family, **sizes}, id=family, path="config.json").layers[0].mlp
    assert isinstance(moe, MoeSpec)

    def parameter(name: str, *shape: int, trained: bool = trained) -> Any:
        numel = 1
        for size in shape:
            numel *= size
        return tape.parameter(
            name=name, numel=numel, shape=shape, dtype=dtype, requires_grad=trained
        )

    def linear(spec: Linear) -> LinearModule:
        bias = parameter(f"{spec.name}.bias", spec.out_features) if spec.bias else None
        weight = parameter(f"{spec.name}.weight", spec.out_features, spec.in_features)
        return LinearModule(spec, weight, bias)

    def mlp(spec: MlpSpec) -> MlpModule:
        assert spec.gate is not None
        return MlpModule(spec, gate=linear(spec.gate), up=linear(spec.up), down=linear(spec.down))

    hidden, intermediate = moe.expert.down.out_features, moe.expert.down.in_features
    experts = moe.num_experts
    router_bias = moe.router.bias
    corrected = family in ("deepseek_v3", "glm4_moe", "ernie4_5_moe", "minimax_m2")
    return MoeModule(
        moe,
        router=Router(
            spec=moe,
            weight=parameter("router", experts, hidden),
            bias=parameter("router bias", experts) if router_bias else None,
            correction=parameter("correction", experts, trained=False) if corrected else None,
        ),
        experts=Experts(
            gate_up=parameter("gate_up", experts, 2 * intermediate, hidden),
            down=parameter("down", experts, hidden, intermediate),
            gate_up_bias=parameter("gb", experts, 2 * intermediate) if moe.expert_bias else None,
            down_bias=parameter("db", experts, hidden) if moe.expert_bias else None,
        ),
        shared=None if moe.shared is None else mlp(moe.shared),
        shared_gate=None if moe.shared_gate is None else linear(moe.shared_gate),
    )


def with_adapters(block: Any, *, rank: int) -> Any:
    """Wrap the stacked experts and the router as peft does for `all-linear`; gate and up have twice the rank."""
    import torch
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    def wrap(module: Any, name: str, r: int) -> Any:
        with torch.device("meta"):
            return ParamWrapper(
                module, "default", name, config=LoraConfig(r=r), r=r, lora_alpha=2 * r
            )

    block.experts = wrap(wrap(block.experts, "gate_up_proj", 2 * rank), "down_proj", rank)
    block.gate = wrap(block.gate, "weight", rank)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return block


def tape_with_adapters(module: MoeModule, tape: Tape, *, rank: int) -> MoeModule:
    moe = module.spec
    hidden, intermediate = moe.expert.down.out_features, moe.expert.down.in_features

    def stack(base: Any, rows: int, columns: int, r: int, matrices: int) -> AdaptedStack:
        def adapter(name: str, size: int) -> Any:
            numel = size * r * matrices
            return tape.parameter(name=name, numel=numel, dtype=FLOAT32, requires_grad=True)

        return AdaptedStack(
            base,
            lora_a=adapter("lora_A", columns),
            lora_b=adapter("lora_B", rows),
            num_matrices=matrices,
        )

    experts = moe.num_experts
    return MoeModule(
        moe,
        router=replace(module.router, weight=stack(module.router.weight, experts, hidden, rank, 1)),
        experts=replace(
            module.experts,
            gate_up=stack(module.experts.gate_up, 2 * intermediate, hidden, 2 * rank, experts),
            down=stack(module.experts.down, hidden, intermediate, rank, experts),
        ),
        shared=module.shared,
        shared_gate=module.shared_gate,
    )


def context(tape: Tape) -> Context:
    return Context(
        tape=tape,
        habits=resolve_stack("hf", family="mixtral"),
        micro_batch=TOKENS[0],
        seq_len=TOKENS[1],
        attention=Attention.SDPA,
        capability=(8, 0),
    )


def call(tape: Tape, module: MoeModule, x: Tensor) -> Tensor:
    return module(context(tape), x)


def real(name: str, spec: Spec, *, trained: bool, autocast: str | None) -> OpTrace:
    """Measure the block of transformers."""
    from wazn.trace.opcheck import measure_op

    return measure_op(real_block(name, spec.dtype, trained=trained), spec, autocast=autocast)


def real_adapted(name: str, spec: Spec, *, autocast: str | None) -> OpTrace:
    """Measure it frozen, with adapters on its stacks."""
    from wazn.trace.opcheck import measure_op

    block = with_adapters(real_block(name, spec.dtype, trained=False), rank=4)
    return measure_op(block, spec, autocast=autocast)


def compare(
    golden: Golden,
    name: str,
    *,
    trained: bool,
    dtype: str = "bfloat16",
    autocast: str | None = None,
) -> None:
    spec = Spec((*TOKENS, 256), dtype, requires_grad=True)
    seen = golden.op(lambda: real(name, spec, trained=trained, autocast=autocast))
    prepare: Callable[[Tape], MoeModule] = lambda tape: tape_block(  # noqa: E731
        name, tape, DTYPES[dtype], trained=trained
    )
    tape = run_on_tape(
        call, spec, autocast=None if autocast is None else DTYPES[autocast], prepare=prepare
    )
    assert_agree(seen, tape)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, trained: bool, golden: Golden) -> None:
    """The block routes, sorts, multiplies by groups and sums back with what the tape's block allocates."""
    compare(golden, name, trained=trained)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "ernie4_5_moe", "gpt_oss"])
def test_block_under_autocast(name: str, trained: bool, golden: Golden) -> None:
    """Autocast lowers the router and the shared experts; grouped products stay in the type of their weights."""
    compare(golden, name, trained=trained, autocast="bfloat16")


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_adapted_stacks(name: str, autocast: str | None, golden: Golden) -> None:
    """peft spells every adapted stack out whole: once to check it, once to use it."""
    spec = Spec((*TOKENS, 256), "bfloat16", requires_grad=True)
    seen = golden.op(lambda: real_adapted(name, spec, autocast=autocast))
    tape = run_on_tape(
        call,
        spec,
        autocast=None if autocast is None else DTYPES[autocast],
        prepare=lambda tape: tape_with_adapters(
            tape_block(name, tape, DTYPES["bfloat16"], trained=False), tape, rank=4
        ),
    )
    assert_agree(seen, tape)
