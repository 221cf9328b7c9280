"""Llama and what is built like it: Mistral, Qwen 2 and 3, SmolLM 3, Granite, ERNIE 4.5, Hunyuan, InternLM 3.

Class defaults and code: transformers 5.24, `models/<family>/configuration_<family>.py` and `modeling_<family>.py`;
InternLM 3: its own `modeling_internlm3.py` on the hub.
"""

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
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    Norm,
    NormKind,
    ResidualLayout,
)

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_ORDER = ("self_attn", "mlp", *LLAMA_NORMS)

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
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
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}


def pre_norm_layer(
    s: Sizes,
    *,
    attention: AttentionSpec,
    mlp: MlpSpec,
    kind: NormKind = NormKind.RMS,
    bias: bool = False,
    **rest: Any,
) -> LayerSpec:
    """x += attention(norm x); x += mlp(norm x), with the names of Llama."""
    return LayerSpec(
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.PRE,
        norms=norms(LLAMA_NORMS, s.hidden, kind, bias=bias),
        registration=LLAMA_ORDER,
        **rest,
    )


def llama(c: Fields) -> ModelSpec:
    """Llama 1 to 3.3 and every checkpoint published as `llama`."""
    s = sizes(c)
    attention = separate_attention(
        s, bias=c.flag("attention_bias"), dropout=c.probability("attention_dropout")
    )
    mlp = gated_mlp(s.hidden, s.intermediate, c.activation(), bias=c.flag("mlp_bias"))
    layer = pre_norm_layer(s, attention=attention, mlp=mlp)
    return decoder(c, s, layers=(layer,) * s.layers, norm_kind=NormKind.RMS, rotary_dim=s.head_dim)


def mistral(c: Fields) -> ModelSpec:
    """Mistral 7B to Large: every layer slides where the config has a window."""
    s = sizes(c)
    attention = separate_attention(
        s,
        dropout=c.probability("attention_dropout"),
        window=c.optional_count("sliding_window"),
    )
    layer = pre_norm_layer(
        s, attention=attention, mlp=gated_mlp(s.hidden, s.intermediate, c.activation())
    )
    return decoder(c, s, layers=(layer,) * s.layers, norm_kind=NormKind.RMS, rotary_dim=s.head_dim)


def qwen_windows(c: Fields, s: Sizes) -> tuple[int | None, ...]:
    """Return each layer's window: with `use_sliding_window`, from layer `max_window_layers` on."""
    window = c.optional_count("sliding_window", least=0) if c.flag("use_sliding_window") else None
    first = c.count("max_window_layers", least=0)
    return layer_windows(
        c, window=window, pattern=lambda index: index >= first, num_layers=s.layers
    )


def qk_norms(size: int, kind: NormKind, *, bias: bool = False) -> dict[str, Any]:
    """Norms of queries and keys with the usual names."""
    q, k = norms(("self_attn.q_norm", "self_attn.k_norm"), size, kind, bias=bias)
    return {"q_norm": q, "k_norm": k}


def qwen2(c: Fields) -> ModelSpec:
    """Qwen 1.5, 2 and 2.5: biases on queries, keys and values."""
    s = sizes(c)
    mlp = gated_mlp(s.hidden, s.intermediate, c.activation())
    dropout = c.probability("attention_dropout")

    def layer(window: int | None) -> LayerSpec:
        attention = separate_attention(
            s, bias=True, output_bias=False, dropout=dropout, window=window
        )
        return pre_norm_layer(s, attention=attention, mlp=mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(qwen_windows(c, s), layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def qwen3(c: Fields) -> ModelSpec:
    """Qwen 3: queries and keys normed per head."""
    s = sizes(c)
    mlp = gated_mlp(s.hidden, s.intermediate, c.activation())
    dropout, bias = c.probability("attention_dropout"), c.flag("attention_bias")

    def layer(window: int | None) -> LayerSpec:
        attention = separate_attention(
            s, bias=bias, dropout=dropout, window=window, **qk_norms(s.head_dim, NormKind.RMS)
        )
        return pre_norm_layer(s, attention=attention, mlp=mlp)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(qwen_windows(c, s), layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
