"""DeepSeek V2 and V3 and what has their attention. Class defaults and code: transformers 5.24."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wazn.model.families.common import SPARSE_KINDS, Sizes, sizes
from wazn.model.families.llama import llama_mlp, pre_norm_layer
from wazn.model.families.moe import EXPERTS_FIRST, dense_or_sparse, moe, shared_mlp
from wazn.model.fields import Fields
from wazn.model.spec import (
    LatentAttentionSpec,
    LayerSpec,
    Linear,
    ListedExperts,
    ModelSpec,
    Norm,
    NormKind,
    RotaryKind,
)

_ROUTED = {"num_experts": "n_routed_experts"}
ALIASES: dict[str, Mapping[str, str]] = {
    "deepseek_v2": _ROUTED,
    "deepseek_v3": _ROUTED,
    "glm4_moe_lite": {**_ROUTED, "qk_rope_head_dim": "head_dim"},
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        **_LATENT,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
}


def latent_attention(
    c: Fields, s: Sizes, *, rotary: RotaryKind, rotary_code: str
) -> LatentAttentionSpec:
    """Low-rank keys and values, low-rank queries where `q_lora_rank` is a number."""
    rank, kv_rank = c.optional_count("q_lora_rank"), c.count("kv_lora_rank")
    nope, rope = c.count("qk_nope_head_dim"), c.count("qk_rope_head_dim")
    value, bias = c.count("v_head_dim"), c.flag("attention_bias")
    query_size = s.heads * (nope + rope)

    def linear(name: str, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        return Linear(
            name=f"self_attn.{name}", in_features=in_features, out_features=out_features, bias=bias
        )

    def norm(name: str, size: int) -> Norm:
        return Norm(name=f"self_attn.{name}", size=size, kind=NormKind.RMS)

    return LatentAttentionSpec(
        q=linear("q_proj", s.hidden, query_size) if rank is None else None,
        q_a=None if rank is None else linear("q_a_proj", s.hidden, rank, bias=bias),
        q_a_norm=None if rank is None else norm("q_a_layernorm", rank),
        q_b=None if rank is None else linear("q_b_proj", rank, query_size),
        kv_a=linear("kv_a_proj_with_mqa", s.hidden, kv_rank + rope, bias=bias),
        kv_a_norm=norm("kv_a_layernorm", kv_rank),
        kv_b=linear("kv_b_proj", kv_rank, s.heads * (nope + value)),
        output=linear("o_proj", s.heads * value, s.hidden, bias=bias),
        num_heads=s.heads,
        kv_lora_rank=kv_rank,
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=value,
        rotary=rotary,
        rotary_code=rotary_code,
        dropout=c.probability("attention_dropout"),
    )


def _model(
    c: Fields, *, rotary: RotaryKind, rotary_code: str, sparse: Callable[[int], list[bool]]
) -> ModelSpec:
    s = sizes(c, head_dim=c.count("qk_rope_head_dim"))
    attention = latent_attention(c, s, rotary=rotary, rotary_code=rotary_code)
    bias = c.model_type == "deepseek_v2" and c.flag("mlp_bias")  # the others have no such key
    size = c.count("moe_intermediate_size")
    experts = moe(
        c,
        s,
        intermediate=size,
        shared=shared_mlp(c, s, intermediate=size * c.count("n_shared_experts"), bias=bias),
        v4=ListedExperts(router_is_linear=False),
    )
    dense = llama_mlp(c, s, bias=bias)

    def layer(with_experts: bool) -> LayerSpec:
        return pre_norm_layer(
            s, attention=attention, mlp=experts if with_experts else dense, order=EXPERTS_FIRST
        )

    return dense_or_sparse(c, s, sparse=sparse(s.layers), layer=layer)


def _after_the_first(c: Fields) -> Callable[[int], list[bool]]:
    first = c.count("first_k_dense_replace", least=0)
    return lambda layers: [index >= first for index in range(layers)]


def deepseek_v2(c: Fields) -> ModelSpec:
    """DeepSeek V2: rotary embedding by complex numbers."""
    return _model(
        c,
        rotary=RotaryKind.INTERLEAVED,
        rotary_code="deepseek_v2",
        sparse=_after_the_first(c),
    )


def deepseek_v3(c: Fields) -> ModelSpec:
    """DeepSeek V3 and R1, Kimi K2. The layers that predict further tokens are not in the class."""
    interleaved = c.flag("rope_interleave")
    return _model(
        c,
        rotary=RotaryKind.INTERLEAVED if interleaved else RotaryKind.HALF,
        rotary_code="deepseek_v3" if interleaved else "llama",
        sparse=_after_the_first(c),
    )


def glm4_moe_lite(c: Fields) -> ModelSpec:
    """GLM-4.7 Flash: DeepSeek V3 with one dense layer, or with the layers that `mlp_layer_types` names."""
    interleaved = c.flag("rope_interleave")

    def sparse(layers: int) -> list[bool]:
        kinds = c.per_layer("mlp_layer_types", SPARSE_KINDS, num_layers=layers)
        if kinds is None:
            return [index > 0 for index in range(layers)]
        return [kind == "sparse" for kind in kinds]

    return _model(
        c,
        rotary=RotaryKind.INTERLEAVED if interleaved else RotaryKind.HALF,
        rotary_code="deepseek_v3" if interleaved else "llama",
        sparse=sparse,
    )


READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
}
