"""Multi-head latent attention, as DeepseekV2Attention and DeepseekV3Attention of transformers 5.24
write it.

Shapes: B batch, h heads, S tokens, n channels of a head that do not rotate, r that do, e of a
value, c of the compressed keys and values.
"""

from __future__ import annotations

from wazn.dtypes import FLOAT32
from wazn.model.spec import AttentionSpec, LatentAttentionSpec
from wazn.recipe import Attention
from wazn.simulate.attention import Attended, attend
from wazn.simulate.attention_kernels import HEADS_FIRST, GradientLayout, Shape, to_heads
from wazn.simulate.context import Context
from wazn.simulate.modules import Module
from wazn.simulate.ops import cat, copy_slice, expand, split, to
from wazn.simulate.rotary import rotate, rotate_interleaved
from wazn.simulate.tape import Tape, Tensor

__all__ = ["LatentAttentionModule", "latent_as_plain"]


def latent_as_plain(spec: LatentAttentionSpec) -> AttentionSpec:
    """What the attention functions need to know: heads of queries and keys of nope + rope channels."""
    return AttentionSpec(
        projections=(),
        output=spec.output,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        head_dim=spec.nope_head_dim + spec.rope_head_dim,
        dropout=spec.dropout,
    )


class LatentAttentionModule:
    """Low-rank queries (or whole ones), keys and values from one compressed tensor, one rotated key for all heads."""

    __slots__ = ("_plain", "kv_a", "kv_a_norm", "kv_b", "output", "q", "spec")

    def __init__(
        self,
        spec: LatentAttentionSpec,
        *,
        q: tuple[Module, ...],
        kv_a: Module,
        kv_a_norm: Module,
        kv_b: Module,
        output: Module,
    ) -> None:
        """`q`: q_proj alone, or q_a_proj, q_a_layernorm and q_b_proj."""
        self.spec = spec
        self.q = q
        self.kv_a = kv_a
        self.kv_a_norm = kv_a_norm
        self.kv_b = kv_b
        self.output = output
        self._plain = latent_as_plain(spec)

    def __call__(self, context: Context, x: Tensor) -> Attended:
        """x: [B, S, H]; returns [B, S, H] and the attention weights, where the function makes them."""
        tape, spec = context.tape, self.spec
        tokens = context.num_tokens
        nope, rope = tokens * spec.num_heads * spec.nope_head_dim, tokens * spec.rope_head_dim
        q_states = to_heads(tape, self._queries(tape, x), HEADS_FIRST)
        q_pass, q_rot = split(tape, q_states, (nope, rope * spec.num_heads))
        compressed_kv = self.kv_a(tape, x)
        kv_nope, k_rot = split(tape, compressed_kv, (tokens * spec.kv_lora_rank, rope))
        kv_nope = self.kv_a_norm(tape, kv_nope)
        tape.label = "rotary"
        layout = GradientLayout()
        q_rot, k_rot = self._rotate(context, q_rot, k_rot, layout)
        query_states = cat(tape, (q_pass, q_rot))
        key_states, value_states = self._expand(tape, kv_nope, k_rot)
        key_states, value_states = context.remember(key_states, value_states)
        tape.label = "attention"
        head_dim = spec.nope_head_dim + spec.rope_head_dim
        out, weights = attend(
            context,
            self._plain,
            query_states,
            key_states,
            value_states,
            Shape(
                context.micro_batch,
                context.seq_len,
                spec.num_heads,
                spec.num_heads,
                head_dim,
                spec.value_head_dim,
            ),
            heads_first=True,
            layout=layout,
        )
        out = self.output(tape, out)
        return out, weights

    def _queries(self, tape: Tape, x: Tensor) -> Tensor:
        if len(self.q) == 1:
            return self.q[0](tape, x)
        q_a, norm, q_b = self.q
        return q_b(tape, norm(tape, q_a(tape, x)))

    def _rotate(
        self, context: Context, q: Tensor, k: Tensor, layout: GradientLayout
    ) -> tuple[Tensor, Tensor]:
        tape = context.tape
        cos, sin = context.tables(None)
        match self.spec.rotary_code:
            case "deepseek_v2":
                return _rotate_complex(context, q, k, cos, layout)
            case "deepseek_v3":
                half = cos.numel // 2
                return rotate_interleaved(tape, q, k, cos.view(half), sin.view(half))
            case _:
                q_embed = rotate(tape, q, cos, sin)
                k_embed = rotate(tape, k, cos, sin)
                return q_embed, k_embed

    def _expand(self, tape: Tape, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head; the rotated key is copied behind each head's own channels (`expand_kv`)."""
        spec = self.spec
        kv_nope = to_heads(tape, self.kv_b(tape, kv_nope), HEADS_FIRST)
        per_channel = kv_nope.numel // (spec.nope_head_dim + spec.value_head_dim)
        k_nope, value_states = split(
            tape, kv_nope, (per_channel * spec.nope_head_dim, per_channel * spec.value_head_dim)
        )
        k_rot = expand(tape, k_rot, k_rot.numel * spec.num_heads)
        key_states = tape.new(k_nope.numel + k_rot.numel, kv_nope.dtype)
        key_states = copy_slice(tape, key_states, k_nope)
        key_states = copy_slice(tape, key_states, k_rot)
        return key_states, value_states


def _rotate_complex(
    context: Context, q: Tensor, k: Tensor, freqs_cis: Tensor, layout: GradientLayout
) -> tuple[Tensor, Tensor]:
    """view_as_complex(x.float()) * freqs_cis, as real numbers of the type of x; one complex number
    has the bytes of two fp32.
    """
    tape = context.tape
    q_complex = to(tape, q, FLOAT32)
    k_complex = to(tape, k, FLOAT32)
    flash = context.attention is Attention.FLASH

    def as_real_backward(gradient: Tensor) -> tuple[Tensor]:
        # grad.contiguous(): the flash kernel alone gives queries' gradients as they came, heads first
        if layout.heads_first or flash:
            return (gradient,)
        return (tape.new(gradient.numel, gradient.dtype),)

    product = _times_complex(tape, q_complex, freqs_cis)
    product = tape.record(product.view(product.numel), (product,), (), as_real_backward)
    q_out = to(tape, product, q.dtype)
    del product
    k_out = to(tape, _times_complex(tape, k_complex, freqs_cis), k.dtype)
    return q_out, k_out


def _times_complex(tape: Tape, x: Tensor, freqs_cis: Tensor) -> Tensor:
    """x * freqs_cis; the gradient is multiplied with a copy of the conjugate."""
    saved = tape.save(freqs_cis if x.requires_grad else None)
    conjugate = freqs_cis.numel

    def backward(gradient: Tensor) -> tuple[Tensor]:
        copy = tape.new(conjugate, FLOAT32)
        result = tape.new(gradient.numel, FLOAT32)
        del copy
        return (result,)

    return tape.record(tape.new(x.numel, FLOAT32), (x,), saved, backward)
