"""Families whose code lies beside the weights on the hub and in no class of transformers 5.24.

Names, class defaults and code: the repository's own files (`modeling_internlm2.py` of internlm/internlm2_5-7b-chat,
`modeling_baichuan.py` of baichuan-inc/Baichuan2-7B-Base and -13B-Base, `modeling_chatglm.py` of THUDM/chatglm3-6b).
That code is read by people and never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
    gated_mlp,
    norms,
    sizes,
)
from wazn.model.families.llama import LLAMA_NORMS
from wazn.model.fields import Fields
from wazn.model.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

ALIASES: dict[str, Mapping[str, str]] = {
    "chatglm": {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
        "head_dim": "kv_channels",
    },
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "internlm2": {
        "vocab_size": 103168,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "bias": True,
    },
    "baichuan": {
        "vocab_size": 125696,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
    },
    "chatglm": {
        "num_hidden_layers": 28,
        "vocab_size": 65024,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "head_dim": 128,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rmsnorm": True,
        "post_layer_norm": True,
        "multi_query_group_num": 1,
    },
}

_BAICHUAN2_VOCABULARY = 125_696  # Baichuan 1 has 64,000 rows and a plain head
_INTERNLM2_NORMS = ("attention_norm", "ffn_norm")


def internlm2(c: Fields) -> ModelSpec:
    """InternLM 2 and 2.5: one matrix for queries, keys and values, laid out by groups."""
    s = sizes(c)
    bias = c.flag("bias")
    attention = _fused(
        s,
        qkv="attention.wqkv",
        output="attention.wo",
        bias=bias,
        output_bias=bias,
        fused="per-group",
        dropout=c.probability("attention_dropout"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=gated_mlp(
            s.hidden,
            s.intermediate,
            c.activation(),
            prefix="feed_forward.",
            names=("w1", "w3", "w2"),
        ),
        layout=ResidualLayout.PRE,
        norms=norms(_INTERNLM2_NORMS, s.hidden, NormKind.RMS),
        registration=("attention", "feed_forward", *_INTERNLM2_NORMS),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.RMS,
        embedding="model.tok_embeddings",
        head="output",
        rotary_dim=s.head_dim,
    )


def _fused(
    s: Sizes,
    *,
    qkv: str,
    output: str,
    bias: bool = False,
    output_bias: bool = False,
    fused: str = "chunk",
    **code: Any,
) -> AttentionSpec:
    q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return AttentionSpec(
        projections=(
            Linear(name=qkv, in_features=s.hidden, out_features=q_size + 2 * kv_size, bias=bias),
        ),
        output=Linear(name=output, in_features=q_size, out_features=s.hidden, bias=output_bias),
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        fused=fused,
        **code,
    )


def baichuan(c: Fields) -> ModelSpec:
    """Baichuan 1 and 2. The 13B ones have alibi; their configs lack `max_position_embeddings`, the 7B ones have it."""
    s = sizes(c)
    alibi = not c.given("max_position_embeddings")
    attention = _fused(
        s,
        qkv="self_attn.W_pack",
        output="self_attn.o_proj",
        rotary=RotaryKind.NONE if alibi else RotaryKind.HALF,
        alibi=alibi,
    )
    layer = LayerSpec(
        attention=attention,
        mlp=gated_mlp(s.hidden, s.intermediate, c.activation()),
        layout=ResidualLayout.PRE,
        norms=norms(LLAMA_NORMS, s.hidden, NormKind.RMS),
        registration=("self_attn", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj", *LLAMA_NORMS),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.RMS,
        head_normalized=s.vocab == _BAICHUAN2_VOCABULARY,
        rotary_dim=0 if alibi else s.head_dim,
    )


def chatglm(c: Fields) -> ModelSpec:
    """ChatGLM 2 and 3 and the first GLM-4: grouped keys, half of each head rotates, gate and up in one matrix."""
    heads = c.count("num_attention_heads")
    groups = c.count("multi_query_group_num") if c.flag("multi_query_attention") else heads
    s = sizes(c, kv_heads=groups)
    if not c.flag("rmsnorm"):
        c.fault("`rmsnorm` must be true: no known model has another norm")
    if c.flag("apply_residual_connection_post_layernorm"):
        c.fault("`apply_residual_connection_post_layernorm` must be false: no known model has it")
    bias = c.flag("add_bias_linear")
    attention = _fused(
        s,
        qkv="self_attention.query_key_value",
        output="self_attention.dense",
        bias=bias or c.flag("add_qkv_bias"),
        output_bias=bias,
        rotary=RotaryKind.INTERLEAVED,
        rotary_dim=s.head_dim // 2,
        rotary_code="chatglm",
        rotary_concat=True,
        dropout=c.probability("attention_dropout"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=MlpSpec(
            gate=None,
            up=Linear(
                name="mlp.dense_h_to_4h",
                in_features=s.hidden,
                out_features=2 * s.intermediate,
                bias=bias,
            ),
            down=Linear(
                name="mlp.dense_4h_to_h",
                in_features=s.intermediate,
                out_features=s.hidden,
                bias=bias,
            ),
            activation=Activation.SILU,
            fused_gate_up=True,
        ),
        layout=ResidualLayout.PRE,
        norms=norms(LLAMA_NORMS, s.hidden, NormKind.RMS_CAST_LAST),
        residual_dropout=c.probability("hidden_dropout"),
        registration=("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.RMS_CAST_LAST,
        norm_name="transformer.encoder.final_layernorm",
        embedding="transformer.embedding.word_embeddings",
        layer_prefix="transformer.encoder.layers.{}.",
        head="transformer.output_layer",
        rotary_dim=s.head_dim // 2,
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "baichuan": baichuan,
    "chatglm": chatglm,
    "internlm2": internlm2,
}
