"""Phi 1.5 and 2, Phi 3 to 4. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import (
    decoder,
    fused_gated_mlp,
    norms,
    plain_mlp,
    rotary_dim,
    separate_attention,
    sizes,
)
from wazn.model.families.llama import LLAMA_NORMS
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    LayerSpec,
    Linear,
    ModelSpec,
    NormKind,
    ResidualLayout,
)

DEFAULTS: dict[str, Mapping[str, Any]] = {
    "phi": {
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
    },
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
    },
}


def phi(c: Fields) -> ModelSpec:
    """Phi 1.5 and 2: attention and mlp read the same norm; biases everywhere, on the head too."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=0.5)
    per_head: dict[str, Any] = {}
    if c.flag("qk_layernorm"):
        names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
        q, k = norms(names, s.hidden // s.heads, NormKind.LAYER, bias=True)
        per_head = {"q_norm": q, "k_norm": k}
    attention = separate_attention(
        s,
        bias=True,
        names=("q_proj", "k_proj", "v_proj", "dense"),
        dropout=c.probability("attention_dropout"),
        rotary_dim=rotary,
        rotary_code="phi",
        rotary_concat=True,
        **per_head,
    )
    layer = LayerSpec(
        attention=attention,
        mlp=plain_mlp(s.hidden, s.intermediate, c.activation(), up="mlp.fc1", down="mlp.fc2"),
        layout=ResidualLayout.PARALLEL,
        norms=norms(("input_layernorm",), s.hidden, NormKind.LAYER, bias=True),
        residual_dropout=c.probability("resid_pdrop"),
        registration=("self_attn", "mlp", "input_layernorm"),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="model.final_layernorm",
        norm_bias=True,
        head_bias=True,
        rotary_dim=rotary,
        embedding_dropout=c.probability("embd_pdrop"),
    )


def phi3(c: Fields) -> ModelSpec:
    """Phi 3, 3.5 and 4: one matrix for queries, keys and values, one for gate and up."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim)
    q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
    attention = AttentionSpec(
        projections=(
            Linear(
                name="self_attn.qkv_proj", in_features=s.hidden, out_features=q_size + 2 * kv_size
            ),
        ),
        output=Linear(name="self_attn.o_proj", in_features=q_size, out_features=s.hidden),
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        fused="slices",
        rotary_dim=rotary,
        rotary_code="phi3",
        rotary_concat=True,
        window=c.optional_count("sliding_window"),
        dropout=c.probability("attention_dropout"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=fused_gated_mlp(s.hidden, s.intermediate, c.activation()),
        layout=ResidualLayout.PRE,
        norms=norms(LLAMA_NORMS, s.hidden, NormKind.RMS),
        residual_dropout=c.probability("resid_pdrop"),
        registration=("self_attn.o_proj", "self_attn.qkv_proj", "mlp", *LLAMA_NORMS),
    )
    # `embd_pdrop` is in the class and in no code.
    return decoder(c, s, layers=(layer,) * s.layers, norm_kind=NormKind.RMS, rotary_dim=rotary)


READERS: dict[str, Callable[[Fields], ModelSpec]] = {"phi": phi, "phi3": phi3}
