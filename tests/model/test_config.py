"""Reading a config.json: what is refused, and how it is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.model.catalogue import configurations
from wazn.errors import InputError, Unsupported
from wazn.model.config import (
    LARGEST_FILE_BYTES,
    parse_config,
    read_config,
    supported_families,
)
from wazn.model.spec import (
    Activation,
    AttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def _read(mapping: dict[str, Any]) -> ModelSpec:
    return read_config(mapping, id="model", path="config.json")


def _attention(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec)
    return attention


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty; expected a JSON object"),
        (b"  \n", "the file is empty; expected a JSON object"),
        (b'{"hidden_size": 40', "not valid JSON: "),
        (b'{"a": 1,}', "not valid JSON: "),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b" " * 50_000_000, "a config.json of 50000000 bytes is too large; the limit is 2097152"),
        (b"[1, 2]", "expected a JSON object, found a list"),
        (b"null", "expected a JSON object, found null"),
        (b'"llama"', "expected a JSON object, found a string"),
        (b"7", "expected a JSON object, found a number"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 text (byte 0)"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key `c` stands twice in one object"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "holds a number that is too long to read"),
    ],
)
def test_what_is_no_config_is_refused_with_its_path(data: bytes, said: str) -> None:
    """Bytes that are no JSON object of a sane size give one `InputError` that names the file and the reason."""
    with pytest.raises(InputError) as refusal:
        parse_config(data, path="some/config.json")
    assert refusal.value.message.startswith(f"some/config.json: {said}")


def test_largest_file_is_read() -> None:
    """A file of exactly the limit is read, with a byte order mark too."""
    text = json.dumps(LLAMA).encode("utf-8-sig")
    padded = text + b" " * (LARGEST_FILE_BYTES - len(text))
    assert parse_config(padded, path="config.json") == LLAMA


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", "abc", 'must be a positive integer, found "abc"'),
        ("num_hidden_layers", 10**9, "must be at most 512, found 1000000000"),
        ("hidden_size", True, "must be a positive integer, found true"),
        ("hidden_size", 4096.0, "must be a positive integer, found 4096.0"),
        ("hidden_size", None, "must be a positive integer, found nothing"),
        ("hidden_size", 0, "must be a positive integer, found 0"),
        ("hidden_size", float("nan"), "must be a positive integer, found nan"),
        ("hidden_size", float("inf"), "must be a positive integer, found inf"),
        ("vocab_size", -32000, "must be a positive integer, found -32000"),
        ("vocab_size", 10**18, "must be at most 100000000, found 1000000000000000000"),
        ("vocab_size", 10**60, "must be at most 100000000, found a number of more than 38 digits"),
        ("intermediate_size", [11008], "must be a positive integer, found a list of 1"),
        ("num_attention_heads", {"a": 1}, "must be a positive integer, found an object of 1"),
        ("attention_dropout", 1.5, "must be a number from 0 to 1, found 1.5"),
        ("attention_dropout", float("nan"), "must be a number from 0 to 1, found nan"),
        ("attention_bias", "yes", 'must be true or false, found "yes"'),
        ("tie_word_embeddings", 1, "must be true or false, found 1"),
        ("torch_dtype", 16, "must be a string, found 16"),
        ("hidden_act", "sillu", "must be one of gelu, gelu_fast, gelu_new,"),
        ("quantization_config", [], "must be an object, found a list of 0"),
    ],
)
def test_wrong_value_is_named(key: str, value: object, said: str) -> None:
    """A value of the wrong kind or size gives the file, the key, the rule and what was found."""
    with pytest.raises(InputError) as refusal:
        _read({**LLAMA, key: value})
    assert refusal.value.message.startswith(f"config.json: `{key}` {said}")


def test_long_text_is_cut_in_the_message() -> None:
    """Of a value of a megabyte the message shows the first forty characters."""
    with pytest.raises(InputError) as refusal:
        _read({**LLAMA, "hidden_size": "x" * 1_000_000})
    assert refusal.value.message == (
        f'config.json: `hidden_size` must be a positive integer, found "{"x" * 40}"'
    )


def test_all_faults_come_at_once() -> None:
    """Every faulty key of a file is reported in one error, a line each; what follows from a faulty key is not."""
    with pytest.raises(InputError) as refusal:
        _read({**LLAMA, "hidden_size": "big", "num_hidden_layers": -1, "num_key_value_heads": 5})
    assert refusal.value.message.splitlines() == [
        'config.json: `hidden_size` must be a positive integer, found "big"',
        "config.json: `num_attention_heads` (32) must be a multiple of `num_key_value_heads` (5)",
        "config.json: `num_hidden_layers` must be a positive integer, found -1",
    ]


def test_message_uses_the_spelling_of_the_file() -> None:
    """GPT-2 writes `n_embd`, and so does the message."""
    with pytest.raises(InputError, match=r"`n_embd` must be a positive integer, found -1"):
        _read({"model_type": "gpt2", "n_embd": -1})
    with pytest.raises(InputError, match=r"`n_embd` \(770\) must be a multiple of `n_head` \(12\)"):
        _read({"model_type": "gpt2", "n_embd": 770, "n_head": 12})


def test_nested_key_is_named_with_its_object() -> None:
    """A fault inside an object of the file names the way to it."""
    with pytest.raises(InputError, match=r"^config\.json: `attn_config\.attn_pdrop` must be"):
        _read({"model_type": "mpt", "attn_config": {"attn_pdrop": "none"}})


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (
            {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": ["full", "full"]},
            "`layer_types[0]` must be one of 'sliding_attention', 'full_attention', found \"full\"",
        ),
        (
            {"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": ["full_attention"]},
            "`layer_types` must be a list of 3, one per layer, found a list of 1",
        ),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
            '`attention_types` must be groups such as [[["global", "local"], 12]]',
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "`num_experts_per_tok` (9) must be at most `num_experts` (8)",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": "none"},
            "`mlp_only_layers` must be a list of layer numbers",
        ),
        (
            {"model_type": "phi", "partial_rotary_factor": 0},
            "`partial_rotary_factor` must be above 0 and at most 1, found 0.0",
        ),
    ],
)
def test_faults_between_keys(mapping: dict[str, Any], said: str) -> None:
    """What does not fit together is refused: lists per layer, experts, parts of a head."""
    with pytest.raises(InputError) as refusal:
        _read(mapping)
    assert refusal.value.message.startswith(f"config.json: {said}")


def test_absurd_product_is_refused() -> None:
    """Sizes that are possible one by one and make more than 10^15 parameters together are refused."""
    with pytest.raises(InputError, match=r"these sizes make \d+ parameters; the limit is 10{15}"):
        _read({**LLAMA, "hidden_size": 10**8, "num_attention_heads": 10**4, "vocab_size": 10**8})


@pytest.mark.parametrize("family", [None, 7, "", ["llama"]])
def test_family_must_be_named(family: object) -> None:
    """Without a `model_type` that is a word, nothing can be read."""
    with pytest.raises(InputError, match="`model_type` must name the family"):
        _read({**LLAMA, "model_type": family})


@pytest.mark.parametrize(
    ("mapping", "nearest"),
    [
        ({"model_type": "gemma3", "vision_config": {}}, "gemma3_text"),
        ({"model_type": "qwen3_next"}, "qwen3_moe"),
        ({"model_type": "some_vlm", "text_config": {"model_type": "qwen2"}}, "qwen2"),
        ({"model_type": "lama"}, "llama"),
        ({"model_type": "new_thing", "kv_lora_rank": 512}, "deepseek_v3"),
        ({"model_type": "new_thing", "num_local_experts": 8}, "qwen3_moe"),
        ({"model_type": "new_thing"}, "llama"),
    ],
)
def test_unknown_family_names_the_nearest(mapping: dict[str, Any], nearest: str) -> None:
    """A family that wazn does not read is `Unsupported`, with the one that is most alike."""
    with pytest.raises(Unsupported) as refusal:
        _read(mapping)
    assert refusal.value.hint is not None
    assert f"`{nearest}`" in refusal.value.hint
    assert nearest in supported_families()


def test_equal_layers_are_one_object() -> None:
    """The 126 layers of Llama 3.1 405B are one `LayerSpec`; the 26 of Gemma 3 1B are two: every sixth is wide."""
    assert len(set(map(id, _read(configurations()["meta-llama--Llama-3.1-405B"]).layers))) == 1
    layers = _read(configurations()["google--gemma-3-1b-it"]).layers
    assert len(layers) == 26
    assert len(set(map(id, layers))) == 2
    windows = [layer.attention.window for layer in layers if hasattr(layer.attention, "window")]
    assert [index for index, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
    assert set(windows) == {512, None}


def test_unknown_keys_are_ignored() -> None:
    """A key that the family's code never reads changes nothing, as in transformers."""
    assert _read({**LLAMA, "use_bias_everywhere": "certainly"}) == _read(LLAMA)


@pytest.mark.parametrize(
    ("name", "norm", "layout", "rotary", "rotary_dim", "activation"),
    [
        ("meta-llama--Llama-3.1-8B", "rms", "pre", "half", None, "silu"),
        ("google--gemma-2-9b", "rms-gemma", "sandwich", "half", None, "gelu_pytorch_tanh"),
        ("microsoft--phi-2", "layer", "parallel", "half", 32, "gelu_new"),
        ("EleutherAI--pythia-70m", "layer", "parallel-two-norms", "half", 16, "gelu"),
        ("EleutherAI--gpt-j-6b", "layer", "parallel", "interleaved", 64, "gelu_new"),
        ("openai-community--gpt2", "layer", "pre", "none", None, "gelu_new"),
        ("bigscience--bloom-560m", "layer", "pre", "none", None, "gelu_bloom"),
        ("facebook--opt-350m", "layer", "post-layer", "none", None, "relu"),
        ("facebook--opt-125m", "layer", "pre", "none", None, "relu"),
        ("tiiuae--falcon-7b", "layer", "parallel", "half", None, "gelu"),
        ("tiiuae--falcon-40b", "layer", "parallel-two-norms", "half", None, "gelu"),
        ("allenai--OLMo-1B-hf", "layer-fp32", "pre", "half", None, "silu"),
        ("allenai--OLMo-2-0425-1B", "rms-cast-last", "post", "half", None, "silu"),
        ("CohereForAI--aya-23-8B", "layer-cohere", "parallel", "interleaved", None, "silu"),
        ("zai-org--GLM-4-9B-0414", "rms", "sandwich", "interleaved", 64, "silu"),
        ("nvidia--Nemotron-Mini-4B-Instruct", "layer-1p", "pre", "half", 64, "relu2"),
        ("stabilityai--stablelm-3b-4e1t", "layer", "pre", "half", 20, "silu"),
        ("openai--gpt-oss-20b", "rms-cast-last", "pre", "half", None, None),
    ],
)
def test_which_code_runs(
    name: str,
    norm: str,
    layout: str,
    rotary: str,
    rotary_dim: int | None,
    activation: str | None,
) -> None:
    """Norm, residuals, rotary and activation are those of the family's `modeling_*.py` in transformers 5.24."""
    spec = _read(configurations()[name])
    layer, attention = spec.layers[0], _attention(spec)
    assert layer.norms[0].kind is NormKind(norm)
    assert layer.layout is ResidualLayout(layout)
    assert (attention.rotary, attention.rotary_dim) == (RotaryKind(rotary), rotary_dim)
    if activation is not None:
        assert hasattr(layer.mlp, "activation")
        assert layer.mlp.activation is Activation(activation)


def test_dropouts() -> None:
    """GPT-2's class has dropout 0.1 in three places, and so has a config that does not mention it; OPT's has two."""
    spec = _read({"model_type": "gpt2"})
    layer, attention = spec.layers[0], _attention(spec)
    assert hasattr(layer.mlp, "dropout")
    assert (attention.dropout, attention.output_dropout, layer.mlp.dropout) == (0.1, 0.1, 0.1)
    assert spec.embedding_dropout == 0.1
    opt = _read({"model_type": "opt"})
    assert (_attention(opt).dropout, opt.layers[0].residual_dropout) == (0.0, 0.1)
    assert _attention(_read({**LLAMA, "attention_dropout": 0.1})).dropout == 0.1


def test_softcaps_scales_and_sinks() -> None:
    """Gemma 2 caps scores at 50 and logits at 30; Granite and Cohere scale; gpt-oss has sinks and a window of 128."""
    gemma2 = _read(configurations()["google--gemma-2-9b"])
    assert (_attention(gemma2).softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert gemma2.embedding_scaled
    granite = _read(configurations()["ibm-granite--granite-3.1-8b-instruct"])
    assert (granite.embedding_scaled, granite.logits_scaled) == (True, True)
    assert granite.layers[0].residual_multiplier
    assert _read(configurations()["CohereForAI--aya-23-8B"]).logits_scaled
    oss = _read(configurations()["openai--gpt-oss-20b"])
    assert [(a.sinks, a.window) for a in (_attention(oss, 0), _attention(oss, 1))] == [
        (True, 128),
        (True, None),
    ]


def test_sliding_windows_need_the_switch_in_qwen() -> None:
    """Qwen's `sliding_window` counts only with `use_sliding_window`, and then from layer `max_window_layers` on."""
    qwen = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 1024}
    assert [_attention(_read(qwen), i).window for i in range(4)] == [None] * 4
    on = {**qwen, "use_sliding_window": True, "max_window_layers": 3}
    assert [_attention(_read(on), i).window for i in range(4)] == [None, None, None, 1024]
    assert _attention(_read({"model_type": "mistral"})).window == 4096  # the class's default
    assert _attention(_read({"model_type": "mistral", "sliding_window": None})).window is None


def test_heads_need_not_divide_the_hidden_size() -> None:
    """Mistral Nemo's heads are 128 wide and make 4096 of a hidden size of 5120; Gemma's 256."""
    nemo = _attention(_read(configurations()["mistralai--Mistral-Nemo-Instruct-2407"]))
    assert (nemo.head_dim, nemo.projections[0].out_features, nemo.output.out_features) == (
        128,
        4096,
        5120,
    )
    assert _attention(_read(configurations()["google--gemma-2-9b"])).head_dim == 256


def test_latent_attention() -> None:
    """DeepSeek V2 Lite has no low-rank queries, V2 has; keys and values come from a latent of 512."""
    lite = _read(configurations()["deepseek-ai--DeepSeek-V2-Lite"]).layers[0].attention
    full = _read(configurations()["deepseek-ai--DeepSeek-V2"]).layers[0].attention
    assert isinstance(lite, LatentAttentionSpec)
    assert isinstance(full, LatentAttentionSpec)
    assert (lite.q is None, lite.q_a is None) == (False, True)
    assert (full.q is None, full.q_a is None) == (True, False)
    assert lite.kv_a.out_features == 512 + 64


def test_rotary_factor_where_the_file_has_it() -> None:
    """The part of a head that rotates stands at the top level, or in `rope_parameters` since transformers 5."""
    phi = {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32}
    assert _attention(_read(phi)).rotary_dim == 40  # half of 80: the class's default
    assert _attention(_read({**phi, "partial_rotary_factor": 0.4})).rotary_dim == 32
    new = {**phi, "rope_parameters": {"partial_rotary_factor": 0.4, "rope_theta": 1e4}}
    assert _attention(_read(new)).rotary_dim == 32
    neox = {"model_type": "gpt_neox", "rotary_pct": 1.0}
    assert _attention(_read(neox)).rotary_dim == 96


def test_stored_quantization_is_kept() -> None:
    """A checkpoint that is stored quantized says so in `quantization_config`; its dtype stands beside it."""
    spec = _read(
        {**LLAMA, "quantization_config": {"quant_method": "awq"}, "torch_dtype": "float16"}
    )
    assert (spec.checkpoint_quantization, spec.checkpoint_dtype) == ("awq", "float16")
