"""Attention of families that wrote it otherwise in earlier releases. Shapes as in `attention`."""

from __future__ import annotations

from wazn.dtypes import BOOL, FLOAT16, FLOAT32
from wazn.recipe import Attention
from wazn.simulate.attention import Attended, implementation
from wazn.simulate.attention_kernels import (
    HEADS_FIRST,
    GradientLayout,
    flash_attn,
    scaled_dot_product_attention,
    to_heads,
)
from wazn.simulate.attention_own import OwnAttention
from wazn.simulate.context import Context
from wazn.simulate.ops import add, contiguous, dropout, matmul, mul_scalar, softmax, to
from wazn.simulate.tape import SCALAR, Tape, Tensor

__all__ = ["OLDER_ATTENTION", "OLDER_OPT", "OlderOptAttention"]

OLDER_OPT = "opt-4.48"


class OlderOptAttention(OwnAttention):
    """OPTAttention, OPTSdpaAttention up to 4.48: heads are copied to be contiguous, eager scores bounded by `maximum`.

    Sources: models/opt/modeling_opt.py:122-250 of transformers 4.45, :374-475 of 4.48.
    """

    __slots__ = ()

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]."""
        tape, spec = context.tape, self.spec
        q_proj, k_proj, v_proj = self.projections
        chosen = implementation(context.habits, context.attention)
        query = mul_scalar(tape, q_proj(tape, x))
        if chosen is Attention.SDPA:
            query = self._shaped(tape, query)
        key = self._shaped(tape, k_proj(tape, x))
        value = self._shaped(tape, v_proj(tape, x))
        key, value = context.remember(key, value)
        tape.label = "attention"
        if chosen is Attention.EAGER:
            out = self._eager(context, query, key, value)
        elif chosen is Attention.FLASH:
            out = flash_attn(tape, query, key, value, self.shape(context))
        else:
            out, heads_first = scaled_dot_product_attention(
                tape,
                query,
                key,
                value,
                context.mask(None),
                self.shape(context),
                probability=spec.dropout,
                capability=context.capability,
                enable_gqa=False,
                heads_first=True,
                layout=GradientLayout(),
            )
            if heads_first and spec.num_heads > 1:
                out = contiguous(tape, out)
        return self.output(tape, out), None

    def _shaped(self, tape: Tape, x: Tensor) -> Tensor:
        """view, transpose, contiguous."""
        if self.spec.num_heads == 1:
            return x
        return contiguous(tape, to_heads(tape, x, HEADS_FIRST))

    def _eager(self, context: Context, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tape, shape = context.tape, self.shape(context)
        query = self._shaped(tape, query)
        weights = matmul(tape, query, key, numel=shape.num_rows * shape.seq_len)
        mask = context.mask(None)
        assert mask is not None
        weights = add(tape, weights, mask)
        weights = _maximum(tape, weights)
        dtype = weights.dtype
        raised = dtype is FLOAT16 or tape.autocast_dtype is not None
        weights = softmax(tape, weights, FLOAT32 if raised else dtype)
        if dtype is FLOAT16:
            weights = to(tape, weights, FLOAT16)
        weights = dropout(tape, weights, self.spec.dropout)
        out = matmul(tape, weights, value, numel=query.numel)
        if shape.num_heads == 1:
            return out
        return contiguous(tape, to_heads(tape, out, HEADS_FIRST))


def _maximum(tape: Tape, x: Tensor) -> Tensor:
    """torch.max(x, number): saves both; where they are equal, each gets half of the gradient."""
    saved = tape.save(x, SCALAR) if x.requires_grad else ()

    def backward(gradient: Tensor) -> tuple[Tensor]:
        half, equal = tape.new(gradient.numel, gradient.dtype), tape.new(gradient.numel, BOOL)
        result = tape.new(gradient.numel, gradient.dtype)
        smaller = tape.new(gradient.numel, BOOL)
        del smaller, equal, half
        return (result,)

    return tape.record(tape.new(x.numel, x.dtype), (x,), saved, backward)


OLDER_ATTENTION: dict[str, type[OwnAttention]] = {OLDER_OPT: OlderOptAttention}
