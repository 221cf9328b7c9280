"""A stand-in for flash-linear-attention's gated delta rule: the memory of its kernels without the kernels.

`transformers` calls it for the linear attention of Qwen3-Next, Qwen3.5 and others where the package is installed.

Shape legend: B batch, T tokens, H heads of queries and keys, W heads of values, K and V their sizes. A chunk has 64
tokens.
Source: fla/ops/gated_delta_rule/chunk.py of flash-linear-attention, and the functions named below, in fla/ops/common,
fla/ops/gated_delta_rule and fla/modules/l2norm.py, as of August 2026. Left out is what Triton allocates while it tries
kernels for the first time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import custom_bwd, custom_fwd

from wazn.units import ceil_div

__all__ = ["chunk_gated_delta_rule"]

_CHUNK = 64
_FP32 = torch.float32


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result [B, T, W, V], and the last state [B, W, K, V] if it is asked for.

    query, key: [B, T, H, K]; value: [B, T, W, V]; g, beta: [B, T, W].
    """
    out, state = _GatedDeltaRule.apply(
        query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )
    return out, state


class _GatedDeltaRule(torch.autograd.Function):
    """`ChunkGatedDeltaRuleFunction`: keeps its inputs, normalised, and the solved matrix of each chunk."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial: torch.Tensor | None,
        wants_state: bool,
        is_normalised: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, g, beta = (tensor.contiguous() for tensor in (q, k, v, g, beta))  # input_guard
        q_scale = k_scale = None
        if is_normalised:  # l2norm_fwd
            q, q_scale = (
                torch.empty_like(q),
                torch.empty(q.shape[:-1], dtype=_FP32, device=q.device),
            )
            k, k_scale = (
                torch.empty_like(k),
                torch.empty(k.shape[:-1], dtype=_FP32, device=k.device),
            )
        g = torch.empty_like(g, dtype=_FP32)  # chunk_local_cumsum
        solved = k.new_zeros((*beta.shape, _CHUNK))  # chunk_gated_delta_rule_fwd_intra
        w, u = _representation(k, v)
        states, new_values = _states(k, v), torch.empty_like(u)  # chunk_gated_delta_rule_fwd_h
        batch, _, heads, width = v.shape
        last = k.new_zeros((batch, heads, k.shape[-1], width), dtype=_FP32) if wants_state else None
        out = torch.empty_like(v)  # chunk_fwd_o
        del w, u, states, new_values
        ctx.save_for_backward(q, q_scale, k, k_scale, v, g, beta, solved, initial)
        ctx.is_normalised = is_normalised
        if last is not None:
            ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        q, _q_scale, k, _k_scale, v, g, beta, _solved, initial = ctx.saved_tensors
        grad = grad.contiguous()
        w, u = _representation(k, v)
        states, new_values = _states(k, v), torch.empty_like(u)
        local = torch.empty_like(grad)  # chunk_bwd_dv_local
        # chunk_gated_delta_rule_bwd_dhu
        of_states, of_values = _states(k, v), torch.empty_like(local)
        of_initial = None if initial is None else torch.empty_like(initial, dtype=_FP32)
        del local
        per_value_head = (*v.shape[:3], k.shape[-1])
        of_q, of_k = q.new_empty(per_value_head), k.new_empty(per_value_head)  # chunk_bwd_dqkwg
        of_g = torch.empty((_tiles(k.shape[-1]), *g.shape), dtype=_FP32, device=g.device)
        of_w = torch.empty_like(w)
        of_q, of_k, of_g = _per_key_head(of_q, k), _per_key_head(of_k, k), of_g.sum(0)
        # prepare_wy_repr_bwd
        more_k, of_v, more_g = k.new_empty(per_value_head), torch.empty_like(v), torch.empty_like(g)
        of_beta = torch.empty_like(beta)
        of_k.add_(_per_key_head(more_k, k))
        of_g.add_(more_g)
        of_g = torch.empty_like(of_g)  # chunk_local_cumsum, reversed
        del w, u, states, new_values, of_states, of_values, of_w, more_k, more_g
        if ctx.is_normalised:  # l2norm_bwd
            of_q, of_k = torch.empty_like(q), torch.empty_like(k)
        return of_q, of_k, of_v, of_g, of_beta, of_initial, None, None


def _representation(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`recompute_w_u_fwd`: keys and values of the chunks' products, per head of values."""
    return k.new_empty((*v.shape[:3], k.shape[-1])), torch.empty_like(v)


def _states(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A state [K, V] for each chunk and head of values, in the keys' type."""
    batch, tokens, heads, width = v.shape
    return k.new_empty((batch, ceil_div(tokens, _CHUNK), heads, k.shape[-1], width))


def _per_key_head(grad: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Sum gradients over the heads of values that share a head of keys."""
    heads = k.shape[2]
    if grad.shape[2] == heads:
        return grad
    return grad.unflatten(2, (heads, -1)).sum(3)


def _tiles(key_dim: int) -> int:
    """`chunk_bwd_dqkwg`: the gates' gradient is summed per tile of keys, whose width the card's shared memory sets."""
    capability = torch.cuda.get_device_capability()
    widest = 128 if capability >= (9, 0) else 64 if capability >= (8, 0) else 32
    return ceil_div(key_dim, min(max(1 << (key_dim - 1).bit_length(), 16), widest))
