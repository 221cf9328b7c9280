"""Counting and listing weights: with a pencil, and the order that optimizers see."""

from __future__ import annotations

from tests.model.catalogue import configurations
from wazn.model.config import read_config
from wazn.model.linears import attention_linears, layer_linears, quantized_linears
from wazn.model.parameters import (
    Group,
    count_layer_parameters,
    count_parameters,
    layer_parameters,
    outer_parameters,
    parameters,
)
from wazn.model.spec import ModelSpec


def _spec(name: str) -> ModelSpec:
    return read_config(configurations()[name], id=name, path=f"{name}.json")


def test_llama_2_7b_with_a_pencil() -> None:
    """32 layers of 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096, two tables of 32000 x 4096, one norm: 6,738,415,616."""
    spec = _spec("meta-llama--Llama-2-7b-hf")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    assert count_layer_parameters(spec.layers[0]) == layer == 202_383_360
    assert count_parameters(spec) == 32 * layer + 2 * 32000 * 4096 + 4096 == 6_738_415_616


def test_gpt2_with_a_pencil() -> None:
    """12 layers of 12 x 768^2 + 13 x 768, tables of 50257 and 1024 rows, one norm, a tied head: 124,439,808."""
    layer = 12 * 768 * 768 + 13 * 768
    total = 12 * layer + (50257 + 1024) * 768 + 2 * 768
    assert count_parameters(_spec("openai-community--gpt2")) == total == 124_439_808


def test_mixtral_with_a_pencil() -> None:
    """8 experts of 3 x 4096 x 14336 and a router of 8 x 4096 in each of 32 layers: 46,702,792,704 in all."""
    spec = _spec("mistralai--Mixtral-8x7B-v0.1")
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
    layer = attention + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert count_layer_parameters(spec.layers[0]) == layer
    assert count_parameters(spec) == 32 * layer + 2 * 32000 * 4096 + 4096 == 46_702_792_704


def test_order_is_that_of_creation() -> None:
    """GPT-2 makes its norms before the branches that they serve, Llama after them; OPT makes keys before queries."""
    first = [p.name for p in layer_parameters(_spec("openai-community--gpt2").layers[0])]
    assert first[:3] == ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight"]
    llama = [p.name for p in layer_parameters(_spec("meta-llama--Llama-3.1-8B").layers[0])]
    assert llama[-2:] == ["input_layernorm.weight", "post_attention_layernorm.weight"]
    opt = [p.name for p in layer_parameters(_spec("facebook--opt-125m").layers[0])]
    assert [name.split(".")[1] for name in opt[:8:2]] == ["k_proj", "v_proj", "q_proj", "out_proj"]


def test_parts_join_to_the_whole() -> None:
    """Before-layers, layers and after-layers are the whole list; OPT's last norm stands before its layers."""
    for name in ("facebook--opt-350m", "facebook--opt-125m", "google--gemma-2-2b"):
        spec = _spec(name)
        outer = outer_parameters(spec)
        whole = list(parameters(spec))
        inside = [p for p in whole if p.layer is not None]
        assert whole == [*outer.before, *inside, *outer.after]
        assert [p.layer for p in inside] == sorted(p.layer or 0 for p in inside)
    names = [p.name for p in outer_parameters(_spec("facebook--opt-125m")).before]
    assert "model.decoder.final_layer_norm.weight" in names


def test_conv1d_is_transposed() -> None:
    """GPT-2's Conv1D keeps [in, out]; every other linear [out, in]."""
    spec = _spec("openai-community--gpt2")
    shapes = {p.name: p.shape for p in layer_parameters(spec.layers[0])}
    assert shapes["attn.c_attn.weight"] == (768, 2304)
    assert shapes["mlp.c_proj.weight"] == (3072, 768)
    neox = {p.name: p.shape for p in layer_parameters(_spec("EleutherAI--pythia-70m").layers[0])}
    assert neox["attention.query_key_value.weight"] == (1536, 512)


def test_tied_head_is_listed_once() -> None:
    """A tied head is the embedding's weight; a bias of the head would remain (GPT-J, untied, has one)."""
    tied = [p.name for p in parameters(_spec("Qwen--Qwen2-0.5B"))]
    assert "lm_head.weight" not in tied
    untied = [p.name for p in parameters(_spec("EleutherAI--gpt-j-6b"))]
    assert untied[-2:] == ["lm_head.weight", "lm_head.bias"]
    mapping = {**configurations()["EleutherAI--gpt-j-6b"], "tie_word_embeddings": True}
    spec = read_config(mapping, id="tied", path="config.json")
    assert [p.name for p in parameters(spec)][-1] == "lm_head.bias"


def test_experts_stacked_or_listed_are_the_same_numbers() -> None:
    """Mixtral's experts are two tensors in transformers 5 and 24 matrices in 4.57, with as many elements."""
    layer = _spec("mistralai--Mixtral-8x7B-v0.1").layers[0]
    stacked = [p for p in layer_parameters(layer) if p.group is Group.EXPERTS]
    listed = [p for p in layer_parameters(layer, fused_experts=False) if p.group is Group.EXPERTS]
    assert {p.name: p.shape for p in stacked} == {
        "mlp.experts.gate_up_proj": (8, 28672, 4096),
        "mlp.experts.down_proj": (8, 4096, 14336),
    }
    assert len(listed) == 24
    assert listed[0].name == "block_sparse_moe.experts.0.w1.weight"
    assert sum(p.num_elements for p in listed) == sum(p.num_elements for p in stacked)


def test_gpt_oss_has_transposed_experts_with_biases_and_sinks() -> None:
    """gpt-oss keeps [experts, in, out], a bias per expert, and one sink per head, first in its attention."""
    layer = _spec("openai--gpt-oss-20b").layers[0]
    shapes = {p.name: p.shape for p in layer_parameters(layer)}
    assert next(iter(shapes)) == "self_attn.sinks"
    assert shapes["self_attn.sinks"] == (64,)
    assert shapes["mlp.experts.gate_up_proj"] == (32, 2880, 5760)
    assert shapes["mlp.experts.gate_up_proj_bias"] == (32, 5760)
    assert layer_parameters(layer) == layer_parameters(layer, fused_experts=False)


def test_norms_with_a_row_per_head() -> None:
    """Command R+ norms queries with a weight [96, 128]; StableLM 2 12B has a list of norms, one per head."""
    plus = {
        p.name: p.shape
        for p in layer_parameters(_spec("CohereForAI--c4ai-command-r-plus").layers[0])
    }
    assert plus["self_attn.q_norm.weight"] == (96, 128)
    mapping = {"model_type": "stablelm", "qk_layernorm": True, "num_key_value_heads": 8}
    names = [
        p.name
        for p in layer_parameters(read_config(mapping, id="x", path="config.json").layers[0])
        if "layernorm.norms" in p.name
    ]
    assert len(names) == 32 + 8
    assert names[32] == "self_attn.k_layernorm.norms.0.weight"


def test_groups_cover_every_kind() -> None:
    """Each weight belongs to one group: Qwen 1.5's experts, router, shared expert and norms are told apart."""
    spec = _spec("Qwen--Qwen1.5-MoE-A2.7B")
    groups = {p.name: p.group for p in layer_parameters(spec.layers[0])}
    assert groups["mlp.gate.weight"] is Group.ROUTER
    assert groups["mlp.experts.down_proj"] is Group.EXPERTS
    assert groups["mlp.shared_expert.up_proj.weight"] is Group.MLP
    assert groups["self_attn.q_proj.bias"] is Group.ATTENTION
    assert groups["input_layernorm.weight"] is Group.NORM
    assert {p.group for p in parameters(_spec("openai-community--gpt2"))} >= {
        Group.EMBEDDING,
        Group.POSITION,
    }


def test_linears_of_a_layer() -> None:
    """transformers 5 has 7 linears in a Mixtral layer of which none is an expert's; 4.57 has 4 + 1 + 24."""
    layer = _spec("mistralai--Mixtral-8x7B-v0.1").layers[0]
    assert [linear.name for linear in layer_linears(layer)] == [
        f"self_attn.{letter}_proj" for letter in "qkvo"
    ]
    assert len(layer_linears(layer, fused_experts=False)) == 4 + 1 + 24
    assert len(attention_linears(_spec("deepseek-ai--DeepSeek-V3").layers[0])) == 5


def test_stacked_experts_stay_in_16_bits() -> None:
    """bitsandbytes reaches 1.34 of Mixtral's 46.7 billion parameters under transformers 5, and 46.4 under 4.57."""
    spec = _spec("mistralai--Mixtral-8x7B-v0.1")
    for fused, expected in ((True, 32 * 41_943_040), (False, 32 * (41_943_040 + 1_409_318_912))):
        found = quantized_linears(spec, fused_experts=fused)
        assert found.outer == ()
        assert sum(linear.num_parameters for layer in found.layers for linear in layer) == expected
