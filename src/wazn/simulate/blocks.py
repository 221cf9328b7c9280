"""Decoder layers: where norms and residual additions stand.

An attention returns its result and the weights of eager attention; a layer keeps both names until it returns, as the
classes of transformers do.
"""

from __future__ import annotations

from collections.abc import Callable

from wazn.model.spec import AttentionSpec, LayerSpec, ResidualLayout
from wazn.simulate.attention_own import BloomAttention, GptNeoAttention
from wazn.simulate.context import Context
from wazn.simulate.mlp import MlpModule
from wazn.simulate.modules import Module
from wazn.simulate.ops import add, add_in_place, dropout, mul_scalar, view
from wazn.simulate.tape import Tensor

__all__ = ["LayerModule"]

Attention = Callable[[Context, Tensor], tuple[Tensor, "Tensor | None"]]
Mlp = Callable[[Context, Tensor], Tensor]


class LayerModule:
    """One decoder layer; `checkpointed` says whether backward runs it again."""

    __slots__ = ("_run", "attention", "checkpointed", "index", "mlp", "norms", "spec")

    def __init__(
        self,
        spec: LayerSpec,
        index: int,
        *,
        attention: Attention,
        mlp: Mlp,
        norms: tuple[Module, ...],
    ) -> None:
        self.spec = spec
        self.index = index
        self.attention = attention
        self.mlp = mlp
        self.norms = norms
        self.checkpointed = False
        self._run = _CODES.get((spec.code, spec.layout)) or _LAYOUTS[spec.layout]

    @property
    def window(self) -> int | None:
        """The window of its attention."""
        attention = self.spec.attention
        if not isinstance(attention, AttentionSpec) or attention.code == "gpt_neo":
            return None  # GPT-Neo hides what is outside its window by itself
        return attention.window

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        return self._run(self, context, x)


def pre_norm(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """x += attention(norm(x)); x += mlp(norm(x)) (LlamaDecoderLayer)."""
    tape, spec = context.tape, layer.spec
    first, second = layer.norms
    residual = x
    x = first(tape, x)
    x, _weights = layer.attention(context, x)
    tape.label = "residual"
    x = dropout(tape, x, spec.residual_dropout)
    x = add(tape, residual, mul_scalar(tape, x) if spec.residual_multiplier else x)
    residual = x
    x = second(tape, x)
    x = layer.mlp(context, x)
    tape.label = "residual"
    x = dropout(tape, x, spec.residual_dropout)
    return add(tape, residual, mul_scalar(tape, x) if spec.residual_multiplier else x)


def gpt2(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """As `pre_norm`; what the attention returned stays until the end (GPT2Block)."""
    tape = context.tape
    first, second = layer.norms
    residual = x
    x = first(tape, x)
    attn_output, weights = layer.attention(context, x)
    tape.label = "residual"
    x = add(tape, attn_output, residual)
    residual = x
    x = second(tape, x)
    mlp_output = layer.mlp(context, x)
    tape.label = "residual"
    output = add(tape, residual, mlp_output)
    context.layer_weights[0] = weights if isinstance(layer.attention, GptNeoAttention) else None
    return output


def opt(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """As `pre_norm`, or with the norms last; the feed-forward sees [tokens, H] (OPTDecoderLayer)."""
    tape, spec = context.tape, layer.spec
    first, second = layer.norms
    before = spec.layout is ResidualLayout.PRE
    residual = x
    if before:
        x = first(tape, x)
    x, _weights = layer.attention(context, x)
    tape.label = "residual"
    x = dropout(tape, x, spec.residual_dropout)
    x = add(tape, residual, x)
    if not before:
        x = first(tape, x)
    x = view(tape, x)
    residual = x
    held = [second(tape, x) if before else x]
    del x
    # fc1 and fc2 are called right here: nobody else holds the norm's result, as the call of an object would
    assert isinstance(layer.mlp, MlpModule)
    x = layer.mlp.__call__(context, held.pop())
    tape.label = "residual"
    x = dropout(tape, x, spec.residual_dropout)
    x = view(tape, add(tape, residual, x))
    return x if before else second(tape, x)


def stablelm(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """As `gpt2`; the first norm's result stays as well (StableLmDecoderLayer, Falcon without parallel branches)."""
    tape, spec = context.tape, layer.spec
    first, second = layer.norms
    residual = x
    x = first(tape, x)
    attn_output, weights = layer.attention(context, x)
    tape.label = "residual"
    residual = add(tape, residual, dropout(tape, attn_output, spec.residual_dropout))
    mlp_output = layer.mlp(context, second(tape, residual))
    tape.label = "residual"
    output = add(tape, residual, dropout(tape, mlp_output, spec.residual_dropout))
    context.layer_weights[0] = weights if spec.code == "falcon" else None
    return output


def bloom(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """The branches add the residual (BloomBlock)."""
    tape = context.tape
    first, second = layer.norms
    assert isinstance(layer.attention, BloomAttention)
    assert isinstance(layer.mlp, MlpModule)
    norm_output = first(tape, x)
    residual = x
    attention_output, weights = layer.attention.with_residual(context, norm_output, residual)
    norm_output = second(tape, attention_output)
    residual = attention_output
    output = layer.mlp.with_residual(context, norm_output, residual)
    context.layer_weights[0] = weights
    return output


def mpt(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """As `gpt2`; the feed-forward adds the residual (MptBlock)."""
    tape, spec = context.tape, layer.spec
    first, second = layer.norms
    assert isinstance(layer.mlp, MlpModule)
    norm_output = first(tape, x)
    residual = x
    attn_outputs, weights = layer.attention(context, norm_output)
    tape.label = "residual"
    x = add(tape, dropout(tape, attn_outputs, spec.residual_dropout), residual)
    norm_output = second(tape, x)
    residual = x
    output = layer.mlp.with_residual(context, norm_output, residual)
    context.layer_weights[0] = weights
    return output


def parallel(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """attention(norm(x)) + mlp(norm(x)) + x, with one norm (PhiDecoderLayer, GPTJBlock)."""
    tape, spec = context.tape, layer.spec
    (norm,) = layer.norms
    residual = x
    x = norm(tape, x)
    attn_output, _weights = layer.attention(context, x)
    attn_output = dropout(tape, attn_output, spec.residual_dropout)
    mlp_output = dropout(tape, layer.mlp(context, x), spec.residual_dropout)
    tape.label = "residual"
    return add(tape, add(tape, attn_output, mlp_output), residual)


def cohere(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """x + attention(norm(x)) + mlp(norm(x)), with one norm (CohereDecoderLayer, StableLM-2 12B)."""
    tape = context.tape
    (norm,) = layer.norms
    residual = x
    x = norm(tape, x)
    attn_output, _weights = layer.attention(context, x)
    mlp_output = layer.mlp(context, x)
    tape.label = "residual"
    return add(tape, add(tape, residual, attn_output), mlp_output)


def falcon(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """dropout(mlp + attention) + x, the sum in place of the mlp's result, with one norm or two (FalconDecoderLayer)."""
    tape, spec = context.tape, layer.spec
    residual = x
    attention_norm_out = layer.norms[0](tape, x)
    mlp_norm_out = layer.norms[1](tape, x) if len(layer.norms) > 1 else attention_norm_out
    attn_output, weights = layer.attention(context, attention_norm_out)
    mlp_output = layer.mlp(context, mlp_norm_out)
    tape.label = "residual"
    mlp_output = add_in_place(tape, mlp_output, attn_output)
    output = add(tape, residual, dropout(tape, mlp_output, spec.residual_dropout))
    context.layer_weights[0] = weights
    return output


def parallel_two_norms(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """mlp(norm2(x)) + attention(norm1(x)) + x (GPTNeoXLayer)."""
    tape, spec = context.tape, layer.spec
    first, second = layer.norms
    attn_output, _weights = layer.attention(context, first(tape, x))
    attn_output = dropout(tape, attn_output, spec.residual_dropout)
    mlp_output = layer.mlp(context, second(tape, x))
    mlp_output = dropout(tape, mlp_output, spec.residual_dropout)
    tape.label = "residual"
    return add(tape, add(tape, mlp_output, attn_output), x)


def sandwich(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))) (Gemma2DecoderLayer)."""
    tape = context.tape
    before_attention, after_attention, before_mlp, after_mlp = layer.norms
    residual = x
    x = before_attention(tape, x)
    x, _weights = layer.attention(context, x)
    x = after_attention(tape, x)
    tape.label = "residual"
    x = add(tape, residual, x)
    residual = x
    x = before_mlp(tape, x)
    x = layer.mlp(context, x)
    x = after_mlp(tape, x)
    tape.label = "residual"
    return add(tape, residual, x)


def post_norm(layer: LayerModule, context: Context, x: Tensor) -> Tensor:
    """x += norm(attention(x)); x += norm(mlp(x)) (Olmo2DecoderLayer)."""
    tape = context.tape
    first, second = layer.norms
    residual = x
    x, _weights = layer.attention(context, x)
    x = first(tape, x)
    tape.label = "residual"
    x = add(tape, residual, x)
    residual = x
    x = layer.mlp(context, x)
    x = second(tape, x)
    tape.label = "residual"
    return add(tape, residual, x)


_Run = Callable[[LayerModule, Context, Tensor], Tensor]
_LAYOUTS: dict[ResidualLayout, _Run] = {
    ResidualLayout.PRE: pre_norm,
    ResidualLayout.PARALLEL: parallel,
    ResidualLayout.PARALLEL_TWO_NORMS: parallel_two_norms,
    ResidualLayout.SANDWICH: sandwich,
    ResidualLayout.POST: post_norm,
}
_CODES: dict[tuple[str, ResidualLayout], _Run] = {
    ("bloom", ResidualLayout.PRE): bloom,
    ("cohere", ResidualLayout.PARALLEL): cohere,
    ("falcon", ResidualLayout.PRE): stablelm,
    ("falcon", ResidualLayout.PARALLEL): falcon,
    ("falcon", ResidualLayout.PARALLEL_TWO_NORMS): falcon,
    ("gpt2", ResidualLayout.PRE): gpt2,
    ("mpt", ResidualLayout.PRE): mpt,
    ("opt", ResidualLayout.POST_LAYER): opt,
    ("opt", ResidualLayout.PRE): opt,
    ("stablelm", ResidualLayout.PRE): stablelm,
    ("stablelm", ResidualLayout.PARALLEL): cohere,
}
