"""Gemma 1, 2 and 3 (text). Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
    gated_mlp,
    layer_windows,
    layers_of_kinds,
    norms,
    separate_attention,
    sizes,
)
from wazn.model.families.llama import pre_norm_layer, qk_norms
from wazn.model.fields import Fields
from wazn.model.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormKind,
    ResidualLayout,
)

_SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA2: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        **_GEMMA2,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
}


def gemma(c: Fields) -> ModelSpec:
    """Gemma 1. Its first configs say `gelu` and mean the tanh form; the class corrects that."""
    s = sizes(c)
    activation = Activation.GELU_TANH if c.value("hidden_act") == "gelu" else c.activation()
    attention = separate_attention(
        s, bias=c.flag("attention_bias"), dropout=c.probability("attention_dropout")
    )
    layer = pre_norm_layer(
        s,
        attention=attention,
        mlp=gated_mlp(s.hidden, s.intermediate, activation),
        kind=NormKind.RMS_GEMMA,
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.RMS_GEMMA,
        rotary_dim=s.head_dim,
        embedding_scaled=True,
    )


def sandwich_layer(s: Sizes, attention: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    """x += norm(attention(norm x)); x += norm(mlp(norm x))."""
    return LayerSpec(
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.SANDWICH,
        norms=norms(_SANDWICH_NORMS, s.hidden, NormKind.RMS_GEMMA),
        registration=("self_attn", "mlp", *_SANDWICH_NORMS),
    )


def gemma2(c: Fields) -> ModelSpec:
    """Gemma 2: every other layer slides; logits are capped in attention and at the end."""
    return _alternating(
        c,
        slides=lambda index: index % 2 == 0,
        softcap=c.optional_number("attn_logit_softcapping"),
    )


def gemma3_text(c: Fields) -> ModelSpec:
    """Gemma 3, text only: queries and keys normed; every sixth layer sees everything, with its own rotary table."""
    pattern = c.count("sliding_window_pattern")
    # The cap of attention logits is kept by the module and not handed to the attention function.
    return _alternating(
        c,
        slides=lambda index: (index + 1) % pattern != 0,
        softcap=None,
        normed=True,
        rotary_tables=2,
    )


def _alternating(
    c: Fields,
    *,
    slides: Callable[[int], bool],
    softcap: float | None,
    normed: bool = False,
    rotary_tables: int = 1,
) -> ModelSpec:
    s = sizes(c)
    mlp = gated_mlp(s.hidden, s.intermediate, c.activation("hidden_activation"))
    bias, dropout = c.flag("attention_bias"), c.probability("attention_dropout")
    normings: dict[str, Any] = qk_norms(s.head_dim, NormKind.RMS_GEMMA) if normed else {}
    windows = layer_windows(
        c, window=c.optional_count("sliding_window"), pattern=slides, num_layers=s.layers
    )

    def layer(window: int | None) -> LayerSpec:
        attention = separate_attention(
            s, bias=bias, dropout=dropout, window=window, softcap=softcap, **normings
        )
        return sandwich_layer(s, attention, mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(windows, layer),
        norm_kind=NormKind.RMS_GEMMA,
        rotary_dim=s.head_dim,
        rotary_tables=rotary_tables,
        embedding_scaled=True,
        logit_softcap=c.optional_number("final_logit_softcapping"),
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
}
