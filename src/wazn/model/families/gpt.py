"""GPT-2, GPT-NeoX. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import decoder, norms, plain_mlp, rotary_dim, sizes
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    Linear,
    ModelSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

# Attributes of the class that its files spell in their own way (`attribute_map`, and the keys that only these families have).
_GPT2_SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
ALIASES: dict[str, Mapping[str, str]] = {"gpt2": _GPT2_SPELLINGS}

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "attention_bias": True,
        "rotary_pct": 0.25,
    },
}


def inner_size(c: Fields) -> int:
    """Return `n_inner`, or four times the hidden size."""
    return c.optional_count("intermediate_size") or 4 * c.count("hidden_size")


def gpt2(c: Fields) -> ModelSpec:
    """GPT-2: Conv1D matrices (weight [in, out]), learned positions, dropout on by default."""
    s = sizes(c, intermediate=inner_size(c))
    if c.flag("add_cross_attention"):
        c.fault("`add_cross_attention` must be false: wazn knows decoders only")
    attention = AttentionSpec(
        projections=(
            Linear(
                name="attn.c_attn",
                in_features=s.hidden,
                out_features=3 * s.hidden,
                bias=True,
                conv1d=True,
            ),
        ),
        output=Linear(
            name="attn.c_proj", in_features=s.hidden, out_features=s.hidden, bias=True, conv1d=True
        ),
        num_heads=s.heads,
        num_kv_heads=s.heads,
        head_dim=s.head_dim,
        fused="chunk",
        rotary=RotaryKind.NONE,
        dropout=c.probability("attn_pdrop"),
        output_dropout=c.probability("resid_pdrop"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            c.activation(),
            up="mlp.c_fc",
            down="mlp.c_proj",
            conv1d=True,
            dropout=c.probability("resid_pdrop"),
        ),
        layout=ResidualLayout.PRE,
        norms=norms(("ln_1", "ln_2"), s.hidden, NormKind.LAYER, bias=True),
        registration=("ln_1", "attn", "ln_2", "mlp"),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="transformer.ln_f",
        norm_bias=True,
        embedding="transformer.wte",
        layer_prefix="transformer.h.{}.",
        position_embedding=EmbeddingSpec(
            name="transformer.wpe", rows=c.count("max_position_embeddings"), size=s.hidden
        ),
        embedding_dropout=c.probability("embd_pdrop"),
    )


def gpt_neox(c: Fields) -> ModelSpec:
    """GPT-NeoX and Pythia: the mlp has its own norm of the same input; a quarter of each head rotates."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=c.number("rotary_pct"))
    bias = c.flag("attention_bias")
    attention = AttentionSpec(
        projections=(
            Linear(
                name="attention.query_key_value",
                in_features=s.hidden,
                out_features=3 * s.hidden,
                bias=bias,
            ),
        ),
        output=Linear(
            name="attention.dense", in_features=s.hidden, out_features=s.hidden, bias=bias
        ),
        num_heads=s.heads,
        num_kv_heads=s.heads,
        head_dim=s.head_dim,
        fused="per-head",
        rotary_dim=rotary,
        rotary_concat=True,
        dropout=c.probability("attention_dropout"),
    )
    names = ("input_layernorm", "post_attention_layernorm")
    parallel = c.flag("use_parallel_residual")
    layer = LayerSpec(
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            c.activation(),
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        layout=ResidualLayout.PARALLEL_TWO_NORMS if parallel else ResidualLayout.PRE,
        norms=norms(names, s.hidden, NormKind.LAYER, bias=True),
        residual_dropout=c.probability("hidden_dropout"),
        registration=(*names, "attention", "mlp"),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="gpt_neox.final_layer_norm",
        norm_bias=True,
        embedding="gpt_neox.embed_in",
        layer_prefix="gpt_neox.layers.{}.",
        rotary_dim=rotary,
        embedding_dropout=c.probability("hidden_dropout"),
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {"gpt2": gpt2, "gpt_neox": gpt_neox}
