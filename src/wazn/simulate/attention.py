"""Attention: the kernels' contracts, and the modules that call them.

Shapes: B batch, h query heads, g key-value heads, S tokens, d head size. Queries come as [B, h, S, d], keys and values as [B, g, S, d].
"""

from __future__ import annotations

from wazn.dtypes import FLOAT32, INT64
from wazn.model.spec import AttentionSpec
from wazn.recipe import Attention
from wazn.simulate.context import Context
from wazn.simulate.modules import Module, NormModule
from wazn.simulate.rotary import rotate
from wazn.simulate.tape import Tape, Tensor
from wazn.units import round_up

__all__ = ["AttentionModule", "sdpa_flash"]


def sdpa_flash(
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    micro_batch: int,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:
    """_scaled_dot_product_flash_attention: saves q, k, v, the result, an fp32 log-sum-exp per head and token, the random state.

    Backward allocates dq, dk, dv, then the kernel's buffers: softmax_d, an fp32 accumulator of dq with rows rounded to 128 and
    head size to 32 (64 above 128), and dk, dv for every query head where heads are grouped.
    Source: `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    needs = query.requires_grad or key.requires_grad or value.requires_grad
    saved = tape.save(query, key, value) if needs else ()
    rows = micro_batch * num_heads * seq_len
    dtype = query.dtype
    out = tape.new(rows * head_dim, dtype)
    logsumexp = tape.new(rows, FLOAT32)
    random_seed, random_offset = tape.new(2, INT64), tape.new(1, INT64)
    if needs:
        saved += tape.save_result(out) + tape.save(logsumexp, random_seed, random_offset)
    numel_query, numel_key, numel_value = query.numel, key.numel, value.numel
    rounded_rows = micro_batch * num_heads * round_up(seq_len, 128)
    rounded_dim = round_up(head_dim, 32 if head_dim <= 128 else 64)

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradients = (
            tape.new(numel_query, dtype),
            tape.new(numel_key, dtype),
            tape.new(numel_value, dtype),
        )
        softmax_d = tape.new(rounded_rows, FLOAT32)
        dq_accum = tape.new(rounded_rows * rounded_dim, FLOAT32)
        if num_heads != num_kv_heads:
            dk_expanded = tape.new(rows * head_dim, dtype)
            dv_expanded = tape.new(rows * head_dim, dtype)
            del dv_expanded, dk_expanded
        del dq_accum, softmax_d
        return gradients

    return tape.record(out, (query, key, value), saved, backward)


class AttentionModule:
    """Softmax attention with rotary embeddings, as LlamaAttention writes it."""

    __slots__ = ("k_norm", "output", "projections", "q_norm", "spec")

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        projections: tuple[Module, ...],
        output: Module,
        q_norm: NormModule | None,
        k_norm: NormModule | None,
    ) -> None:
        self.spec = spec
        self.projections = projections
        self.output = output
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, context: Context, x: Tensor) -> Tensor:
        """x: [B, S, H]; returns [B, S, H]."""
        tape = context.tape
        q_proj, k_proj, v_proj = self.projections
        query = q_proj(tape, x)
        key = k_proj(tape, x)
        value = v_proj(tape, x)
        if context.cos is not None and context.sin is not None:
            tape.label = "rotary"
            query, key = (
                rotate(tape, query, context.cos, context.sin),
                rotate(tape, key, context.cos, context.sin),
            )
        tape.label = "attention"
        out = self._attend(context, query, key, value)
        return self.output(tape, out)

    def _attend(self, context: Context, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self.spec
        assert context.attention is Attention.SDPA_FLASH
        return sdpa_flash(
            context.tape,
            query,
            key,
            value,
            micro_batch=context.micro_batch,
            seq_len=context.seq_len,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
