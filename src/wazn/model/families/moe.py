"""Mixtures of experts on plain attention: Mixtral, Qwen, OLMoE, Phi, Granite, gpt-oss, GLM-4.5, ERNIE, MiniMax.

Class defaults and code: transformers 5.24; how 4.x stores experts: transformers 4.57.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wazn.model.families.common import (
    Sizes,
    decoder,
    gated_mlp,
    layer_windows,
    layers_of_kinds,
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
from wazn.model.families.olmo import wide_qk_norms
from wazn.model.fields import Fields
from wazn.model.spec import (
    AttentionSpec,
    LayerSpec,
    Linear,
    ListedExperts,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    RotaryKind,
)

_LOCAL = {"num_experts": "num_local_experts"}
_ROUTED = {"num_experts": "n_routed_experts"}
ALIASES: dict[str, Mapping[str, str]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": _LOCAL,
    "olmoe": _LOCAL,
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL,
    "gpt_oss": _LOCAL,
    "minimax_m2": _LOCAL,
    "glm4_moe": _ROUTED,
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
}

_QWEN_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "mixtral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    "qwen2_moe": {
        **_QWEN_MOE,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        **_QWEN_MOE,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    "olmoe": {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 8,
        "num_experts": 64,
    },
    "phimoe": {
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_experts": 16,
    },
    "granitemoe": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    "gpt_oss": {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "num_experts": 128,
    },
    "glm4_moe": {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    "ernie4_5_moe": {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 6,
        "num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    "minimax_m2": {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
}

_CHOICE_TO_NORMALISE = (  # the others always do, or never
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "olmoe", "qwen2_moe", "qwen3_moe"),
)
_WITH_GROUPS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
_BLOCK_SPARSE = ("mlp.", "block_sparse_moe.")
_W123 = ("w1", "w2", "w3")
EXPERTS_FIRST = ("self_attn", "mlp.experts", "mlp.gate", "mlp", *LLAMA_NORMS)


def moe(
    c: Fields,
    s: Sizes,
    *,
    intermediate: int,
    module: str = "mlp",
    router: str = "gate",
    router_bias: bool = False,
    router_is_linear: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **rest: Any,
) -> MoeSpec:
    """A mixture with the keys `num_experts` and `num_experts_per_tok`; `rest` goes to `MoeSpec`."""
    experts, chosen = c.count("num_experts"), c.count("num_experts_per_tok")
    if chosen > experts:
        c.fault(
            f"`{c.written('num_experts_per_tok')}` ({chosen}) must be at most "
            f"`{c.written('num_experts')}` ({experts})",
            of=("num_experts_per_tok", "num_experts"),
        )
    return MoeSpec(
        flavour=c.model_type,
        router=Linear(
            name=f"{module}.{router}",
            in_features=s.hidden,
            out_features=experts,
            bias=router_bias,
            subclass=router_is_linear,
        ),
        expert=gated_mlp(
            s.hidden,
            intermediate,
            c.activation(),
            bias=rest.get("expert_bias", False),
            prefix="",
            names=names,
        ),
        router_is_linear=router_is_linear,
        experts_name=f"{module}.experts",
        num_experts=experts,
        experts_per_token=chosen,
        normalise=c.model_type not in _CHOICE_TO_NORMALISE or c.flag("norm_topk_prob"),
        **(_groups(c) if c.model_type in _WITH_GROUPS else {}),
        **rest,
    )


def _groups(c: Fields) -> dict[str, Any]:
    """Return the groups of experts and how many of them a token chooses from; DeepSeek V2 has them by one method."""
    if c.model_type == "deepseek_v2" and c.word("topk_method") != "group_limited_greedy":
        return {}
    return {"num_groups": c.count("n_group"), "groups_per_token": c.count("topk_group")}


def shared_mlp(
    c: Fields, s: Sizes, *, intermediate: int, name: str = "shared_experts", bias: bool = False
) -> MlpSpec:
    """The expert that sees every token."""
    return gated_mlp(s.hidden, intermediate, c.activation(), prefix=f"mlp.{name}.", bias=bias)


def dense_or_sparse(
    c: Fields,
    s: Sizes,
    *,
    sparse: Iterable[bool],
    layer: Callable[[bool], LayerSpec],
    **rest: Any,
) -> ModelSpec:
    """A model whose layers differ only in whether they have experts."""
    rest.setdefault("rotary_dim", s.head_dim)
    return decoder(c, s, layers=layers_of_kinds(sparse, layer), norm_kind=NormKind.RMS, **rest)


def mixtral(c: Fields) -> ModelSpec:
    """Mixtral: Mistral's attention, experts in every layer."""
    s = sizes(c)
    attention = separate_attention(
        s, dropout=c.probability("attention_dropout"), window=c.optional_count("sliding_window")
    )
    experts = moe(
        c,
        s,
        intermediate=s.intermediate,
        names=("w1", "w3", "w2"),
        v4=ListedExperts(renames=(_BLOCK_SPARSE,), expert_registration=_W123),
    )
    return uniform(c, s, pre_norm_layer(s, attention=attention, mlp=experts))


def _qwen_sparse(c: Fields, s: Sizes) -> list[bool]:
    dense = c.value("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        c.fault("`mlp_only_layers` must be a list of layer numbers")
        dense = ()
    step = c.count("decoder_sparse_step")
    without = set(dense)
    return [index not in without and (index + 1) % step == 0 for index in range(s.layers)]


def qwen2_moe(c: Fields) -> ModelSpec:
    """Qwen 1.5 and 2 with experts: a shared expert scaled by its own gate; biases on queries, keys and values."""
    s = sizes(c)
    experts = moe(
        c,
        s,
        intermediate=c.count("moe_intermediate_size"),
        shared=shared_mlp(
            c, s, intermediate=c.count("shared_expert_intermediate_size"), name="shared_expert"
        ),
        shared_gate=Linear(name="mlp.shared_expert_gate", in_features=s.hidden, out_features=1),
    )
    dense = llama_mlp(c, s)
    slides, first = c.flag("use_sliding_window"), c.count("max_window_layers", least=0)
    windows = layer_windows(
        c,
        window=c.optional_count("sliding_window", least=0) if slides else None,
        pattern=lambda index: slides and index % 2 == 0 and index < first,
        num_layers=s.layers,
    )
    bias, dropout = c.flag("qkv_bias"), c.probability("attention_dropout")

    def layer(kind: tuple[bool, int | None]) -> LayerSpec:
        attention = separate_attention(
            s, bias=bias, output_bias=False, dropout=dropout, window=kind[1]
        )
        return pre_norm_layer(s, attention=attention, mlp=experts if kind[0] else dense)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(zip(_qwen_sparse(c, s), windows, strict=True), layer),
        norm_kind=NormKind.RMS,
        rotary_dim=s.head_dim,
    )


def qwen3_moe(c: Fields) -> ModelSpec:
    """Qwen 3 with experts: queries and keys normed per head, no shared expert."""
    s = sizes(c)
    attention = llama_attention(
        c,
        s,
        window=c.optional_count("sliding_window") if c.flag("use_sliding_window") else None,
        norm_each_projection=True,
        **qk_norms(s.head_dim, NormKind.RMS),
    )
    experts = moe(
        c,
        s,
        intermediate=c.count("moe_intermediate_size"),
        v4=ListedExperts(registration=LLAMA_ORDER),
    )
    dense = llama_mlp(c, s)
    return dense_or_sparse(
        c,
        s,
        sparse=_qwen_sparse(c, s),
        layer=lambda sparse: pre_norm_layer(
            s, attention=attention, mlp=experts if sparse else dense, order=EXPERTS_FIRST
        ),
    )


def olmoe(c: Fields) -> ModelSpec:
    """OLMoE: queries and keys normed whole; some models clip them."""
    s = sizes(c)
    attention = llama_attention(
        c, s, clip_qkv=c.optional_number("clip_qkv"), **wide_qk_norms(s, NormKind.RMS)
    )
    experts = moe(c, s, intermediate=s.intermediate)
    return uniform(c, s, pre_norm_layer(s, attention=attention, mlp=experts))


def phimoe(c: Fields) -> ModelSpec:
    """Phi 3.5 MoE: LayerNorm; the router is a linear that draws its experts with noise."""
    s = sizes(c)
    attention = llama_attention(c, s, window=c.optional_count("sliding_window"))
    experts = moe(
        c,
        s,
        intermediate=s.intermediate,
        router="router",
        router_is_linear=True,
        names=("w1", "w3", "w2"),
        v4=ListedExperts(
            renames=(("mlp.router", "block_sparse_moe.gate"), _BLOCK_SPARSE),
            expert_registration=_W123,
        ),
    )
    layer = pre_norm_layer(s, attention=attention, mlp=experts, kind=NormKind.LAYER, bias=True)
    return uniform(
        c,
        s,
        layer,
        kind=NormKind.LAYER,
        norm_bias=True,
        head_bias=c.flag("lm_head_bias"),
    )


def granitemoe(c: Fields) -> ModelSpec:
    """Granite 3 with experts: Granite's multipliers; the experts come last in each layer."""
    s = sizes(c)
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        c.number(key)
    experts = moe(
        c,
        s,
        intermediate=s.intermediate,
        module="block_sparse_moe",
        router="router",
        v4=ListedExperts(
            listed=False,
            renames=(
                ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
                ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
                ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
            ),
            registration=(
                "self_attn",
                "block_sparse_moe.experts",
                "block_sparse_moe.router",
                *LLAMA_NORMS,
            ),
        ),
    )
    layer = pre_norm_layer(
        s,
        attention=llama_attention(c, s),
        mlp=experts,
        residual_multiplier=True,
        order=("self_attn", *LLAMA_NORMS, "block_sparse_moe"),
    )
    return uniform(c, s, layer, embedding_scaled=True, logits_scaled=True)


def gpt_oss(c: Fields) -> ModelSpec:
    """gpt-oss: a learned sink per head, every other layer slides, experts transposed and with biases."""
    s = sizes(c)
    experts = moe(
        c,
        s,
        intermediate=s.intermediate,
        router="router",
        router_bias=True,
        expert_bias=True,
        experts_transposed=True,
        v4=ListedExperts(listed=False, router_is_linear=False),
    )
    windows = layer_windows(
        c,
        window=c.optional_count("sliding_window"),
        pattern=lambda index: index % 2 == 0,
        num_layers=s.layers,
    )
    bias, dropout = c.flag("attention_bias"), c.probability("attention_dropout")

    def layer(window: int | None) -> LayerSpec:
        attention = separate_attention(
            s,
            bias=bias,
            dropout=dropout,
            window=window,
            sinks=True,
            code="gpt_oss",
            rotary_code="gpt_oss",
        )
        return pre_norm_layer(s, attention=attention, mlp=experts, kind=NormKind.RMS_CAST_LAST)

    return decoder(
        c,
        s,
        layers=layers_of_kinds(windows, layer),
        norm_kind=NormKind.RMS_CAST_LAST,
        rotary_dim=s.head_dim,  # its tables hold half of that: they are not doubled
    )


def _glm4_attention(c: Fields, s: Sizes, rotary: int) -> AttentionSpec:
    per_head = qk_norms(s.head_dim, NormKind.RMS) if c.flag("use_qk_norm") else {}
    return llama_attention(
        c,
        s,
        output_bias=False,
        rotary_dim=rotary,
        rotary_code="gpt_neox",
        rotary_concat=True,
        **per_head,
    )


def glm4_moe(c: Fields) -> ModelSpec:
    """GLM-4.5 to 4.7: the first layers are dense, half of each head rotates."""
    s = sizes(c)
    rotary = rotary_dim(c, s.head_dim, default=0.5)
    attention = _glm4_attention(c, s, rotary)
    size = c.count("moe_intermediate_size")
    experts = moe(
        c,
        s,
        intermediate=size,
        shared=shared_mlp(c, s, intermediate=size * c.count("n_shared_experts")),
        v4=ListedExperts(router_is_linear=False),
    )
    dense, first = llama_mlp(c, s), c.count("first_k_dense_replace", least=0)
    return dense_or_sparse(
        c,
        s,
        sparse=(index >= first for index in range(s.layers)),
        layer=lambda sparse: pre_norm_layer(
            s, attention=attention, mlp=experts if sparse else dense, order=EXPERTS_FIRST
        ),
        rotary_dim=rotary,
    )


def ernie4_5_moe(c: Fields) -> ModelSpec:
    """ERNIE 4.5 with experts: a correction per expert that takes no gradient is a parameter."""
    s = sizes(c)
    bias, size = c.flag("use_bias"), c.count("moe_intermediate_size")
    shared = c.count("moe_num_shared_experts", least=0)
    experts = moe(
        c,
        s,
        intermediate=size,
        router_correction_bias="mlp.gate.moe_statics.e_score_correction_bias",
        shared=shared_mlp(c, s, intermediate=size * shared, bias=bias) if shared else None,
        v4=ListedExperts(
            renames=(("mlp.gate.moe_statics", "mlp.moe_statics"),),
            registration=("self_attn", "mlp.gate.moe_statics", *LLAMA_ORDER[1:]),
        ),
    )
    attention = separate_attention(
        s, bias=bias, rotary=RotaryKind.INTERLEAVED, rotary_code="ernie4_5"
    )
    dense = llama_mlp(c, s, bias=bias)
    return dense_or_sparse(
        c,
        s,
        sparse=_ernie_sparse(c, s),
        layer=lambda sparse: pre_norm_layer(
            s, attention=attention, mlp=experts if sparse else dense
        ),
        head_bias=bias,
    )


def _ernie_sparse(c: Fields, s: Sizes) -> list[bool]:
    start = c.count("moe_layer_start_index", least=0)
    end = c.count("moe_layer_end_index", least=-1)
    every = c.count("moe_layer_interval")
    last = s.layers - 1 if end == -1 else end
    return [(index + 1) % every == 0 and start <= index <= last for index in range(s.layers)]


def minimax_m2(c: Fields) -> ModelSpec:
    """MiniMax M2: queries and keys normed whole, part of each head rotates, experts in every layer."""
    s = sizes(c)
    rotary = _minimax_rotary(c, s)
    attention = separate_attention(
        s,
        dropout=c.probability("attention_dropout"),
        rotary_dim=rotary,
        rotary_code="gpt_neox",
        rotary_concat=True,
        **wide_qk_norms(s, NormKind.RMS),
    )
    experts = moe(c, s, intermediate=s.intermediate, names=("w1", "w3", "w2"))
    return uniform(c, s, pre_norm_layer(s, attention=attention, mlp=experts), rotary_dim=rotary)


def _minimax_rotary(c: Fields, s: Sizes) -> int:
    width = c.optional_count("rotary_dim")
    if width is None:
        return rotary_dim(c, s.head_dim)
    if width > s.head_dim:
        c.fault(
            f"`rotary_dim` ({width}) must be at most the size of a head ({s.head_dim})",
            of=("rotary_dim", "head_dim"),
        )
    return min(width, s.head_dim)


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "ernie4_5_moe": ernie4_5_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "minimax_m2": minimax_m2,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "phimoe": phimoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}
