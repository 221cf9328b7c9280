"""Llama and what is built like it: one norm before each branch, gated or plain feed-forward, rotary embedding.

Class defaults and code: transformers 5.24, `models/<family>/configuration_<family>.py` and `modeling_<family>.py`.
EXAONE 3 and InternLM 3 have configurations of their own and run Llama's code there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
    gated_mlp,
    layer_windows,
    layers_of_kinds,
    norms,
    plain_mlp,
    rotary_dim,
    separate_attention,
    sizes,
)
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_ORDER = ("self_attn", "mlp", *LLAMA_NORMS)

ALIASES: dict[str, Mapping[str, str]] = {
    "exaone": {"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
    "internlm3": {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
}

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "smollm3": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    "granite": {
        **_LLAMA,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    "ernie4_5": {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_dense": {**_LLAMA, "vocab_size": 290943},
    "exaone": {
        **_LLAMA,
        "vocab_size": 102400,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "internlm3": {
        **_LLAMA,
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "seed_oss": {
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "arcee": {
        **_LLAMA,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
    },
    "jais2": {
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_hidden_layers": 32,
        "num_attention_heads": 26,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "helium": {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
    },
    "nemotron": {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
    },
    "starcoder2": {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
    },
}


def pre_norm_layer(
    s: Sizes,
    *,
    attention: AttentionSpec | LatentAttentionSpec,
    mlp: MlpSpec | MoeSpec,
    kind: NormKind = NormKind.RMS,
    bias: bool = False,
    weight: bool = True,
    order: tuple[str, ...] = LLAMA_ORDER,
    **rest: Any,
) -> LayerSpec:
    """x += attention(norm x); x += mlp(norm x), with the names of Llama."""
    return LayerSpec(
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.PRE,
        norms=norms(LLAMA_NORMS, s.hidden, kind, bias=bias, weight=weight),
        registration=order,
        **rest,
    )


def uniform(
    c: Fields, s: Sizes, layer: LayerSpec, *, kind: NormKind = NormKind.RMS, **rest: Any
) -> ModelSpec:
    """A model of equal layers whose heads rotate whole."""
    rest.setdefault("rotary_dim", s.head_dim)
    return decoder(c, s, layers=(layer,) * s.layers, norm_kind=kind, **rest)


def llama_attention(c: Fields, s: Sizes, **rest: Any) -> AttentionSpec:
    """Separate projections with the keys `attention_bias` and `attention_dropout`."""
    return separate_attention(
        s, bias=c.flag("attention_bias"), dropout=c.probability("attention_dropout"), **rest
    )


def llama_mlp(c: Fields, s: Sizes, *, bias: bool = False) -> MlpSpec:
    """Gate, up and down."""
    return gated_mlp(s.hidden, s.intermediate, c.activation(), bias=bias)


def up_down(c: Fields, s: Sizes, *, bias: bool) -> MlpSpec:
    """Up and down, named as in Llama."""
    return plain_mlp(
        s.hidden,
        s.intermediate,
        c.activation(),
        up="mlp.up_proj",
        down="mlp.down_proj",
        bias=bias,
    )


def qk_norms(size: int, kind: NormKind, *, bias: bool = False) -> dict[str, Any]:
    """Norms of queries and keys with the usual names."""
    q, k = norms(("self_attn.q_norm", "self_attn.k_norm"), size, kind, bias=bias)
    return {"q_norm": q, "k_norm": k}


def llama(c: Fields) -> ModelSpec:
    """Llama 1 to 3.3 and every checkpoint published as `llama`."""
    s = sizes(c)
    layer = pre_norm_layer(
        s, attention=llama_attention(c, s), mlp=llama_mlp(c, s, bias=c.flag("mlp_bias"))
    )
    return uniform(c, s, layer)


def mistral(c: Fields) -> ModelSpec:
    """Mistral 7B to Large: every layer slides where the config has a window."""
    s = sizes(c)
    attention = separate_attention(
        s, dropout=c.probability("attention_dropout"), window=c.optional_count("sliding_window")
    )
    return uniform(c, s, pre_norm_layer(s, attention=attention, mlp=llama_mlp(c, s)))


def ministral(c: Fields) -> ModelSpec:
    """Ministral: `layer_types` says which layers slide; all do where it is missing."""
    s = sizes(c)
    mlp, dropout = llama_mlp(c, s), c.probability("attention_dropout")
    windows = layer_windows(
        c, window=c.optional_count("sliding_window"), pattern=lambda _: True, num_layers=s.layers
    )

    def layer(window: int | None) -> LayerSpec:
        attention = separate_attention(s, dropout=dropout, window=window)
        return pre_norm_layer(s, attention=attention, mlp=mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(windows, layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def qwen_windows(c: Fields, s: Sizes) -> tuple[int | None, ...]:
    """Return each layer's window: with `use_sliding_window`, from layer `max_window_layers` on."""
    window = c.optional_count("sliding_window", least=0) if c.flag("use_sliding_window") else None
    first = c.count("max_window_layers", least=0)
    return layer_windows(
        c, window=window, pattern=lambda index: index >= first, num_layers=s.layers
    )


def _qwen(c: Fields, s: Sizes, **attention: Any) -> ModelSpec:
    mlp = llama_mlp(c, s)

    def layer(window: int | None) -> LayerSpec:
        return pre_norm_layer(
            s, attention=separate_attention(s, window=window, **attention), mlp=mlp
        )

    return decoder(
        c,
        s,
        layers=layers_of_kinds(qwen_windows(c, s), layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def qwen2(c: Fields) -> ModelSpec:
    """Qwen 1.5, 2 and 2.5: biases on queries, keys and values."""
    dropout = c.probability("attention_dropout")
    return _qwen(c, sizes(c), bias=True, output_bias=False, dropout=dropout)


def qwen3(c: Fields) -> ModelSpec:
    """Qwen 3: queries and keys normed per head."""
    s = sizes(c)
    bias, dropout = c.flag("attention_bias"), c.probability("attention_dropout")
    normed = qk_norms(s.head_dim, NormKind.RMS)
    return _qwen(c, s, bias=bias, dropout=dropout, norm_each_projection=True, **normed)


def smollm3(c: Fields) -> ModelSpec:
    """SmolLM 3: every fourth layer has no rotary embedding; with a window, those layers slide."""
    s = sizes(c)
    mlp = llama_mlp(c, s, bias=c.flag("mlp_bias"))
    interval = c.count("no_rope_layer_interval")
    rotates = c.per_layer("no_rope_layers", (0, 1), num_layers=s.layers) or [
        int((index + 1) % interval != 0) for index in range(s.layers)
    ]
    window = c.optional_count("sliding_window") if c.flag("use_sliding_window") else None
    windows = layer_windows(
        c, window=window, pattern=lambda index: not rotates[index], num_layers=s.layers
    )
    bias, dropout = c.flag("attention_bias"), c.probability("attention_dropout")

    def layer(kind: tuple[int, int | None]) -> LayerSpec:
        rotary = RotaryKind.HALF if kind[0] else RotaryKind.NONE
        attention = separate_attention(s, bias=bias, dropout=dropout, rotary=rotary, window=kind[1])
        return pre_norm_layer(s, attention=attention, mlp=mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(zip(rotates, windows, strict=True), layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def granite(c: Fields) -> ModelSpec:
    """Granite 3 and 4: embeddings, branches and logits are multiplied by constants, also where those are 1."""
    s = sizes(c)
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        c.number(key)
    layer = pre_norm_layer(
        s,
        attention=llama_attention(c, s),
        mlp=llama_mlp(c, s, bias=c.flag("mlp_bias")),
        residual_multiplier=True,
    )
    return uniform(c, s, layer, embedding_scaled=True, logits_scaled=True)


def ernie4_5(c: Fields) -> ModelSpec:
    """ERNIE 4.5 dense: one switch for all biases, interleaved rotary in fp32."""
    s = sizes(c)
    bias = c.flag("use_bias")
    attention = separate_attention(
        s, bias=bias, rotary=RotaryKind.INTERLEAVED, rotary_code="ernie4_5"
    )
    layer = pre_norm_layer(s, attention=attention, mlp=llama_mlp(c, s, bias=bias))
    return uniform(c, s, layer)


def hunyuan_v1_dense(c: Fields) -> ModelSpec:
    """Hunyuan dense: queries and keys are normed after they have been rotated."""
    s = sizes(c)
    names = ("self_attn.query_layernorm", "self_attn.key_layernorm")
    q, k = norms(names, s.head_dim, NormKind.RMS)
    attention = llama_attention(c, s, q_norm=q, k_norm=k, norm_after_rotary=True)
    return uniform(c, s, pre_norm_layer(s, attention=attention, mlp=llama_mlp(c, s)))


def internlm3(c: Fields) -> ModelSpec:
    """InternLM 3: Llama; its two switches for biases must agree, as Llama's code has one for all of attention."""
    if c.flag("attention_bias") != c.flag("mlp_bias"):
        c.fault("`qkv_bias` must equal `bias`: transformers has no code for the other case")
    return llama(c)


def seed_oss(c: Fields) -> ModelSpec:
    """Seed-OSS: Llama with dropout on both branches."""
    s = sizes(c)
    dropout = c.probability("residual_dropout")
    attention = llama_attention(
        c, s, output_bias=c.flag("attention_out_bias"), output_dropout=dropout
    )
    layer = pre_norm_layer(
        s,
        attention=attention,
        mlp=replace(llama_mlp(c, s, bias=c.flag("mlp_bias")), dropout=dropout),
    )
    return uniform(c, s, layer)


def arcee(c: Fields) -> ModelSpec:
    """Arcee: Llama with a plain feed-forward of squared ReLU."""
    s = sizes(c)
    mlp = up_down(c, s, bias=c.flag("mlp_bias"))
    return uniform(c, s, pre_norm_layer(s, attention=llama_attention(c, s), mlp=mlp))


def jais2(c: Fields) -> ModelSpec:
    """Jais 2: plain feed-forward of squared ReLU, LayerNorm, biases everywhere."""
    s = sizes(c)
    layer = pre_norm_layer(
        s,
        attention=llama_attention(c, s),
        mlp=up_down(c, s, bias=c.flag("mlp_bias")),
        kind=NormKind.LAYER,
        bias=True,
    )
    return uniform(c, s, layer, kind=NormKind.LAYER, norm_bias=True)


def helium(c: Fields) -> ModelSpec:
    """Helium: interleaved rotary, norm weights multiplied in fp32; its output matrix is square by construction."""
    s = sizes(c)
    if s.heads * s.head_dim != s.hidden:
        c.fault(
            "`num_attention_heads` times `head_dim` must be `hidden_size`",
            of=("num_attention_heads", "head_dim", "hidden_size"),
        )
    attention = llama_attention(
        c, s, output_bias=False, rotary=RotaryKind.INTERLEAVED, rotary_code="helium"
    )
    layer = pre_norm_layer(
        s,
        attention=attention,
        mlp=llama_mlp(c, s, bias=c.flag("mlp_bias")),
        kind=NormKind.RMS_FP32,
    )
    return uniform(c, s, layer, kind=NormKind.RMS_FP32)


def nemotron(c: Fields) -> ModelSpec:
    """Nemotron 3 and 4: LayerNorm with weight + 1, squared ReLU, half of each head rotates."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=0.5)
    layer = pre_norm_layer(
        s,
        attention=llama_attention(
            c, s, rotary_dim=rotary, rotary_code="gpt_neox", rotary_concat=True
        ),
        mlp=up_down(c, s, bias=c.flag("mlp_bias")),
        kind=NormKind.LAYER_1P,
        bias=True,
    )
    return uniform(c, s, layer, kind=NormKind.LAYER_1P, norm_bias=True, rotary_dim=rotary)


def starcoder2(c: Fields) -> ModelSpec:
    """StarCoder 2: LayerNorm, one switch for all biases, dropout after each branch, a window for every layer."""
    s = sizes(c)
    bias, dropout = c.flag("use_bias"), c.probability("residual_dropout")
    attention = separate_attention(
        s,
        bias=bias,
        dropout=c.probability("attention_dropout"),
        output_dropout=dropout,
        window=c.optional_count("sliding_window"),
    )
    mlp = plain_mlp(
        s.hidden,
        s.intermediate,
        c.activation(),
        up="mlp.c_fc",
        down="mlp.c_proj",
        bias=bias,
        dropout=dropout,
    )
    layer = pre_norm_layer(s, attention=attention, mlp=mlp, kind=NormKind.LAYER, bias=True)
    return uniform(
        c,
        s,
        layer,
        kind=NormKind.LAYER,
        norm_bias=True,
        embedding_dropout=c.probability("embedding_dropout"),
    )


def stablelm(c: Fields) -> ModelSpec:
    """StableLM: LayerNorm, a quarter of each head rotates; StableLM-2 12B is parallel and norms each head by itself."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=0.25)
    per_head: dict[str, Any] = {}
    if c.flag("qk_layernorm"):
        names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
        q, k = norms(names, s.head_dim, NormKind.LAYER_PER_HEAD, heads=(s.heads, s.kv_heads))
        per_head = {"q_norm": q, "k_norm": k}
    attention = separate_attention(
        s,
        bias=c.flag("use_qkv_bias"),
        output_bias=False,
        dropout=c.probability("attention_dropout"),
        rotary_dim=rotary,
        rotary_code="phi",
        rotary_concat=True,
        views_last=True,
        **per_head,
    )
    parallel = c.flag("use_parallel_residual")
    layer_norms = LLAMA_NORMS[:1] if parallel else LLAMA_NORMS
    layer = LayerSpec(
        attention=attention,
        mlp=gated_mlp(
            s.hidden, s.intermediate, c.activation(), dropout=c.probability("hidden_dropout")
        ),
        layout=ResidualLayout.PARALLEL if parallel else ResidualLayout.PRE,
        code="stablelm",
        norms=norms(layer_norms, s.hidden, NormKind.LAYER, bias=True),
        registration=LLAMA_ORDER,
    )
    return uniform(c, s, layer, kind=NormKind.LAYER, norm_bias=True, rotary_dim=rotary)


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "arcee": arcee,
    "ernie4_5": ernie4_5,
    "exaone": llama,
    "granite": granite,
    "helium": helium,
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "internlm3": internlm3,
    "jais2": jais2,
    "llama": llama,
    "ministral": ministral,
    "mistral": mistral,
    "nemotron": nemotron,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}
