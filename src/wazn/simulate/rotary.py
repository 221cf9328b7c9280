"""Rotary position embeddings as the families apply them, one function for each `rotary_code` of an
attention.

q: [B, h, S, d] and k: [B, g, S, d]; cos and sin: [1, S, rotary_dim] (half of it in gpt-oss and
GPT-J). Pairs of neighbours (`x[..., ::2]`) and halves of the last axis are slices of the same size,
`stack` and `cat` the same copy. Sources: `apply_rotary_pos_emb` of transformers 5.24,
`models/<family>/modeling_<family>.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from wazn.dtypes import FLOAT32
from wazn.model.spec import AttentionSpec
from wazn.simulate.ops import add, cat, contiguous, mul, narrow, neg, split, sub, to
from wazn.simulate.tape import Tape, Tensor

__all__ = ["ROTARY", "rotate", "rotate_half", "rotate_interleaved"]

Rotated = tuple[Tensor, Tensor]
RotaryFunction = Callable[[Tape, Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, ...]]
"""Returns queries and keys, then what the attention's own code keeps the names of."""


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """cat((-x2, x1)) of the two halves of the last axis (modeling_llama.py)."""
    first = narrow(tape, x, x.numel // 2)
    second = narrow(tape, x, x.numel // 2)
    return cat(tape, (neg(tape, second), first))


def rotate(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    return add(tape, mul(tape, x, cos), mul(tape, rotate_half(tape, x), sin))


def llama(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """The whole head."""
    q_embed = rotate(tape, q, cos, sin)
    k_embed = rotate(tape, k, cos, sin)
    return q_embed, k_embed


def olmo(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """Tables in fp32; what comes out is cast back."""
    q_embed = rotate(tape, q, cos, sin)
    k_embed = rotate(tape, k, cos, sin)
    return to(tape, q_embed, q.dtype), to(tape, k_embed, k.dtype)


def cohere(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """Queries and keys in fp32, cast back."""
    dtype = q.dtype
    q = to(tape, q, FLOAT32)
    k = to(tape, k, FLOAT32)
    q_embed = rotate(tape, q, cos, sin)
    k_embed = rotate(tape, k, cos, sin)
    return to(tape, q_embed, dtype), to(tape, k_embed, dtype)


def phi(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """A part of each head, cut and joined in the attention, which keeps the parts (Phi, StableLM)."""
    q_rot, q_pass = _cut(tape, q, spec)
    k_rot, k_pass = _cut(tape, k, spec)
    q_rot, k_rot = llama(tape, q_rot, k_rot, cos, sin, spec)
    q = cat(tape, (q_rot, q_pass))
    k = cat(tape, (k_rot, k_pass))
    return q, k, q_rot, k_rot, q_pass, k_pass


def gpt_neox(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """A part of each head; queries and keys are both rotated before they are joined (GPT-NeoX, Nemotron)."""
    q, k, *_parts = phi(tape, q, k, cos, sin, spec)
    return q, k


def phi3(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """A part of each head, joined one after the other."""
    q_rot, q_pass = _cut(tape, q, spec)
    k_rot, k_pass = _cut(tape, k, spec)
    q_embed = cat(tape, (rotate(tape, q_rot, cos, sin), q_pass))
    k_embed = cat(tape, (rotate(tape, k_rot, cos, sin), k_pass))
    return q_embed, k_embed


def _cut(tape: Tape, x: Tensor, spec: AttentionSpec) -> Rotated:
    """x[..., :rotary_dim], x[..., rotary_dim:]; a slice of everything is x itself."""
    rotary_dim = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    rotated = x.numel // spec.head_dim * rotary_dim
    first = x if rotated == x.numel else narrow(tape, x, rotated)
    return first, narrow(tape, x, x.numel - rotated)


def _repeated(tape: Tape, table: Tensor) -> Tensor:
    """table[..., : d // 2].repeat_interleave(2, dim=-1): a copy of the size of the table."""
    return contiguous(tape, table)


def glm(tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> Rotated:
    """A part of each head; tables are repeated in every layer."""
    cos = _repeated(tape, cos)
    sin = _repeated(tape, sin)
    q_rot, q_pass = _cut(tape, q, spec)
    k_rot, k_pass = _cut(tape, k, spec)
    q_embed = rotate(tape, q_rot, cos, sin)
    k_embed = rotate(tape, k_rot, cos, sin)
    q_embed = cat(tape, (q_embed, q_pass))
    k_embed = cat(tape, (k_embed, k_pass))
    return q_embed, k_embed


def helium(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """The whole head; tables are repeated in every layer."""
    cos = _repeated(tape, cos)
    sin = _repeated(tape, sin)
    q_embed = rotate(tape, q, cos, sin)
    k_embed = rotate(tape, k, cos, sin)
    return q_embed, k_embed


def ernie4_5(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """As helium, with tables and products in fp32."""
    cos = _repeated(tape, cos)
    sin = _repeated(tape, sin)
    q_embed = _rotate_fp32(tape, q, cos, sin)
    k_embed = _rotate_fp32(tape, k, cos, sin)
    return to(tape, q_embed, q.dtype), to(tape, k_embed, q.dtype)


def _rotate_fp32(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return add(
        tape,
        mul(tape, to(tape, x, FLOAT32), cos),
        mul(tape, to(tape, rotate_half(tape, x), FLOAT32), sin),
    )


def gptj(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    """A part of each head, kept as in `phi`; the half tables are repeated for keys and again for queries."""
    if spec.rotary_dim is None:
        k = _rotate_gptj(tape, k, cos, sin)
        q = _rotate_gptj(tape, q, cos, sin)
        return q, k
    k_rot, k_pass = _cut(tape, k, spec)
    q_rot, q_pass = _cut(tape, q, spec)
    k_rot = _rotate_gptj(tape, k_rot, cos, sin)
    q_rot = _rotate_gptj(tape, q_rot, cos, sin)
    k = cat(tape, (k_rot, k_pass))
    q = cat(tape, (q_rot, q_pass))
    return q, k, q_rot, k_rot, q_pass, k_pass


def _rotate_gptj(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sin = tape.new(2 * sin.numel, sin.dtype)
    cos = tape.new(2 * cos.numel, cos.dtype)
    return rotate(tape, x, cos, sin)


def gpt_oss(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin)) with tables of half a head."""
    q_embed = _rotate_halves(tape, q, cos, sin)
    k_embed = _rotate_halves(tape, k, cos, sin)
    return q_embed, k_embed


def _rotate_halves(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first_half, second_half = split(tape, x, [x.numel // 2] * 2)
    first = sub(tape, mul(tape, first_half, cos), mul(tape, second_half, sin))
    second = add(tape, mul(tape, second_half, cos), mul(tape, first_half, sin))
    return cat(tape, (first, second))


def chatglm(
    tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec
) -> Rotated:
    """The formula of `gpt_oss` on a part of each head, every operand a slice of its own.

    Source: `apply_rotary_pos_emb` in modeling_chatglm.py of THUDM/chatglm3-6b; not compared with the real code, which
    transformers does not have.
    """
    return _rotate_chatglm(tape, q, cos, sin, spec), _rotate_chatglm(tape, k, cos, sin, spec)


def _rotate_chatglm(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor, spec: AttentionSpec) -> Tensor:
    x_rot, x_pass = _cut(tape, x, spec)
    half = x_rot.numel // 2
    first = sub(
        tape,
        mul(tape, narrow(tape, x_rot, half), cos),
        mul(tape, narrow(tape, x_rot, half), sin),
    )
    second = add(
        tape,
        mul(tape, narrow(tape, x_rot, half), cos),
        mul(tape, narrow(tape, x_rot, half), sin),
    )
    return cat(tape, (cat(tape, (first, second)), x_pass))


def rotate_interleaved(tape: Tape, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    """The formula of `gpt_oss` on neighbours, by slices (DeepSeek V3); cos and sin: the first half of each table."""
    q1, q2 = narrow(tape, q, q.numel // 2), narrow(tape, q, q.numel // 2)
    k1, k2 = narrow(tape, k, k.numel // 2), narrow(tape, k, k.numel // 2)
    q_embed = cat(tape, _rotate_pair(tape, q1, q2, cos, sin))
    k_embed = cat(tape, _rotate_pair(tape, k1, k2, cos, sin))
    return q_embed, k_embed


def _rotate_pair(tape: Tape, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    return (
        sub(tape, mul(tape, first, cos), mul(tape, second, sin)),
        add(tape, mul(tape, second, cos), mul(tape, first, sin)),
    )


ROTARY: dict[str, RotaryFunction] = {
    "chatglm": chatglm,
    "cohere": cohere,
    "ernie4_5": ernie4_5,
    "glm": glm,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "helium": helium,
    "llama": llama,
    "olmo": olmo,
    "phi": phi,
    "phi3": phi3,
}
