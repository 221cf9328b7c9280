"""Laws of counting that hold for any sizes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from wazn.errors import InputError, WaznError
from wazn.model.config import parse_config, read_config, supported_families
from wazn.model.linears import quantized_linears
from wazn.model.lora import adapted, count_lora_parameters
from wazn.model.parameters import count_parameters, parameters
from wazn.model.trainable import trainable_parameters

# Sizes that every family accepts: heads of 16, keys in as many groups.
SIZES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([2, 4, 8]),
        "layers": st.integers(1, 6),
        "vocab": st.integers(1, 500),
        "inner": st.integers(1, 300),
        "tied": st.booleans(),
    }
)


def _mapping(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    hidden = 16 * sizes["heads"]
    names = {
        "hidden": ("hidden_size", "n_embd", "d_model"),
        "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"),
        "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        "vocab": ("vocab_size", "padded_vocab_size"),
        "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        "tied": ("tie_word_embeddings",),
        "head_dim": ("head_dim", "kv_channels"),
    }
    values = {**sizes, "hidden": hidden, "head_dim": 16}
    mapping: dict[str, Any] = {"model_type": family, "rotary_dim": 8, "num_experts_per_tok": 2}
    for what, keys in names.items():
        mapping |= dict.fromkeys(keys, values[what])
    return mapping


@given(family=st.sampled_from(supported_families()), sizes=SIZES, fused=st.booleans())
@settings(deadline=None, max_examples=150)
def test_list_sums_to_the_count(family: str, sizes: dict[str, Any], fused: bool) -> None:
    """The elements of the listed weights are the counted parameters, and no name comes twice."""
    spec = read_config(_mapping(family, sizes), id="law", path="config.json")
    weights = list(parameters(spec, fused_experts=fused))
    assert sum(p.num_elements for p in weights) == count_parameters(spec)
    assert len({p.name for p in weights}) == len(weights)
    assert {p.layer for p in weights} == {None, *range(sizes["layers"])}


@given(
    family=st.sampled_from(supported_families()),
    sizes=SIZES,
    rank=st.integers(1, 16),
    targets=st.sampled_from(["attention", "all-linear"]),
    fused=st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_adapters_sum_to_the_count(
    family: str, sizes: dict[str, Any], rank: int, targets: str, fused: bool
) -> None:
    """The listed adapters are the counted ones; twice the rank is twice as many."""
    spec = read_config(_mapping(family, sizes), id="law", path="config.json")
    found = adapted(spec, targets, fused_experts=fused)
    listed = trainable_parameters(spec, found, rank=rank, fused_experts=fused)
    total = count_lora_parameters(found, rank=rank)
    assert sum(p.num_elements for p in listed) == total
    assert count_lora_parameters(found, rank=2 * rank) == 2 * total


@given(family=st.sampled_from(supported_families()), sizes=SIZES, fused=st.booleans())
@settings(deadline=None, max_examples=100)
def test_quantized_linears_are_weights_of_the_model(
    family: str, sizes: dict[str, Any], fused: bool
) -> None:
    """Every linear that is quantized is listed among the weights, and the head is not among them."""
    spec = read_config(_mapping(family, sizes), id="law", path="config.json")
    names = {p.name for p in parameters(spec, fused_experts=fused)}
    found = quantized_linears(spec, fused_experts=fused)
    for index, layer in enumerate(found.layers):
        for linear in layer:
            assert spec.layer_prefix.format(index) + f"{linear.name}.weight" in names
    assert spec.head not in found.outer


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim"),
    *("num_key_value_heads", "intermediate_size", "layer_types", "sliding_window", "num_experts"),
    *("attention_types", "rope_parameters", "attn_config", "mlp_only_layers", "hidden_act"),
    *("quantization_config", "partial_rotary_factor", "no_rope_layers", "rotary_dim", "n_group"),
)


@given(
    family=st.sampled_from(supported_families()),
    values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
)
@settings(deadline=None, max_examples=400)
def test_any_values_are_read_or_refused(family: str, values: dict[str, Any]) -> None:
    """Whatever stands under the keys, the answer is a spec or an `InputError`, never another exception."""
    said, total = "config.json: ", 1
    try:
        spec = read_config({"model_type": family, **values}, id="law", path="config.json")
        total = count_parameters(spec)
    except InputError as refusal:
        said = refusal.message
    assert all(line.startswith("config.json: ") for line in said.splitlines())
    assert 0 < total <= 10**15


@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Any bytes give an object or an error of wazn's own."""
    said = "config.json: "
    try:
        assert isinstance(parse_config(data, path="config.json"), dict)
    except WaznError as refusal:
        said = refusal.message
    assert said.startswith("config.json: ")
    assert len(said.splitlines()) == 1
