"""The architecture of a decoder-only language model, as frozen nouns.

A `ModelSpec` says what is there (every matrix, with the name that transformers gives it) and which code runs on it (the
norm's flavour, the rotary's flavour, where the norms stand). `wazn.model.parameters` lists every weight of a spec;
`wazn.simulate` runs it. Shapes: H hidden size, V vocabulary rows, I intermediate size, E experts.

Names of linears and norms are relative to their layer (`self_attn.q_proj`) inside a `LayerSpec`, and absolute
(`model.norm`) in a `ModelSpec`; `ModelSpec.layer_prefix` joins the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Activation",
    "AttentionSpec",
    "EmbeddingSpec",
    "LatentAttentionSpec",
    "LayerSpec",
    "Linear",
    "ListedExperts",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "Norm",
    "NormKind",
    "ResidualLayout",
    "RotaryKind",
]


class NormKind(StrEnum):
    """The code of a normalisation, named after the first family that has it.

    RMS: llama's; x to fp32, weight times the result cast back.
    RMS_GEMMA: (1 + weight) in fp32, cast back last.
    RMS_CAST_LAST: olmo2, gpt-oss; weight times fp32, cast back last.
    RMS_FP32: helium; the same with an fp32 copy of the weight.

    LAYER: torch's layer_norm.
    LAYER_FP32: olmo; layer_norm on an fp32 copy, without weight.
    LAYER_COHERE: mean and variance by hand in fp32, without bias.
    LAYER_1P: nemotron; torch's layer_norm with weight + 1.
    LAYER_PER_HEAD: stablelm; one layer_norm per head, joined by cat.
    """

    RMS = "rms"
    RMS_GEMMA = "rms-gemma"
    RMS_CAST_LAST = "rms-cast-last"
    RMS_FP32 = "rms-fp32"
    LAYER = "layer"
    LAYER_FP32 = "layer-fp32"
    LAYER_COHERE = "layer-cohere"
    LAYER_1P = "layer-1p"
    LAYER_PER_HEAD = "layer-per-head"


class RotaryKind(StrEnum):
    """Which channels the rotary embedding pairs: HALF those half a head apart, INTERLEAVED neighbours."""

    NONE = "none"
    HALF = "half"
    INTERLEAVED = "interleaved"


class ResidualLayout(StrEnum):
    """Where norms and residual additions stand in a layer.

    PRE: x += attn(norm1 x); x += mlp(norm2 x).
    PARALLEL: x += attn(norm1 x) + mlp(norm1 x).
    PARALLEL_TWO_NORMS: the mlp has its own norm of the same x (GPT-NeoX, Falcon-40B).
    SANDWICH: each branch is normed before and after (Gemma 2 and 3, GLM-4).
    POST: x += norm1(attn x); x += norm2(mlp x) (OLMo 2).
    POST_LAYER: x = norm1(x + attn x) (OPT-350M).
    """

    PRE = "pre"
    PARALLEL = "parallel"
    PARALLEL_TWO_NORMS = "parallel-two-norms"
    SANDWICH = "sandwich"
    POST = "post"
    POST_LAYER = "post-layer"


class Activation(StrEnum):
    """The activation function, by the name of its code in transformers."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU_NEW = "gelu_new"  # tanh written out in Python: more saved tensors than GELU_TANH
    GELU_FAST = "gelu_fast"
    GELU_BLOOM = "gelu_bloom"  # its own autograd function
    RELU = "relu"
    RELU2 = "relu2"
    QUICK_GELU = "quick_gelu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A matrix product: weight [out_features, in_features], or transposed where `conv1d` (GPT-2's Conv1D).

    subclass: its class is not nn.Linear itself but a subclass of it, which bitsandbytes under transformers 5 leaves
        alone and LoRA adapts all the same (Falcon's linears, the router of Phi's experts).
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    conv1d: bool = False
    subclass: bool = False

    @property
    def num_parameters(self) -> int:
        """Weight and bias."""
        return self.out_features * (self.in_features + self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A normalisation over the last axis of `size`; `weight` and `bias` say whether it has them."""

    name: str
    size: int
    kind: NormKind
    weight: bool = True
    bias: bool = False
    # rows of a weight that has one row per head (Cohere's and StableLM's query-key norms): weight [heads, size]
    heads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """A table [rows, size] that is looked up."""

    name: str
    rows: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Softmax attention with `num_heads` queries over `num_kv_heads` keys and values.

    projections: in the order in which the code calls them: (q, k, v), or one fused matrix.
    fused: how one matrix is cut:
        None: separate matrices;
        `chunk`: split along the last axis, views;
        `slices`: one slice each, whose gradients are added (Phi 3);
        `per-head`: viewed as [heads, 3 * head_dim], then split; BLOOM and Falcon select;
        `per-group`: viewed as [groups, heads per group + 2, head_dim], then sliced; queries are copied (InternLM 2);
        `per-group-expanded`: the same, and keys and values are copied to every head (Falcon-40B).
    code: the family whose attention runs:
        `llama`: one of transformers' attention functions; the eager one has its softmax in fp32, cast back;
        `gpt2`: the same, eager softmax in the type of the scores; `gptj`: the same, eager scores in fp32;
        `opt`: queries scaled by a product of their own, then as llama;
        `gpt_neo`: eager or flash only, scores in fp32, causal by `where`;
        `bloom`: eager only, baddbmm onto alibi;
        `mpt`: eager only, alibi added;
        `falcon`: its own sdpa and eager, without dropout where there is no alibi;
        `gpt_oss`: one of the attention functions, sinks joined to the scores by cat in the eager one.
    rotary_code: the family whose `apply_rotary_pos_emb` runs:
        `llama`; `olmo`: tables and products in fp32, cast back; `phi3`: part of the head, joined by cat;
        `phi`: the same, queries and keys joined after both have been rotated, in the attention itself;
        `gpt_neox`: as phi, in a function;
        `cohere`: interleaved, all in fp32; `glm`: interleaved, tables repeated in every layer, cat;
        `helium`: as glm, without cat; `ernie4_5`: as helium, in fp32;
        `gptj`: before the transpose, tables repeated for queries and for keys; `gpt_oss`: tables of half a head;
        `chatglm`: part of the head, even and odd channels joined by stack, cat.
    """

    projections: tuple[Linear, ...]
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    fused: str | None = None
    rotary: RotaryKind = RotaryKind.HALF
    rotary_dim: int | None = None  # None: the whole head
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_each_projection: bool = (
        False  # each is normed before the next is computed (Qwen 3, OLMo 2)
    )
    views_last: bool = False  # all are computed before one is viewed as heads (StableLM, OLMo)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = (
        False  # one learned logit per head (gpt-oss): parameter `self_attn.sinks` [num_heads]
    )
    alibi: bool = False
    dropout: float = 0.0
    output_dropout: float = 0.0
    clip_qkv: float | None = None
    # the code joins rotated and passed channels with cat, even where all rotate (Phi, GPT-NeoX)
    rotary_concat: bool = False
    code: str = "llama"
    rotary_code: str = "llama"
    norm_after_rotary: bool = False  # query-key norms come after the rotary embedding (Hunyuan)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek): low-rank queries where q_a is not None, low-rank keys and values.

    kv_a gives [kv_lora_rank + rope_head_dim]; kv_b gives [num_heads x (nope_head_dim + value_head_dim)].
    rotary_code: `deepseek_v2` (complex numbers in fp32), `deepseek_v3` (even and odd slices, cat) or `llama`.
    """

    q: Linear | None
    q_a: Linear | None
    q_a_norm: Norm | None
    q_b: Linear | None
    kv_a: Linear
    kv_a_norm: Norm
    kv_b: Linear
    output: Linear
    num_heads: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    rotary: RotaryKind
    dropout: float = 0.0
    rotary_code: str = "deepseek_v3"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """A feed-forward block: gated (gate, up, down), gated with one fused gate_up matrix, or plain (up, down)."""

    gate: Linear | None
    up: Linear  # the fused gate_up matrix where `fused_gate_up`
    down: Linear
    activation: Activation
    fused_gate_up: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedExperts:
    """How transformers 4.x stores the weights of a mixture of experts.

    listed: one module per expert; False where 4.x has fused tensors too (gpt-oss, Granite).
    renames: beginnings of names, that of transformers 5 and that of 4.x, applied in order, the first match only.
    registration: order of creation in the layer, by names of transformers 5; empty: as in 5.
    expert_registration: the same inside one expert.
    """

    listed: bool = True
    router_is_linear: bool = True
    renames: tuple[tuple[str, str], ...] = ()
    registration: tuple[str, ...] = ()
    expert_registration: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """A mixture of experts.

    flavour: the family whose code computes it: `mixtral`, `qwen2_moe`, `deepseek_v3`, `gpt_oss`, ...
    router_is_linear: an nn.Linear, which all-linear and quantization see; else a parameter of a module of its own.
    expert: one expert, with names relative to it (`gate_proj`, `up_proj`, `down_proj`).
    experts_name: `mlp.experts`; fused storage is [E, 2I, H] `gate_up_proj` and [E, H, I] `down_proj` below it.
    experts_transposed: fused storage is [E, H, 2I] and [E, I, H] (gpt-oss).
    router_correction_bias: name of a parameter [1, E] that takes no gradient (ERNIE).
    shared, shared_gate: experts that see every token, as one MLP; the gate scales it by a sigmoid (Qwen 2).
    normalise: the chosen weights are divided by their sum (where the family has a choice: `norm_topk_prob`).
    num_groups, groups_per_token: a token's experts are chosen within its best groups (DeepSeek).
    """

    flavour: str
    router: Linear
    router_is_linear: bool
    expert: MlpSpec
    experts_name: str
    num_experts: int
    experts_per_token: int
    expert_bias: bool = False
    experts_transposed: bool = False
    shared: MlpSpec | None = None
    shared_gate: Linear | None = None
    router_correction_bias: str | None = None
    normalise: bool = True
    num_groups: int = 1
    groups_per_token: int = 1
    v4: ListedExperts = ListedExperts()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One decoder layer; layers with equal specs are alike in every byte.

    code: the family whose layer runs, where it differs from others of its layout in what it keeps alive:
        `gpt2`: the result of the attention stays until the layer returns;
        `stablelm`: that and the first norm's; residual first where parallel;
        `cohere`: parallel, residual first;
        `opt`: as llama, with views of [tokens, H] around the feed-forward;
        `falcon`: branches added in place, one dropout on their sum;
        `bloom`, `mpt`: the branches add the residual themselves.
    """

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MlpSpec | MoeSpec
    layout: ResidualLayout
    norms: tuple[Norm, ...]  # in the order in which the forward pass uses them
    residual_dropout: float = 0.0  # on what each branch adds; on their sum in Falcon
    residual_multiplier: bool = False  # Granite scales each branch
    code: str = "llama"
    # names of modules in the order in which the layer's class creates them; `model.named_parameters()` follows it
    registration: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only language model with its head.

    layers: one entry per layer, in order; equal layers are the same object.
    head: the output matrix; its weight is the embedding's where `tied`.
    head_normalized: its rows are normalised in every forward pass, into a copy (Baichuan 2).
    """

    id: str
    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    layer_prefix: str  # "model.layers.{}." : index put in, then the relative name
    head: Linear
    tied: bool
    final_norm: Norm | None
    position_embedding: EmbeddingSpec | None = None
    embedding_norm: Norm | None = None
    embedding_projections: tuple[Linear, ...] = ()  # OPT-350M: project_in, project_out
    embedding_dropout: float = 0.0
    embedding_scaled: bool = False  # Gemma multiplies by sqrt(H), Granite by a constant
    logit_softcap: float | None = None
    logits_scaled: bool = False  # Cohere, Granite
    max_positions: int | None = None
    checkpoint_dtype: str | None = None  # torch_dtype of the config
    checkpoint_quantization: str | None = (
        None  # `quant_method` of a checkpoint that is stored quantized
    )
    head_normalized: bool = False
    rotary_dim: int = 0  # width of the cos and sin tables; 0 without rotary
    rotary_tables: int = (
        1  # pairs of tables per forward pass: 2 where sliding layers have their own
    )
    # absolute names of the modules around the layers in the order of creation, "layers" standing for the layers;
    # empty: embedding, positions, layers, final norm, head
    registration: tuple[str, ...] = ()
