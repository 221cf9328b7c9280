"""Against the installed transformers, peft and bitsandbytes themselves, on `meta`: a sample that changes every day."""

from __future__ import annotations

import datetime
import random
import warnings
from typing import Any

import pytest
import torch
import transformers

from tests.model.catalogue import LORA_LAYERS, configurations, golden, lora_cases
from tests.model.cut import cut
from tests.model.real import build, count, fingerprint, trained, weights
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
TODAY = random.Random(datetime.date.today().toordinal())
SAMPLE = sorted(TODAY.sample(sorted(SEEN), 4))
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
    label, case = TODAY.choice(sorted(lora_cases(short).items()))
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
