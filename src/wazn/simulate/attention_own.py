"""Families that write their attention themselves: Falcon, BLOOM, MPT, GPT-Neo (transformers 5.24).

Shapes as in `attention`. All of them return the result [B, S, H] and the attention weights, where they make them.
"""

from __future__ import annotations

from wazn.dtypes import BOOL, FLOAT32, Dtype
from wazn.model.spec import AttentionSpec, RotaryKind
from wazn.recipe import Attention
from wazn.simulate.attention import look_for_packing
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
    autocast,
    baddbmm,
    clamp,
    contiguous,
    div_scalar_in_place,
    dropout,
    expand_copy,
    masked_fill,
    mul_scalar,
    narrow,
    softmax,
    split,
    take,
    to,
    where,
)
from wazn.simulate.rotary import ROTARY
from wazn.simulate.tape import Tape, Tensor

__all__ = [
    "OWN_ATTENTION",
    "BloomAttention",
    "FalconAttention",
    "GptNeoAttention",
    "MptAttention",
    "OwnAttention",
]

Attended = tuple[Tensor, "Tensor | None"]


class OwnAttention:
    """What they share: projections, output, sizes."""

    __slots__ = ("output", "projections", "spec")

    def __init__(
        self, spec: AttentionSpec, *, projections: tuple[Module, ...], output: Module
    ) -> None:
        self.spec = spec
        self.projections = projections
        self.output = output

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]; returns the result and the attention weights."""
        raise NotImplementedError

    def shape(self, context: Context, num_kv_heads: int | None = None) -> Shape:
        """Return B, S, h, g, d, e."""
        spec = self.spec
        return Shape(
            context.micro_batch,
            context.seq_len,
            spec.num_heads,
            spec.num_kv_heads if num_kv_heads is None else num_kv_heads,
            spec.head_dim,
            spec.head_dim,
        )


class FalconAttention(OwnAttention):
    """FalconAttention: a mask is always handed to `scaled_dot_product_attention`, keys and values
    never repeated for it.
    """

    __slots__ = ()

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]."""
        tape, spec = context.tape, self.spec
        fused_qkv = self.projections[0](tape, x)
        tape.label = "attention.split"
        query, key, value = self._split_heads(tape, fused_qkv)
        if spec.rotary is not RotaryKind.NONE:
            tape.label = "rotary"
            cos, sin = context.tables(None)
            query, key, *_ = ROTARY[spec.rotary_code](tape, query, key, cos, sin, spec)
        key, value = context.remember(key, value)
        tape.label = "attention"
        expanded = spec.fused == "per-group-expanded"
        shape = self.shape(context, spec.num_heads if expanded else None)
        weights: Tensor | None = None
        if context.attention is Attention.FLASH:
            if query.dtype is FLOAT32 and tape.autocast_dtype is not None:
                lower = tape.autocast_dtype
                query, key, value = (
                    to(tape, query, lower),
                    to(tape, key, lower),
                    to(tape, value, lower),
                )
            look_for_packing(context)
            out = flash_attn(tape, query, key, value, shape)
        elif context.attention is Attention.EAGER:
            out, weights = self._eager(context, query, key, value, shape, x.dtype)
        else:
            out, heads_first = scaled_dot_product_attention(
                tape,
                query,
                key,
                value,
                context.masks.get(None),
                shape,
                probability=spec.dropout if spec.alibi else 0.0,
                capability=context.capability,
                enable_gqa=False,
                heads_first=False,
                layout=GradientLayout(),
            )
            if heads_first and shape.num_heads > 1:
                out = contiguous(tape, out)
        out = self.output(tape, out)
        return out, weights

    def _split_heads(self, tape: Tape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        tokens = qkv.numel // (spec.head_dim * (spec.num_heads + 2 * spec.num_kv_heads))
        queries = tokens * spec.num_heads * spec.head_dim
        keys = tokens * spec.num_kv_heads * spec.head_dim
        query = narrow(tape, qkv, queries)
        if spec.fused == "per-head" and spec.num_kv_heads > 1:  # selected
            return query, narrow(tape, qkv, keys), narrow(tape, qkv, keys)
        key = take(tape, qkv, keys)
        value = take(tape, qkv, keys)
        if spec.fused != "per-group-expanded":
            return query, key, value
        # broadcast to the groups' queries, then flattened to heads
        flat = [contiguous(tape, query) if spec.num_kv_heads > 1 else query]
        flat += [expand_copy(tape, states, queries) for states in (key, value)]
        query, key, value = flat
        return query, key, value

    def _eager(
        self,
        context: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shape: Shape,
        dtype: Dtype,
    ) -> Attended:
        """dtype: of the hidden states, in which the softmax is."""
        tape, spec = context.tape, self.spec
        groups = shape.num_heads // shape.num_kv_heads
        numel = shape.num_rows * shape.seq_len
        scores = matmul_heads(
            tape, query, key, shape, numel=numel, copy_a=True, copy_b=True, groups=groups
        )
        if spec.alibi:
            assert context.alibi is not None
            matmul_result = scores  # noqa: F841 - a name of the real code, alive to its end
            scores = to(tape, scores, FLOAT32)
            logits = add(tape, scores, context.alibi)
            logits = div_scalar_in_place(tape, logits)
            weights = softmax(tape, add(tape, logits, context.masks[None]), dtype)
            weights = dropout(tape, weights, spec.dropout)
        else:
            scores = div_scalar_in_place(tape, scores)
            weights = softmax(tape, add(tape, scores, context.masks[None]), dtype)
        out = matmul_heads(
            tape,
            weights,
            value,
            shape,
            numel=query.numel,
            copy_a=False,
            copy_b=True,
            groups=groups,
            merged=True,
        )
        if shape.num_heads > 1:
            out = contiguous(tape, out)
        return out, weights


class BloomAttention(OwnAttention):
    """BloomAttention: baddbmm onto alibi, eager only; adds the residual itself."""

    __slots__ = ()

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """Not how BLOOM's layer calls it; see `with_residual`."""
        return self.with_residual(context, x, None)

    def with_residual(self, context: Context, x: Tensor, residual: Tensor | None) -> Attended:
        """x and residual: [B, S, H]."""
        tape, spec = context.tape, self.spec
        shape = self.shape(context)
        fused_qkv = self.projections[0](tape, x)
        tape.label = "attention"
        third = fused_qkv.numel // 3
        query, key, value = (
            narrow(tape, fused_qkv, third),
            narrow(tape, fused_qkv, third),
            narrow(tape, fused_qkv, third),
        )
        key, value = context.remember(key, value)
        if shape.micro_batch > 1 and shape.num_heads > 1:
            query = contiguous(tape, query)
            if not context.cache_copies:
                key = contiguous(tape, key)
                value = contiguous(tape, value)
        scores = self._scores(context, query, key, shape)
        weights = add(tape, scores, context.masks[None])
        probabilities = to(tape, softmax(tape, weights, FLOAT32), query.dtype)
        probabilities = dropout(tape, probabilities, spec.dropout)
        out = matmul_heads(
            tape,
            probabilities,
            value,
            shape,
            numel=query.numel,
            copy_a=False,
            copy_b=False,
            merged=True,
        )
        if shape.num_heads > 1:
            out = contiguous(tape, out)
        out = self.output(tape, out)
        tape.label = "residual"
        added = dropout(tape, out, spec.output_dropout)
        if residual is not None:
            added = add(tape, residual, added)
        return added, probabilities

    def _scores(self, context: Context, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
        assert context.alibi is not None
        tape, alibi = context.tape, context.alibi
        if tape.autocast_dtype is not None:
            key, query, alibi = autocast(tape, key), autocast(tape, query), autocast(tape, alibi)
        return baddbmm(tape, query, key, numel=shape.num_rows * shape.seq_len)


class MptAttention(OwnAttention):
    """MptAttention: alibi added to the scores, masked by `masked_fill`, eager only."""

    __slots__ = ()

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]."""
        tape, spec = context.tape, self.spec
        shape = self.shape(context)
        mixed_qkv = self.projections[0](tape, x)
        tape.label = "attention"
        if spec.clip_qkv is not None:
            mixed_qkv = clamp(tape, mixed_qkv)
        third = mixed_qkv.numel // 3
        query, key, value = split(tape, mixed_qkv, (third, third, third))
        query = to_heads(tape, query, HEADS_FIRST)
        value = to_heads(tape, value, HEADS_FIRST)
        numel = shape.num_rows * shape.seq_len
        scores = mul_scalar(
            tape,
            matmul_heads(tape, query, key, shape, numel=numel, copy_a=True, copy_b=True),
        )
        assert context.alibi is not None
        scores = add(tape, scores, context.alibi)
        scores = masked_fill(tape, scores, context.masks[None])
        weights = to(tape, softmax(tape, to(tape, scores, FLOAT32), FLOAT32), value.dtype)
        weights = dropout(tape, weights, spec.dropout)
        out = matmul_heads(
            tape, weights, value, shape, numel=query.numel, copy_a=False, copy_b=True, merged=True
        )
        if shape.num_heads > 1:
            out = contiguous(tape, out)
        out = self.output(tape, out)
        return out, weights


class GptNeoAttention(OwnAttention):
    """GPTNeoSelfAttention: scores in fp32, causal by `where`; or the package flash-attn."""

    __slots__ = ()

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]."""
        tape, spec = context.tape, self.spec
        q_proj, k_proj, v_proj = self.projections
        is_eager = context.attention is not Attention.FLASH
        query = q_proj(tape, x)
        key = k_proj(tape, x)
        if is_eager and context.micro_batch > 1:
            key = to_heads(tape, key, HEADS_FIRST)
        value = v_proj(tape, x)
        tape.label = "attention"
        if is_eager:
            query = to_heads(tape, query, HEADS_FIRST)
            value = to_heads(tape, value, HEADS_FIRST)
        key, value = context.remember(key, value)
        weights: Tensor | None = None
        if context.attention is Attention.FLASH:
            if query.dtype is FLOAT32 and tape.autocast_dtype is not None:
                lower = tape.autocast_dtype
                query, key, value = (
                    to(tape, query, lower),
                    to(tape, key, lower),
                    to(tape, value, lower),
                )
            out = flash_attn(tape, query, key, value, self.shape(context))
            weights = out
        else:
            out, weights = self._attn(context, query, key, value)
            if spec.num_heads > 1:
                out = contiguous(tape, out)
        out = self.output(tape, out)
        tape.label = "attention.dropout"
        out = dropout(tape, out, spec.output_dropout)
        return out, weights

    def _attn(self, context: Context, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        tape, shape = context.tape, self.shape(context)
        query = to(tape, query, FLOAT32)
        key = to(tape, key, FLOAT32)
        numel = shape.num_rows * shape.seq_len
        copy = not context.cache_copies
        weights = matmul_heads(tape, query, key, shape, numel=numel, copy_a=True, copy_b=copy)
        mask_value = tape.new(1, weights.dtype)
        causal_mask = Tensor(None, context.seq_len * context.seq_len, BOOL)  # a slice of a buffer
        weights = where(tape, causal_mask, weights)
        weights = add(tape, weights, context.masks[None])
        weights = softmax(tape, weights, weights.dtype if tape.autocast_dtype is None else FLOAT32)
        weights = to(tape, weights, value.dtype)
        weights = dropout(tape, weights, self.spec.dropout)
        out = matmul_heads(
            tape, weights, value, shape, numel=value.numel, copy_a=False, copy_b=copy, merged=True
        )
        del mask_value
        return out, weights


OWN_ATTENTION: dict[str, type[OwnAttention]] = {
    "bloom": BloomAttention,
    "falcon": FalconAttention,
    "gpt_neo": GptNeoAttention,
    "mpt": MptAttention,
}
