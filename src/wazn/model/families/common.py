"""What many families share: the sizes of a decoder and the modules that most of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from wazn.model.fields import MOST_LAYERS, Fields
from wazn.model.spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    Norm,
    NormKind,
)

__all__ = [
    "FULL",
    "QKVO",
    "SLIDING",
    "SPARSE_KINDS",
    "Sizes",
    "decoder",
    "gated_mlp",
    "layer_windows",
    "layers_of_kinds",
    "plain_mlp",
    "rotary_dim",
    "separate_attention",
    "sizes",
]

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
SLIDING = "sliding_attention"
FULL = "full_attention"
SPARSE_KINDS = ("dense", "sparse")

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers that every family has."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


def sizes(
    c: Fields,
    *,
    intermediate: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Sizes:
    """Read the sizes; the arguments stand in where a family derives one of them in its own way."""
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    if kv_heads is None:
        kv_heads = c.optional_count("num_key_value_heads") or heads
    if heads % kv_heads:
        c.fault(
            f"`{c.written('num_attention_heads')}` ({heads}) must be a multiple of "
            f"`{c.written('num_key_value_heads')}` ({kv_heads})",
            of=("num_attention_heads", "num_key_value_heads"),
        )
    if head_dim is None:
        head_dim = c.optional_count("head_dim")
    if head_dim is None:
        head_dim = hidden // heads
        if hidden % heads:
            c.fault(
                f"`{c.written('hidden_size')}` ({hidden}) must be a multiple of "
                f"`{c.written('num_attention_heads')}` ({heads})",
                of=("hidden_size", "num_attention_heads"),
            )
    return Sizes(
        hidden=hidden,
        intermediate=c.count("intermediate_size") if intermediate is None else intermediate,
        layers=c.count("num_hidden_layers", most=MOST_LAYERS),
        vocab=c.count("vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=c.flag("tie_word_embeddings"),
    )


def rotary_dim(c: Fields, head_dim: int, *, default: float = 1.0) -> int:
    """Return how many of a head's channels rotate: `int(head_dim * partial_rotary_factor)`.

    The factor stands in `rope_parameters` (transformers 5), in `rope_scaling`, or at the top level.
    """
    factor = c.optional_number("partial_rotary_factor")
    for key in ("rope_scaling", "rope_parameters"):
        nested = c.section(key).get("partial_rotary_factor")
        if isinstance(nested, int | float) and not isinstance(nested, bool):
            factor = float(nested)
    if factor is None:
        factor = default
    if not 0 < factor <= 1:
        c.fault(f"`partial_rotary_factor` must be above 0 and at most 1, found {factor}")
        return head_dim
    return int(head_dim * factor)


def separate_attention(
    s: Sizes,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    prefix: str = "self_attn",
    names: Sequence[str] = QKVO,
    **code: Any,
) -> AttentionSpec:
    """Attention with one matrix each for queries, keys, values and output; `code` goes to `AttentionSpec`."""
    q_size, kv_size = s.heads * s.head_dim, s.kv_heads * s.head_dim
    q, k, v, out = (f"{prefix}.{name}" for name in names)
    return AttentionSpec(
        projections=(
            Linear(name=q, in_features=s.hidden, out_features=q_size, bias=bias),
            Linear(name=k, in_features=s.hidden, out_features=kv_size, bias=bias),
            Linear(name=v, in_features=s.hidden, out_features=kv_size, bias=bias),
        ),
        output=Linear(
            name=out,
            in_features=q_size,
            out_features=s.hidden,
            bias=bias if output_bias is None else output_bias,
        ),
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        **code,
    )


def gated_mlp(
    hidden: int,
    intermediate: int,
    activation: Activation,
    *,
    bias: bool = False,
    prefix: str = "mlp.",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    dropout: float = 0.0,
) -> MlpSpec:
    """down(act(gate x) * up x)."""
    gate, up, down = (f"{prefix}{name}" for name in names)
    return MlpSpec(
        gate=Linear(name=gate, in_features=hidden, out_features=intermediate, bias=bias),
        up=Linear(name=up, in_features=hidden, out_features=intermediate, bias=bias),
        down=Linear(name=down, in_features=intermediate, out_features=hidden, bias=bias),
        activation=activation,
        dropout=dropout,
    )


def fused_gated_mlp(hidden: int, intermediate: int, activation: Activation) -> MlpSpec:
    """down(act(gate) * up), gate and up being halves of one product."""
    return MlpSpec(
        gate=None,
        up=Linear(name="mlp.gate_up_proj", in_features=hidden, out_features=2 * intermediate),
        down=Linear(name="mlp.down_proj", in_features=intermediate, out_features=hidden),
        activation=activation,
        fused_gate_up=True,
    )


def plain_mlp(
    hidden: int,
    intermediate: int,
    activation: Activation,
    *,
    up: str,
    down: str,
    bias: bool = True,
    conv1d: bool = False,
    subclass: bool = False,
    dropout: float = 0.0,
) -> MlpSpec:
    """down(act(up x))."""

    def linear(name: str, in_features: int, out_features: int) -> Linear:
        return Linear(
            name=name,
            in_features=in_features,
            out_features=out_features,
            bias=bias,
            conv1d=conv1d,
            subclass=subclass,
        )

    return MlpSpec(
        gate=None,
        up=linear(up, hidden, intermediate),
        down=linear(down, intermediate, hidden),
        activation=activation,
        dropout=dropout,
    )


def norms(
    names: Sequence[str],
    size: int,
    kind: NormKind,
    *,
    bias: bool = False,
    weight: bool = True,
    heads: Sequence[int] | None = None,
) -> tuple[Norm, ...]:
    """Norms of one kind and size; `heads` are the rows of each weight where it has one row per head."""
    rows: Sequence[int | None] = heads or (None,) * len(names)
    return tuple(
        Norm(name=name, size=size, kind=kind, bias=bias, weight=weight, heads=count)
        for name, count in zip(names, rows, strict=True)
    )


def layers_of_kinds(kinds: Iterable[K], layer: Callable[[K], LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return one layer per kind; layers of one kind are one object."""
    made: dict[K, LayerSpec] = {}
    return tuple(
        made[kind] if kind in made else made.setdefault(kind, layer(kind)) for kind in kinds
    )


def layer_windows(
    c: Fields, *, window: int | None, pattern: Callable[[int], bool], num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's sliding window: from `layer_types`, or where `pattern(index)` says that the layer slides."""
    kinds = c.per_layer("layer_types", (SLIDING, FULL), num_layers=num_layers)
    if kinds is None:
        return tuple(window if pattern(index) else None for index in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def decoder(
    c: Fields,
    s: Sizes,
    *,
    layers: tuple[LayerSpec, ...],
    norm_kind: NormKind,
    norm_name: str = "model.norm",
    norm_bias: bool = False,
    norm_weight: bool = True,
    embedding: str = "model.embed_tokens",
    layer_prefix: str = "model.layers.{}.",
    head: str = "lm_head",
    head_bias: bool = False,
    **rest: Any,
) -> ModelSpec:
    """Put the layers between an embedding and a norm with a head; `rest` goes to `ModelSpec`."""
    return ModelSpec(
        id=c.id,
        family=c.model_type,
        num_layers=s.layers,
        hidden_size=s.hidden,
        vocab_size=s.vocab,
        embedding=EmbeddingSpec(name=embedding, rows=s.vocab, size=s.hidden),
        layers=layers,
        layer_prefix=layer_prefix,
        head=Linear(name=head, in_features=s.hidden, out_features=s.vocab, bias=head_bias),
        tied=s.tied,
        final_norm=Norm(
            name=norm_name, size=s.hidden, kind=norm_kind, weight=norm_weight, bias=norm_bias
        ),
        max_positions=c.optional_count("max_position_embeddings"),
        checkpoint_dtype=c.word("dtype") or c.word("torch_dtype"),
        checkpoint_quantization=_quant_method(c),
        **rest,
    )


def _quant_method(c: Fields) -> str | None:
    method = c.section("quantization_config").get("quant_method")
    return method if isinstance(method, str) else None
