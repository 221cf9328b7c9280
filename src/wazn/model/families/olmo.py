"""OLMo 1 to 3, EXAONE 4, Cohere's Command, GLM-4. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wazn.model.families.common import (
    FULL,
    SLIDING,
    Sizes,
    decoder,
    fused_gated_mlp,
    layer_windows,
    layers_of_kinds,
    norms,
    rotary_dim,
    separate_attention,
    sizes,
)
from wazn.model.families.llama import (
    LLAMA_NORMS,
    LLAMA_ORDER,
    llama_attention,
    llama_mlp,
    pre_norm_layer,
    qk_norms,
    uniform,
)
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

_OLMO: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
_COHERE: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GLM: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "olmo": _OLMO,
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "sliding_window": 4096},
    "exaone4": {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "cohere": _COHERE,
    "cohere2": {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
    "glm": _GLM,
    "glm4": _GLM,
}

_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_GLM4_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def olmo(c: Fields) -> ModelSpec:
    """OLMo 1: norms without weights, in fp32; some models clip queries, keys and values in place."""
    s = sizes(c)
    attention = llama_attention(
        c, s, clip_qkv=c.optional_number("clip_qkv"), rotary_code="olmo", views_last=True
    )
    layer = pre_norm_layer(
        s, attention=attention, mlp=llama_mlp(c, s), kind=NormKind.LAYER_FP32, weight=False
    )
    return uniform(c, s, layer, kind=NormKind.LAYER_FP32, norm_weight=False)


def post_norm_layer(s: Sizes, attention: AttentionSpec, mlp: MlpSpec, kind: NormKind) -> LayerSpec:
    """x += norm(attention x); x += norm(mlp x)."""
    return LayerSpec(
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.POST,
        norms=norms(_POST_NORMS, s.hidden, kind),
        registration=("self_attn", "mlp", *_POST_NORMS),
    )


def wide_qk_norms(s: Sizes, kind: NormKind) -> dict[str, Any]:
    """Norms over whole projections, before the view to heads."""
    (q,) = norms(("self_attn.q_norm",), s.heads * s.head_dim, kind)
    (k,) = norms(("self_attn.k_norm",), s.kv_heads * s.head_dim, kind)
    return {
        "q_norm": q,
        "k_norm": k,
        "norm_each_projection": True,
        "views_last": True,
    }


def olmo2(c: Fields) -> ModelSpec:
    """OLMo 2: norms after each branch and over whole queries and keys."""
    s = sizes(c)
    kind = NormKind.RMS_CAST_LAST
    attention = llama_attention(c, s, rotary_code="olmo", **wide_qk_norms(s, kind))
    return uniform(c, s, post_norm_layer(s, attention, llama_mlp(c, s), kind), kind=kind)


def olmo3(c: Fields) -> ModelSpec:
    """OLMo 3: OLMo 2 whose layers slide, but every fourth; each kind of layer has its rotary table."""
    s = sizes(c)
    kind, mlp = NormKind.RMS_CAST_LAST, llama_mlp(c, s)
    windows = layer_windows(
        c,
        window=c.optional_count("sliding_window"),
        pattern=lambda index: (index + 1) % 4 != 0,
        num_layers=s.layers,
    )

    def layer(window: int | None) -> LayerSpec:
        attention = llama_attention(
            c, s, rotary_code="olmo", window=window, **wide_qk_norms(s, kind)
        )
        return post_norm_layer(s, attention, mlp, kind)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(windows, layer),
        norm_kind=kind,
        rotary_dim=s.head_dim,
        rotary_tables=2,
    )


def exaone4(c: Fields) -> ModelSpec:
    """EXAONE 4: norms after each branch; where some layers slide, those that do not have no rotary embedding."""
    s = sizes(c)
    mlp, dropout = llama_mlp(c, s), c.probability("attention_dropout")
    window = c.optional_count("sliding_window")
    slides = _exaone_pattern(c, s, window)
    per_head = qk_norms(s.head_dim, NormKind.RMS)

    def layer(sliding: bool) -> LayerSpec:
        rotates = window is None or sliding
        attention = separate_attention(
            s,
            dropout=dropout,
            rotary=RotaryKind.HALF if rotates else RotaryKind.NONE,
            window=window if sliding else None,
            **per_head,
        )
        return post_norm_layer(s, attention, mlp, NormKind.RMS)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(slides, layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def _exaone_pattern(c: Fields, s: Sizes, window: int | None) -> list[bool]:
    """Return which layers slide. The pattern is a count, or a string such as `LLLG` on the hub (L slides)."""
    kinds = c.per_layer("layer_types", (SLIDING, FULL), num_layers=s.layers)
    if kinds is not None:
        return [kind == SLIDING for kind in kinds]
    if window is None:
        return [False] * s.layers
    pattern = c.value("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= {"L", "G"}:
            c.fault("`sliding_window_pattern` must be a count or letters `L` and `G`")
            return [False] * s.layers
        return [pattern[index % len(pattern)] == "L" for index in range(s.layers)]
    every = c.count("sliding_window_pattern")
    return [(index + 1) % every != 0 for index in range(s.layers)]


def _parallel(s: Sizes, attention: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    return LayerSpec(
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.PARALLEL,
        code="cohere",
        norms=norms(("input_layernorm",), s.hidden, NormKind.LAYER_COHERE),
        registration=("self_attn", "mlp", "input_layernorm"),
    )


def cohere(c: Fields) -> ModelSpec:
    """Command R: one norm for both branches, interleaved rotary in fp32; R+ norms queries and keys per head."""
    s = sizes(c)
    per_head: dict[str, Any] = {}
    if c.flag("use_qk_norm"):
        q, k = norms(
            ("self_attn.q_norm", "self_attn.k_norm"),
            s.head_dim,
            NormKind.LAYER_COHERE,
            heads=(s.heads, s.kv_heads),
        )
        per_head = {"q_norm": q, "k_norm": k}
    attention = llama_attention(
        c, s, rotary=RotaryKind.INTERLEAVED, rotary_code="cohere", **per_head
    )
    layer = _parallel(s, attention, llama_mlp(c, s))
    return uniform(c, s, layer, kind=NormKind.LAYER_COHERE, logits_scaled=True)


def cohere2(c: Fields) -> ModelSpec:
    """Command R7B and A: every fourth layer sees everything and has no rotary embedding."""
    s = sizes(c)
    mlp, every = llama_mlp(c, s), c.count("sliding_window_pattern")
    windows = layer_windows(
        c,
        window=c.optional_count("sliding_window"),
        pattern=lambda index: (index + 1) % every != 0,
        num_layers=s.layers,
    )

    def layer(window: int | None) -> LayerSpec:
        rotary = RotaryKind.NONE if window is None else RotaryKind.INTERLEAVED
        attention = llama_attention(c, s, rotary=rotary, rotary_code="cohere", window=window)
        return _parallel(s, attention, mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(windows, layer),
        norm_kind=NormKind.LAYER_COHERE,
        rotary_dim=s.head_dim,
        logits_scaled=True,
    )


def _glm(
    c: Fields, *, names: Sequence[str], layout: ResidualLayout, registration: Sequence[str]
) -> ModelSpec:
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=0.5)
    layer = LayerSpec(
        attention=llama_attention(
            c,
            s,
            output_bias=False,
            rotary=RotaryKind.INTERLEAVED,
            rotary_dim=rotary,
            rotary_code="glm",
            rotary_concat=True,
        ),
        mlp=fused_gated_mlp(s.hidden, s.intermediate, c.activation()),
        layout=layout,
        norms=norms(names, s.hidden, NormKind.RMS),
        registration=tuple(registration),
    )
    return uniform(c, s, layer, rotary_dim=rotary)


def glm(c: Fields) -> ModelSpec:
    """GLM-4 of 2024: half of each head rotates, interleaved; gate and up in one matrix."""
    return _glm(c, names=LLAMA_NORMS, layout=ResidualLayout.PRE, registration=LLAMA_ORDER)


def glm4(c: Fields) -> ModelSpec:
    """GLM-4-0414: GLM with a norm after each branch too."""
    order = (*LLAMA_ORDER, "post_self_attn_layernorm", "post_mlp_layernorm")
    return _glm(c, names=_GLM4_NORMS, layout=ResidualLayout.SANDWICH, registration=order)


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "cohere": cohere,
    "cohere2": cohere2,
    "exaone4": exaone4,
    "glm": glm,
    "glm4": glm4,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo3,
}
