"""OPT, BLOOM, Falcon, MPT. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
    norms,
    plain_mlp,
    separate_attention,
    sizes,
)
from wazn.model.fields import Fields
from wazn.model.spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    Linear,
    ModelSpec,
    Norm,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

ALIASES: dict[str, Mapping[str, str]] = {
    "opt": {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "falcon": {
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
    "mpt": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "num_attention_heads": 12,
        "hidden_act": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    "bloom": {
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "mpt": {
        "vocab_size": 50368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}

_POSITION_OFFSET = 2  # OPTLearnedPositionalEmbedding keeps two rows that no position uses


def opt(c: Fields) -> ModelSpec:
    """OPT: learned positions (two rows more), ReLU; the 350M one norms after each addition and projects in and out."""
    s = sizes(c)
    bias, dropout = c.flag("enable_bias"), c.probability("dropout")
    affine, before = c.flag("layer_norm_elementwise_affine"), c.flag("do_layer_norm_before")
    attention = separate_attention(
        s,
        bias=bias,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        rotary=RotaryKind.NONE,
        code="opt",
        dropout=c.probability("attention_dropout"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=plain_mlp(s.hidden, s.intermediate, c.activation(), up="fc1", down="fc2", bias=bias),
        layout=ResidualLayout.PRE if before else ResidualLayout.POST_LAYER,
        code="opt",
        norms=norms(
            ("self_attn_layer_norm", "final_layer_norm"),
            s.hidden,
            NormKind.LAYER,
            weight=affine,
            bias=affine,
        ),
        residual_dropout=dropout,
        registration=(
            *(f"self_attn.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj")),
            "self_attn_layer_norm",
            "fc1",
            "fc2",
            "final_layer_norm",
        ),
    )
    spec = decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="model.decoder.final_layer_norm",
        norm_weight=affine,
        norm_bias=affine,
        embedding="model.decoder.embed_tokens",
        layer_prefix="model.decoder.layers.{}.",
        position_embedding=EmbeddingSpec(
            name="model.decoder.embed_positions",
            rows=c.count("max_position_embeddings") + _POSITION_OFFSET,
            size=s.hidden,
        ),
        registration=(
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
            "model.decoder.project_out",
            "model.decoder.project_in",
            "model.decoder.final_layer_norm",
            "layers",
            "lm_head",
        ),
    )
    if not before or c.flag("_remove_final_layer_norm"):
        spec = replace(spec, final_norm=None)
    width = c.optional_count("word_embed_proj_dim") or s.hidden
    if width == s.hidden:
        return spec
    return replace(
        spec,
        embedding=replace(spec.embedding, size=width),
        head=replace(spec.head, in_features=width),
        embedding_projections=(
            Linear(name="model.decoder.project_in", in_features=width, out_features=s.hidden),
            Linear(name="model.decoder.project_out", in_features=s.hidden, out_features=width),
        ),
    )


_BLOOM_NORMS = ("input_layernorm", "post_attention_layernorm")


def bloom(c: Fields) -> ModelSpec:
    """BLOOM: alibi, a norm on the embedding, fused projections viewed per head, its own GELU."""
    s = sizes(c, intermediate=4 * c.count("hidden_size"))
    if c.flag("apply_residual_connection_post_layernorm"):
        c.fault("`apply_residual_connection_post_layernorm` must be false: no known model has it")
    dropout = c.probability("hidden_dropout")
    attention = AttentionSpec(
        projections=(
            Linear(
                name="self_attention.query_key_value",
                in_features=s.hidden,
                out_features=3 * s.hidden,
                bias=True,
            ),
        ),
        output=Linear(
            name="self_attention.dense", in_features=s.hidden, out_features=s.hidden, bias=True
        ),
        num_heads=s.heads,
        num_kv_heads=s.heads,
        head_dim=s.head_dim,
        fused="per-head",
        rotary=RotaryKind.NONE,
        alibi=True,
        code="bloom",
        dropout=c.probability("attention_dropout"),
        output_dropout=dropout,
    )
    layer = LayerSpec(
        code="bloom",
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            Activation.GELU_BLOOM,
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            dropout=dropout,
        ),
        layout=ResidualLayout.PRE,
        norms=norms(_BLOOM_NORMS, s.hidden, NormKind.LAYER, bias=True),
        registration=("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="transformer.ln_f",
        norm_bias=True,
        embedding="transformer.word_embeddings",
        layer_prefix="transformer.h.{}.",
        embedding_norm=Norm(
            name="transformer.word_embeddings_layernorm",
            size=s.hidden,
            kind=NormKind.LAYER,
            bias=True,
        ),
    )


def falcon(c: Fields) -> ModelSpec:
    """Falcon 7B (one key head), 40B and 180B (groups, a norm for each branch), and the alibi models of its start."""
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    grouped, multi_query = c.flag("new_decoder_architecture"), c.flag("multi_query")
    given = c.optional_count("num_key_value_heads") or heads
    kv_heads = given if grouped or not multi_query else 1
    inner = c.optional_count("intermediate_size") or 4 * hidden
    s = sizes(c, intermediate=inner, kv_heads=kv_heads)
    if not grouped and not multi_query and kv_heads != heads:
        c.fault("`num_kv_heads` must be `num_attention_heads` without `new_decoder_architecture`")
    bias, alibi = c.flag("bias"), c.flag("alibi")
    attention = AttentionSpec(
        projections=(
            Linear(
                name="self_attention.query_key_value",
                in_features=s.hidden,
                out_features=s.hidden + 2 * s.kv_heads * s.head_dim,
                bias=bias,
                subclass=True,
            ),
        ),
        output=Linear(
            name="self_attention.dense",
            in_features=s.hidden,
            out_features=s.hidden,
            bias=bias,
            subclass=True,
        ),
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        fused="per-group-expanded" if grouped else "per-head",
        rotary=RotaryKind.NONE if alibi else RotaryKind.HALF,
        alibi=alibi,
        code="falcon",
        dropout=c.probability("attention_dropout"),
    )
    layout, names = _falcon_layout(c, grouped=grouped)
    layer = LayerSpec(
        code="falcon",
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            c.activation(),
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            bias=bias,
            subclass=True,
        ),
        layout=layout,
        norms=norms(names, s.hidden, NormKind.LAYER, bias=True),
        residual_dropout=c.probability("hidden_dropout"),
        registration=(
            "self_attention",
            "mlp",
            "post_attention_layernorm",
            "input_layernorm",
            "ln_attn",
            "ln_mlp",
        ),
    )
    return decoder(
        c,
        s,
        layers=(layer,) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="transformer.ln_f",
        norm_bias=True,
        embedding="transformer.word_embeddings",
        layer_prefix="transformer.h.{}.",
        rotary_dim=s.head_dim,  # the tables are made even where alibi stands in for them
    )


def _falcon_layout(c: Fields, *, grouped: bool) -> tuple[ResidualLayout, tuple[str, ...]]:
    count = c.optional_count("num_ln_in_parallel_attn")
    if count is None and grouped:
        count = 2
    if not c.flag("parallel_attn"):
        if grouped:
            c.fault("`parallel_attn` must be true with `new_decoder_architecture`")
        return ResidualLayout.PRE, ("input_layernorm", "post_attention_layernorm")
    if count == 2:
        if not grouped:
            c.fault("`num_ln_in_parallel_attn` must not be 2 without `new_decoder_architecture`")
        return ResidualLayout.PARALLEL_TWO_NORMS, ("ln_attn", "ln_mlp")
    return ResidualLayout.PARALLEL, ("input_layernorm",)


def mpt(c: Fields) -> ModelSpec:
    """MPT: alibi, no biases, norms without bias. What `attn_config` says of anything else, the class does not do."""
    s = sizes(c, intermediate=4 * c.count("hidden_size"))
    attn = c.section("attn_config")
    inner = Fields(
        attn, id=c.id, path=f"{c.path}: attn_config", model_type="mpt", defaults={}, aliases={}
    )
    dropout, clip = inner.probability("attn_pdrop"), inner.optional_number("clip_qkv")
    c.faults_of(inner)
    return decoder(
        c,
        s,
        layers=(_mpt_layer(s, dropout=dropout, clip=clip or None),) * s.layers,
        norm_kind=NormKind.LAYER,
        norm_name="transformer.norm_f",
        embedding="transformer.wte",
        layer_prefix="transformer.blocks.{}.",
    )


def _mpt_layer(s: Sizes, *, dropout: float, clip: float | None) -> LayerSpec:
    attention = AttentionSpec(
        projections=(Linear(name="attn.Wqkv", in_features=s.hidden, out_features=3 * s.hidden),),
        output=Linear(name="attn.out_proj", in_features=s.hidden, out_features=s.hidden),
        num_heads=s.heads,
        num_kv_heads=s.heads,
        head_dim=s.head_dim,
        fused="chunk",
        rotary=RotaryKind.NONE,
        alibi=True,
        code="mpt",
        dropout=dropout,
        clip_qkv=clip,
    )
    return LayerSpec(
        code="mpt",
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            Activation.GELU,
            up="ffn.up_proj",
            down="ffn.down_proj",
            bias=False,
        ),
        layout=ResidualLayout.PRE,
        norms=norms(("norm_1", "norm_2"), s.hidden, NormKind.LAYER),
        residual_dropout=dropout,
        registration=("norm_1", "attn", "norm_2", "ffn"),
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "bloom": bloom,
    "falcon": falcon,
    "mpt": mpt,
    "opt": opt,
}
