"""GPT-2 and its line: GPT-J, GPT-Neo, GPT-NeoX, GPT-BigCode. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
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
    EmbeddingSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    NormKind,
    ResidualLayout,
    RotaryKind,
)

# How the files of a family spell an attribute of its class (`attribute_map`), where it differs.
_GPT2_SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
ALIASES: dict[str, Mapping[str, str]] = {
    "gpt2": _GPT2_SPELLINGS,
    "gpt_bigcode": _GPT2_SPELLINGS,
    "gptj": _GPT2_SPELLINGS,
    "gpt_neo": {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "hidden_act": "activation_function",
    },
}

_GPT2: dict[str, Any] = {
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
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": {**_GPT2, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
    "gptj": {
        "vocab_size": 50400,
        "hidden_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "rotary_dim": 64,
    },
    "gpt_neo": {
        "vocab_size": 50257,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "window_size": 256,
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

_GPT2_NORMS = ("ln_1", "ln_2")
_GPT2_ORDER = ("ln_1", "attn", "ln_2", "mlp")
# `attention` inside `attn` in GPT-Neo; keys come first in the class.
_KEYS_FIRST = ("k_proj", "v_proj", "q_proj", "out_proj")


def inner_size(c: Fields) -> int:
    """Return the size of the feed-forward, four times the hidden size where the config is silent."""
    return c.optional_count("intermediate_size") or 4 * c.count("hidden_size")


def _decoder_only(c: Fields) -> None:
    if c.flag("add_cross_attention"):
        c.fault("`add_cross_attention` must be false: only decoders without an encoder are known")


def _gpt2_mlp(c: Fields, s: Sizes, *, dropout: str, conv1d: bool = False) -> MlpSpec:
    return plain_mlp(
        s.hidden,
        s.intermediate,
        c.activation(),
        up="mlp.c_fc",
        down="mlp.c_proj",
        conv1d=conv1d,
        dropout=c.probability(dropout),
    )


def _gpt2_model(c: Fields, s: Sizes, layers: tuple[LayerSpec, ...], *, dropout: str) -> ModelSpec:
    return decoder(
        c,
        s,
        layers=layers,
        norm_kind=NormKind.LAYER,
        norm_name="transformer.ln_f",
        norm_bias=True,
        embedding="transformer.wte",
        layer_prefix="transformer.h.{}.",
        position_embedding=EmbeddingSpec(
            name="transformer.wpe", rows=c.count("max_position_embeddings"), size=s.hidden
        ),
        embedding_dropout=c.probability(dropout),
    )


def _gpt2_layer(s: Sizes, attention: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    return LayerSpec(
        code="gpt2",
        attention=attention,
        mlp=mlp,
        layout=ResidualLayout.PRE,
        norms=norms(_GPT2_NORMS, s.hidden, NormKind.LAYER, bias=True),
        registration=_GPT2_ORDER,
    )


def gpt2(c: Fields) -> ModelSpec:
    """GPT-2: Conv1D matrices (weight [in, out]), learned positions, dropout on by default."""
    s = sizes(c, intermediate=inner_size(c))
    _decoder_only(c)
    attention = _fused_attention(c, s, out_features=3 * s.hidden, conv1d=True, code="gpt2")
    layer = _gpt2_layer(s, attention, _gpt2_mlp(c, s, dropout="resid_pdrop", conv1d=True))
    return _gpt2_model(c, s, (layer,) * s.layers, dropout="embd_pdrop")


def gpt_bigcode(c: Fields) -> ModelSpec:
    """StarCoder 1: GPT-2 with plain linears and one key and value head for all queries."""
    multi_query = c.flag("multi_query")
    heads = c.count("num_attention_heads")
    s = sizes(c, intermediate=inner_size(c), kv_heads=1 if multi_query else heads)
    _decoder_only(c)
    attention = _fused_attention(
        c,
        s,
        out_features=s.hidden + 2 * s.kv_heads * s.head_dim,
        fused="chunk" if multi_query else "per-head",
    )
    layer = _gpt2_layer(s, attention, _gpt2_mlp(c, s, dropout="resid_pdrop"))
    return _gpt2_model(c, s, (layer,) * s.layers, dropout="embd_pdrop")


def _fused_attention(
    c: Fields,
    s: Sizes,
    *,
    out_features: int,
    fused: str = "chunk",
    conv1d: bool = False,
    code: str = "llama",
) -> AttentionSpec:
    return AttentionSpec(
        projections=(
            Linear(
                name="attn.c_attn",
                in_features=s.hidden,
                out_features=out_features,
                bias=True,
                conv1d=conv1d,
            ),
        ),
        output=Linear(
            name="attn.c_proj",
            in_features=s.hidden,
            out_features=s.hidden,
            bias=True,
            conv1d=conv1d,
        ),
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        fused=fused,
        code=code,
        rotary=RotaryKind.NONE,
        dropout=c.probability("attn_pdrop"),
        output_dropout=c.probability("resid_pdrop"),
    )


def gptj(c: Fields) -> ModelSpec:
    """GPT-J: one norm for both branches, interleaved rotary on a part of each head, a bias on the head."""
    s = sizes(c, intermediate=inner_size(c))
    rotary = c.optional_count("rotary_dim")
    if rotary is not None and rotary > s.head_dim:
        c.fault(
            f"`rotary_dim` ({rotary}) must be at most the size of a head ({s.head_dim})",
            of=("rotary_dim", "hidden_size", "num_attention_heads"),
        )
    attention = separate_attention(
        s,
        prefix="attn",
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        rotary=RotaryKind.INTERLEAVED,
        rotary_dim=rotary,
        rotary_code="gptj",
        rotary_concat=rotary is not None,
        code="gptj",
        dropout=c.probability("attn_pdrop"),
        output_dropout=c.probability("resid_pdrop"),
    )
    layer = LayerSpec(
        attention=attention,
        mlp=plain_mlp(
            s.hidden,
            s.intermediate,
            c.activation(),
            up="mlp.fc_in",
            down="mlp.fc_out",
            dropout=c.probability("resid_pdrop"),
        ),
        layout=ResidualLayout.PARALLEL,
        norms=norms(("ln_1",), s.hidden, NormKind.LAYER, bias=True),
        registration=("ln_1", *(f"attn.{name}" for name in _KEYS_FIRST), "mlp"),
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
        head_bias=True,
        rotary_dim=rotary or s.hidden,
        embedding_dropout=c.probability("embd_pdrop"),
    )


def gpt_neo(c: Fields) -> ModelSpec:
    """GPT-Neo: every other layer sees a window only; scores in fp32; learned positions."""
    s = sizes(c, intermediate=inner_size(c))
    window = c.count("window_size")
    dropout = c.probability("attention_dropout")
    mlp = _gpt2_mlp(c, s, dropout="resid_dropout")

    def layer(kind: str) -> LayerSpec:
        attention = separate_attention(
            s,
            prefix="attn.attention",
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            output_bias=True,
            rotary=RotaryKind.NONE,
            code="gpt_neo",
            window=window if kind == "local" else None,
            dropout=dropout,
            output_dropout=c.probability("resid_dropout"),
        )
        return LayerSpec(
            code="gpt2",
            attention=attention,
            mlp=mlp,
            layout=ResidualLayout.PRE,
            norms=norms(_GPT2_NORMS, s.hidden, NormKind.LAYER, bias=True),
            registration=(
                "ln_1",
                *(f"attn.attention.{name}" for name in _KEYS_FIRST),
                "ln_2",
                "mlp",
            ),
        )

    layers = layers_of_kinds(_neo_kinds(c, s), layer)
    return _gpt2_model(c, s, layers, dropout="embed_dropout")


def _neo_kinds(c: Fields, s: Sizes) -> list[str]:
    """Return `global` or `local` per layer: from `attention_layers`, or `attention_types` repeated, or alternating."""
    kinds: list[str] | None = c.per_layer(
        "attention_layers", ("global", "local"), num_layers=s.layers
    )
    if kinds is not None:
        return kinds
    groups = c.value("attention_types")
    if groups is None:
        return ["local" if index % 2 else "global" for index in range(s.layers)]
    try:
        kinds = [kind for pattern, times in groups for kind in _repeated(pattern, times)]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != s.layers or not set(kinds) <= {"global", "local"}:
        c.fault(
            '`attention_types` must be groups such as [[["global", "local"], 12]] '
            f"that name {s.layers} layers",
            of=("num_hidden_layers",),
        )
        return ["global"] * s.layers
    return kinds


def _repeated(pattern: object, times: object) -> list[str]:
    if not isinstance(pattern, list) or type(times) is not int or not 0 < times <= 10_000:
        raise TypeError
    return [str(kind) for kind in pattern[:100]] * times


def gpt_neox(c: Fields) -> ModelSpec:
    """GPT-NeoX and Pythia: the feed-forward has its own norm of the same input; a quarter of each head rotates."""
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
        rotary_code="gpt_neox",
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


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
}
