"""Against the installed transformers, peft and bitsandbytes themselves, on `meta`: a sample that changes every day."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import transformers

from tests.model.catalogue import LORA_LAYERS, configurations, golden, lora_cases
from tests.model.cut import cut
from tests.model.real import build, count, fingerprint, trained, weights
from tests.sampling import DAY, is_due
from wazn.model.config import read_config, supported_families
from wazn.model.linears import quantized_linears
from wazn.model.lora import adapted
from wazn.model.parameters import parameters
from wazn.model.spec import ModelSpec
from wazn.model.trainable import trainable_parameters

pytestmark = [
    pytest.mark.skipif(
        not transformers.__version__.startswith("5.24."),
        reason="the stored comparison is with transformers 5.24",
    ),
    # transformers and peft warn about each other's plans; that is theirs
    pytest.mark.filterwarnings("ignore"),
]
SEEN = golden("5.24")["models"]
SAMPLE = [name for name in sorted(SEEN) if is_due(name)]
# One per kind of module that bitsandbytes treats in its own way.
QUANTIZED = (
    "TinyLlama--TinyLlama-1.1B-Chat-v1.0",
    "openai-community--gpt2",
    "tiiuae--falcon-7b",
    "allenai--OLMo-1B-hf",
    "facebook--opt-350m",
    "mistralai--Mixtral-8x7B-v0.1",
    "Qwen--Qwen1.5-MoE-A2.7B",
    "microsoft--Phi-mini-MoE-instruct",
    "openai--gpt-oss-20b",
    "deepseek-ai--DeepSeek-V2-Lite",
    "EleutherAI--gpt-j-6b",
    "bigscience--bloom-560m",
)
# What the class itself cannot do without: its model fails on the default None, or on a head size that is not whole.
WITHOUT_DEFAULT = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}


def _spec(mapping: dict[str, Any]) -> ModelSpec:
    return read_config(mapping, id="model", path="config.json")


@pytest.mark.parametrize("name", SAMPLE)
def test_stored_comparison_still_holds(name: str) -> None:
    """What is stored about today's sample is what the installed libraries make of it now."""
    mapping = configurations()[name]
    shapes, seen = weights(build(mapping)), SEEN[name]
    assert (count(shapes), len(shapes), fingerprint(shapes)) == (
        seen["total"],
        seen["tensors"],
        seen["weights"],
    )
    short = cut(mapping, LORA_LAYERS)
    label, case = random.Random(DAY + name).choice(sorted(lora_cases(short).items()))
    made = trained(short, **case.peft)
    assert [count(made), fingerprint(made)] == seen["lora"][label]


@pytest.mark.parametrize("family", supported_families())
def test_defaults_are_those_of_the_class(family: str) -> None:
    """A config.json that names only its family is read as the configuration class fills it in."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("its class lies beside the weights on the hub")
    mapping: dict[str, Any] = {"model_type": family, **WITHOUT_DEFAULT.get(family, {})}
    model = build(mapping)
    spec = _spec(mapping)
    assert [(p.name, p.shape) for p in parameters(spec)] == weights(model)
    config = model.config
    positions = "max_seq_len" if family == "mpt" else "max_position_embeddings"
    assert spec.max_positions == getattr(config, positions, None)
    assert spec.tied == config.tie_word_embeddings


# Switches and counts that change which weights there are, wherever a family's class knows them.
SWITCHES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias", "bias"),
            *("use_qkv_bias", "qk_layernorm", "use_qk_norm", "use_parallel_residual", "alibi"),
            *("multi_query", "do_layer_norm_before", "enable_bias", "lm_head_bias"),
            *("layer_norm_elementwise_affine", "_remove_final_layer_norm", "tie_word_embeddings"),
        ),
        (False, True),
    ),
    "word_embed_proj_dim": (24, None),
    "q_lora_rank": (None, 12),
    "first_k_dense_replace": (0, 1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0]),
    "moe_layer_interval": (1, 2),
    "n_shared_experts": (1, 2),
    "shared_expert_intermediate_size": (20, 40),
}


@pytest.mark.parametrize("family", supported_families())
def test_switches(family: str) -> None:
    """With its switches thrown at random (other ones every day), a small model has the weights that its class makes."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("its class lies beside the weights on the hub")
    chance = random.Random(DAY + family)
    heads = chance.choice((2, 4))
    known = vars(transformers.CONFIG_MAPPING[family]()).keys()
    sizes = {
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
        "vocab_size": 50,
        "head_dim": 16,
        "n_inner": 24,
        "ffn_dim": 24,
        "ffn_hidden_size": 24,
        "num_kv_heads": heads,
        "n_head": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "n_embd": 16 * heads,
        "n_layer": 3,
        "d_model": 16 * heads,
        "n_layers": 3,
        "n_heads": heads,
        "num_heads": heads,
        "num_layers": 3,
    }
    if family in ("falcon", "cohere2"):
        del sizes["head_dim"]  # a property of the class
    mapping: dict[str, Any] = {key: value for key, value in sizes.items() if key in known}
    mapping |= {"model_type": family, "pad_token_id": None, "attention_types": [[["global"], 3]]}
    mapping |= {key: chance.choice(found) for key, found in SWITCHES.items() if key in known}
    if family == "internlm3":
        mapping["mlp_bias"] = mapping["attention_bias"]
    if family != "gpt_neo":
        del mapping["attention_types"]
    expected = weights(build(mapping))
    assert [(p.name, p.shape) for p in parameters(_spec(mapping))] == expected


@pytest.mark.parametrize(
    "pattern", [r".*\.(q|v)_proj", r"model\.layers\.[02]\.self_attn\.o_proj", r".*(down|gate)_proj"]
)
@pytest.mark.parametrize(
    "name", ["TinyLlama--TinyLlama-1.1B-Chat-v1.0", "Qwen--Qwen3-30B-A3B", "openai--gpt-oss-20b"]
)
def test_patterns_match_as_in_peft(name: str, pattern: str) -> None:
    """A regular expression adapts the modules that peft adapts, or is refused where peft refuses it."""
    short = cut(configurations()[name], LORA_LAYERS)
    spec = _spec(short)
    try:
        real = trained(short, rank=8, target_modules=pattern)
    except ValueError:
        with pytest.raises(Exception, match=r"cannot be adapted without|match no linear"):
            adapted(spec, pattern)
        return
    mine = trainable_parameters(spec, adapted(spec, pattern), rank=8)
    assert [(p.name, p.shape) for p in mine] == real


@pytest.mark.parametrize("name", QUANTIZED)
def test_bitsandbytes_replaces_these_linears(name: str) -> None:
    """`quantized_linears` are what transformers turns into Linear4bit: not the head, not stacked experts."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    short = cut(configurations()[name], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(short)
        config = transformers.BitsAndBytesConfig(load_in_4bit=True)
        keep = get_keys_to_not_convert(model)
        replace_with_bnb_linear(model, keep, quantization_config=config)
    replaced = {n for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    spec = _spec(short)
    found = quantized_linears(spec)
    mine = {linear.name for linear in found.outer}
    for index, layer in enumerate(found.layers):
        mine |= {spec.layer_prefix.format(index) + linear.name for linear in layer}
    assert mine == replaced


def test_meta_costs_nothing() -> None:
    """The comparison allocates no weights: every parameter is on `meta`."""
    model = build(cut(configurations()["openai-community--gpt2"], 1))
    assert {weight.device for weight in model.parameters()} == {torch.device("meta")}
