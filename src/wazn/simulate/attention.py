"""Softmax attention as the families write it around one of transformers' attention functions.

Shapes: B batch, h query heads, g key-value heads, S tokens, d head size. Queries come as [B, h, S,
d], keys and values as [B, g, S, d]. Families with an attention of their own are in `attention_own`,
latent attention in `latent_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from wazn.dtypes import BOOL, FLOAT32, INT64
from wazn.errors import Unsupported
from wazn.facts.stacks import Habits
from wazn.model.spec import AttentionSpec, RotaryKind
from wazn.recipe import Attention
from wazn.simulate.attention_kernels import (
    HEADS_FIRST,
    GradientLayout,
    Shape,
    flash_attn,
    matmul_heads,
    scaled_dot_product_attention,
    to_heads,
)
from wazn.simulate.context import Context
from wazn.simulate.modules import Module
from wazn.simulate.ops import (
    add,
    cat,
    clamp_in_place,
    contiguous,
    dropout,
    expand,
    expand_copy,
    max_of_rows,
    mul_scalar,
    narrow,
    pad,
    pointwise_of_result,
    softmax,
    split,
    sub,
    to,
)
from wazn.simulate.rotary import ROTARY
from wazn.simulate.tape import Parameter, Tape, Tensor

__all__ = ["Attended", "AttentionModule", "attend", "implementation", "look_for_packing"]

Attended = tuple[Tensor, "Tensor | None"]


def implementation(habits: Habits, asked: Attention) -> Attention:
    """Return what runs: transformers falls back to eager where a class does not know
    `scaled_dot_product_attention`.
    """
    return Attention.EAGER if asked is Attention.SDPA and habits.eager_attention else asked


class AttentionModule:
    """Projections, norms, rotary embedding, one of the attention functions, output (LlamaAttention and its kin)."""

    __slots__ = (
        "_heads_first",
        "_norms_between",
        "_rotated_layout",
        "k_norm",
        "output",
        "projections",
        "q_norm",
        "sinks",
        "spec",
    )

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        projections: tuple[Module, ...],
        output: Module,
        q_norm: Module | None,
        k_norm: Module | None,
        sinks: Parameter | None = None,
    ) -> None:
        if spec.alibi:  # Baichuan 13B
            raise Unsupported(
                "attention with alibi in code of its own is counted, and not run yet",
                hint="Baichuan 7B, which rotates its positions, is weighed",
            )
        self.spec = spec
        self.projections = projections
        self.output = output
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sinks = sinks
        self._norms_between = q_norm is not None and not (
            spec.norm_each_projection or spec.norm_after_rotary
        )
        rotates = spec.rotary is not RotaryKind.NONE
        # what `cat` joins after the transpose lies in memory as [B, h, S, d]
        joined = spec.rotary_concat or spec.rotary_code == "gpt_oss"
        # rotary slices fill zeros in the order [B, h, S, d], those of GPT-J before the transpose
        before = GradientLayout(spec.rotary_code != "gptj")
        self._rotated_layout = before if rotates else None
        self._heads_first = rotates and joined and spec.rotary_code != "gptj"

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]; returns [B, S, H] and the attention weights, where the function makes them."""
        tape, spec = context.tape, self.spec
        layout = GradientLayout()
        query, key, value = self._project(context, x, layout)
        if spec.rotary is not RotaryKind.NONE:
            tape.label = "rotary"
            cos, sin = context.tables(spec.window)
            query, key, *_parts = ROTARY[spec.rotary_code](tape, query, key, cos, sin, spec)
        if spec.norm_after_rotary and self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(tape, query)
            key = self.k_norm(tape, key)
        key, value = context.remember(key, value)
        if context.habits.rotary_stored:  # GPT-NeoX stored its tables in fp32
            query, key = to(tape, query, value.dtype), to(tape, key, value.dtype)
        num_kv_heads = spec.num_kv_heads
        if spec.rotary_code == "chatglm" and num_kv_heads < spec.num_heads:
            key, value, num_kv_heads = self._repeated(tape, key, value)
        tape.label = "attention"
        core = partial(
            attend,
            context,
            spec,
            shape=Shape(
                context.micro_batch,
                context.seq_len,
                spec.num_heads,
                num_kv_heads,
                spec.head_dim,
                spec.head_dim,
            ),
            heads_first=self._heads_first,
            layout=layout,
            sinks=self.sinks,
        )
        if context.checkpoint_attention:
            # Megatron's selective recomputation: core_attention is a checkpointed call, whose inputs are kept
            out, weights = tape.checkpoint(lambda *heads: core(*heads)[0], query, key, value), None
        else:
            out, weights = core(query, key, value)
        out = self.output(tape, out)
        tape.label = "attention.dropout"
        out = dropout(tape, out, spec.output_dropout)
        return out, None if context.habits.own_attention_code else weights  # nobody asked for them

    def _repeated(self, tape: Tape, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
        """Copy keys and values to every query head before any attention function (ChatGLM)."""
        groups = self.spec.num_heads // self.spec.num_kv_heads
        key = expand_copy(tape, key, key.numel * groups)
        value = expand_copy(tape, value, value.numel * groups)
        return key, value, self.spec.num_heads

    def _project(
        self, context: Context, x: Tensor, layout: GradientLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as heads. `layout`: of the gradients that the attention function gives."""
        tape, spec = context.tape, self.spec
        rotated = self._rotated_layout or layout
        # keys and values that were copied are heads first, and so are their gradients
        values = HEADS_FIRST if context.cache_copies else layout
        rotated_keys = self._rotated_layout or values
        if context.copies_keys and not self._rotated_layout:
            rotated_keys = GradientLayout(True)
        if spec.num_kv_heads == 1:  # a single head is both orders at once
            rotated_keys = values = GradientLayout()
        elif rotated is layout and context.micro_batch == 1 and spec.num_kv_heads == spec.num_heads:
            rotated_keys = (
                GradientLayout()
            )  # what a product gives for transposed keys can be viewed
        if spec.fused is not None:
            qkv = self.projections[0](tape, x)
            return _cut_fused(tape, qkv, spec, rotated, rotated_keys, values)
        q_proj, k_proj, v_proj = self.projections
        if spec.views_last:
            query, key, value = self._projected(tape, x)
            query = to_heads(tape, query, rotated)
            key = to_heads(tape, key, rotated_keys)
            value = to_heads(tape, value, values)
        else:
            query = q_proj(tape, x)
            if spec.code == "opt":
                query = mul_scalar(tape, query)
            query = to_heads(tape, query, rotated)
            if spec.norm_each_projection and self.q_norm is not None:
                query = self.q_norm(tape, query)
            key = to_heads(tape, k_proj(tape, x), rotated_keys)
            if spec.norm_each_projection and self.k_norm is not None:
                key = self.k_norm(tape, key)
            value = to_heads(tape, v_proj(tape, x), values)
        if self._norms_between:
            assert self.q_norm is not None
            assert self.k_norm is not None
            query = self.q_norm(tape, query)
            key = self.k_norm(tape, key)
        return query, key, value

    def _projected(self, tape: Tape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before any is viewed as heads: normed whole or per head, clipped."""
        spec = self.spec
        q_proj, k_proj, v_proj = self.projections
        query = q_proj(tape, x)
        if spec.norm_each_projection and self.q_norm is not None:
            query = self.q_norm(tape, query)
        key = k_proj(tape, x)
        if spec.norm_each_projection and self.k_norm is not None:
            key = self.k_norm(tape, key)
        value = v_proj(tape, x)
        if spec.clip_qkv is not None:
            query = clamp_in_place(tape, query)
            key = clamp_in_place(tape, key)
            value = clamp_in_place(tape, value)
        return query, key, value


def _cut_fused(
    tape: Tape,
    qkv: Tensor,
    spec: AttentionSpec,
    queries_layout: GradientLayout,
    keys_layout: GradientLayout,
    values_layout: GradientLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as heads: views by split or chunk, or by one slice each."""
    tokens = qkv.numel // (spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads))
    queries = tokens * spec.num_heads * spec.head_dim
    keys = tokens * spec.num_kv_heads * spec.head_dim
    if spec.fused == "per-group":
        # InternLM 2: as [groups, heads per group], a slice cannot be viewed as [heads] again
        query = contiguous(tape, narrow(tape, qkv, queries))
        return query, narrow(tape, qkv, keys), narrow(tape, qkv, keys)
    if spec.fused == "per-head":  # transposed, then split: the gradient is joined heads first
        query, key, value = split(tape, to_heads(tape, qkv, HEADS_FIRST), (queries, keys, keys))
        return query, key, value
    if spec.fused == "slices":
        query, key, value = (
            narrow(tape, qkv, queries),
            narrow(tape, qkv, keys),
            narrow(tape, qkv, keys),
        )
    else:
        query, key, value = split(tape, qkv, (queries, keys, keys))
    return (
        to_heads(tape, query, queries_layout),
        # what a product gives for transposed keys can be viewed as [B, S, H]
        to_heads(tape, key, keys_layout) if keys_layout is not values_layout else key,
        to_heads(tape, value, values_layout),
    )


def attend(
    context: Context,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    heads_first: bool,
    layout: GradientLayout,
    sinks: Tensor | None = None,
) -> Attended:
    """Call the attention function and merge the heads; returns [B, S, h * e] and the weights of eager attention."""
    match implementation(context.habits, context.attention):
        case Attention.FLASH:
            return _flash(context, query, key, value, shape, heads_first, layout), None
        case Attention.EAGER:
            layout.heads_first = shape.num_heads > 1
            return _eager(context, spec, query, key, value, shape, heads_first, sinks)
        case _:
            out = _sdpa(
                context, spec, query, key, value, shape, heads_first=heads_first, layout=layout
            )
            return out, None


def _sdpa(
    context: Context,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    heads_first: bool,
    layout: GradientLayout,
) -> Tensor:
    """transformers' sdpa_attention_forward.

    Grouped heads are repeated where the stack does so, a mask is given or heads are too wide; some releases then
    copy what is a transposed view.
    """
    tape, habits = context.tape, context.habits
    mask = context.mask(spec.window)
    groups = shape.num_heads // shape.num_kv_heads
    can_group = not habits.repeat_kv and mask is None
    enable_gqa = groups > 1 and can_group and shape.head_dim == shape.value_dim <= 256
    copied = context.cache_copies
    if groups > 1 and not enable_gqa:
        copied = shape.num_kv_heads > 1
        repeat = expand_copy if copied else expand  # one head: a view
        key = repeat(tape, key, key.numel * groups)
        value = repeat(tape, value, value.numel * groups)
        layout.heads_first = copied
        shape = shape._replace(num_kv_heads=shape.num_heads)
    if habits.contiguous_qkv and shape.num_heads > 1:
        query = query if heads_first else contiguous(tape, query)
        if not copied and (shape.num_kv_heads > 1 or spec.fused is not None):
            joined = heads_first and (groups == 1 or enable_gqa)  # what `cat` made is contiguous
            key = key if joined else contiguous(tape, key)
            value = contiguous(tape, value)
        heads_first = layout.heads_first = True
    out, out_heads_first = scaled_dot_product_attention(
        tape,
        query,
        key,
        value,
        mask,
        shape,
        probability=spec.dropout,
        capability=context.capability,
        enable_gqa=enable_gqa,
        heads_first=heads_first,
        layout=layout,
    )
    if out_heads_first and shape.num_heads > 1:
        out = contiguous(tape, out)
    return out


def _flash(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    heads_first: bool,
    layout: GradientLayout,
) -> Tensor:
    """transformers' flash_attention_forward without padding; what is in fp32 under autocast is cast."""
    tape = context.tape
    cuts = shape.value_dim != shape.head_dim
    if cuts:  # latent attention: values are padded to the heads of the queries, the result is cut
        value = pad(tape, value, value.numel // shape.value_dim * shape.head_dim)
    if query.dtype is FLOAT32 and tape.autocast_dtype is not None:
        lower = tape.autocast_dtype
        query, key, value = to(tape, query, lower), to(tape, key, lower), to(tape, value, lower)
    layout.heads_first = shape.num_heads > 1 and shape.head_dim % 8 != 0  # gradients are cut
    look_for_packing(context)
    out = flash_attn(tape, query, key, value, shape)
    if cuts:
        out = narrow(tape, out, shape.num_rows * shape.value_dim)
    if shape.num_heads > 1 and (heads_first or cuts or shape.head_dim % 8):
        out = contiguous(tape, out)
    return out


def look_for_packing(context: Context) -> None:
    """_is_packed_sequence: with one sample and its position ids, arange + min, less the ids, abs,
    sum, bool; all freed again.
    """
    if context.micro_batch != 1 or context.position_ids is None:
        return
    tape, tokens = context.tape, context.seq_len
    arange, smallest = tape.new(tokens, INT64), tape.new(1, INT64)
    increasing = tape.new(tokens, INT64)
    del smallest, arange
    difference = tape.new(tokens, INT64)
    distance = tape.new(tokens, INT64)
    del difference
    total = tape.new(1, INT64)
    del distance
    tape.new(1, BOOL)
    del total, increasing


def _eager(
    context: Context,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    heads_first: bool,
    sinks: Tensor | None,
) -> Attended:
    """eager_attention_forward of the families; the weights live as long as the caller keeps them."""
    tape = context.tape
    groups = shape.num_heads // shape.num_kv_heads
    copied = groups > 1 and shape.num_kv_heads > 1
    if groups > 1:
        repeat = expand_copy if copied else expand  # a single head is repeated by a view
        key = repeat(tape, key, key.numel * groups)
        value = repeat(tape, value, value.numel * groups)
    copy_key = not copied and (not heads_first or groups > 1)
    weights = _scores(tape, spec, query, key, shape, heads_first, copy_key)
    if spec.softcap is not None:
        weights = mul_scalar(tape, weights)
        weights = pointwise_of_result(tape, weights)
        weights = mul_scalar(tape, weights)
    mask = context.mask(spec.window)
    if mask is not None:
        weights = add(tape, weights, mask)
    if sinks is None:
        softmax_of = _PROBABILITIES.get(spec.code, _fp32_softmax)
        weights = softmax_of(tape, weights, query, value)
        weights = dropout(tape, weights, spec.dropout)
    else:  # the name of the scores is bound again once what comes of them has been cast
        _combined, probabilities = _softmax_with_sinks(tape, weights, sinks, context)
        scores = narrow(tape, probabilities, weights.numel)
        weights = to(tape, dropout(tape, scores, spec.dropout), value.dtype)
    out = matmul_heads(
        tape,
        weights,
        value,
        shape,
        numel=shape.num_rows * shape.value_dim,
        copy_a=False,
        copy_b=not copied,
        merged=True,
    )
    if shape.num_heads > 1:
        out = contiguous(tape, out)
    return out, weights


def _scores(
    tape: Tape,
    spec: AttentionSpec,
    query: Tensor,
    key: Tensor,
    shape: Shape,
    heads_first: bool,
    copy_key: bool,
) -> Tensor:
    numel = shape.num_rows * shape.seq_len
    copy_query = not heads_first
    if spec.code == "gptj":
        return mul_scalar(
            tape,
            matmul_heads(
                tape,
                to(tape, query, FLOAT32),
                to(tape, key, FLOAT32),
                shape,
                numel=numel,
                copy_a=copy_query,
                copy_b=copy_key,
            ),
        )
    return mul_scalar(
        tape,
        matmul_heads(
            tape,
            query,
            key,
            shape,
            numel=numel,
            copy_a=copy_query,
            copy_b=copy_key,
        ),
    )


def _fp32_softmax(
    tape: Tape,
    weights: Tensor,
    query: Tensor,
    value: Tensor,
) -> Tensor:
    """softmax(weights, dtype=float32).to(query.dtype)."""
    return to(tape, softmax(tape, weights, FLOAT32), query.dtype)


def _own_softmax(
    tape: Tape,
    weights: Tensor,
    query: Tensor,
    value: Tensor,
) -> Tensor:
    """softmax(weights) in the type of the scores, fp32 under autocast, then the type of the values (GPT-2, GPT-J)."""
    dtype = weights.dtype if tape.autocast_dtype is None else FLOAT32
    weights = softmax(tape, weights, dtype)
    return to(tape, weights, value.dtype)


def _softmax_with_sinks(
    tape: Tape,
    weights: Tensor,
    sinks: Tensor,
    context: Context,
) -> tuple[Tensor, Tensor]:
    """A column of learned logits joins the scores (GPT-OSS); return what both were joined to, which keeps its name, and
    its softmax.
    """
    rows = weights.numel // context.seq_len
    expanded = expand(tape, sinks, rows)
    combined = cat(tape, (weights, expanded))
    combined = sub(tape, combined, max_of_rows(tape, combined, rows))
    return combined, softmax(tape, combined, combined.dtype)


_PROBABILITIES: dict[str, Callable[..., Tensor]] = {
    "gpt2": _own_softmax,
    "gptj": _own_softmax,
}
