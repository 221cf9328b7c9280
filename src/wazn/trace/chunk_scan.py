"""A stand-in for mamba-ssm's kernels for state-space models of the second kind: their memory without the kernels.

`transformers` calls them for Mamba 2, Bamba, Zamba 2, Falcon-H1, Granite 4 and Nemotron-H where they are installed.

Shape legend: B batch, L tokens, H heads, P head size, G groups, N states, c chunks of Q tokens.
Source: mamba_ssm/ops/triton of mamba-ssm 2.3: ssd_combined.py, whose helpers in ssd_chunk_state.py, ssd_chunk_scan.py,
ssd_state_passing.py, ssd_bmm.py and layernorm_gated.py are named below. Left out is what Triton allocates while it
tries kernels for the first time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch.amp.autocast_mode import custom_bwd, custom_fwd

from wazn.trace.autocast import autocast_dtype
from wazn.trace.selective_scan import conv_backward
from wazn.units import ceil_div

__all__ = ["mamba_split_conv1d_scan_combined"]

_FP32 = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """What the shapes of the inputs do not say."""

    heads: int
    head_dim: int
    groups: int
    states: int
    chunk: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gate, what the convolution runs over, step."""
        widths = [self.inner, self.inner + 2 * self.groups * self.states, self.heads]
        return projected.split(widths, dim=-1)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the names of the paper and of the package
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    rmsnorm_weight: torch.Tensor | None = None,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    **_: Any,
) -> torch.Tensor:
    """Return the whole mixer but its first projection, for that projection's result [B, L, 2 H P + 2 G N + H]."""
    heads = D.shape[0]
    head_dim = D.shape[1] if D.dim() == 2 else headdim
    assert head_dim is not None
    sizes = _Sizes(
        heads=heads,
        head_dim=head_dim,
        groups=ngroups,
        states=(conv1d_weight.shape[0] - heads * head_dim) // ngroups // 2,
        chunk=chunk_size,
    )
    return _SplitConvScan.apply(
        sizes,
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        rmsnorm_weight,
        outproj_weight,
        outproj_bias,
    )


class _SplitConvScan(torch.autograd.Function):
    """`MambaSplitConv1dScanCombinedFn`: keeps its inputs and what the scan made; the rest is computed again."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(
        ctx: Any,
        sizes: _Sizes,
        projected: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        dt_bias: torch.Tensor,
        a: torch.Tensor,
        d: torch.Tensor,
        norm_weight: torch.Tensor | None,
        out_weight: torch.Tensor | None,
        out_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        _z, mixed, _dt = sizes.split(projected)
        convolved = torch.empty_like(_wide(mixed))
        held = _scan(sizes, convolved, has_gate=norm_weight is None)
        scanned, rstd = held.scanned, None
        if norm_weight is None:
            assert held.gated is not None
            out = held.gated.flatten(2)
        else:  # `_layer_norm_fwd`
            out = torch.empty_like(scanned.flatten(0, 1).flatten(1)).view(*scanned.shape[:2], -1)
            rows = scanned.shape[0] * scanned.shape[1]
            rstd = torch.empty((sizes.groups * rows,), dtype=_FP32, device=out.device)
        lowered = autocast_dtype()
        if out_weight is not None:
            if lowered is not None:
                out, out_weight = out.to(lowered), out_weight.to(lowered)
                out_bias = None if out_bias is None else out_bias.to(lowered)
            out = F.linear(out, out_weight, out_bias)
        ctx.save_for_backward(
            projected,
            conv_weight,
            conv_bias,
            scanned,
            a,
            d,
            dt_bias,
            norm_weight,
            rstd,
            out_weight,
            out_bias,
        )
        ctx.sizes = sizes
        return out

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)  # asked for once: a checkpoint gives them once
        projected, conv_weight, conv_bias, scanned, a, d, _bias, norm_weight = islice(saved, 8)
        _rstd, out_weight, out_bias = saved
        sizes: _Sizes = ctx.sizes
        again = torch.empty_like(scanned.flatten(2)) if out_weight is not None else None
        _z, mixed, dt = sizes.split(projected)
        convolved = torch.empty_like(_wide(mixed))
        grad_projected = torch.empty_like(projected)
        _, grad_mixed, _ = sizes.split(grad_projected)
        grad_convolved = torch.empty_like(mixed)
        of_out = grad if out_weight is None else F.linear(grad, out_weight.t())
        grad_norm = None
        if norm_weight is None:
            gradients = _scan_backward(sizes, convolved, of_out, dt, a, d, gate_given=again)
        else:
            of_scanned, grad_norm = _norm_backward(sizes, scanned, norm_weight)
            gradients = _scan_backward(sizes, convolved, of_scanned, dt, a, d)
        grad_out_weight = grad_out_bias = None
        if again is not None:
            shown = gradients.gated if gradients.gated is not None else again
            grad_out_weight = torch.einsum("bso,bsd->od", grad, shown)
            grad_out_bias = None if out_bias is None else grad.sum(dim=(0, 1))
        _, grad_conv_weight, grad_conv_bias = conv_backward(
            _wide(mixed).transpose(1, 2),
            conv_weight,
            conv_bias,
            _wide(grad_convolved).transpose(1, 2),
            _wide(grad_mixed).transpose(1, 2),
        )
        del of_out
        return (
            None,
            grad_projected,
            grad_conv_weight,
            grad_conv_bias,
            gradients.dt_bias,
            gradients.a,
            gradients.d,
            grad_norm,
            grad_out_weight,
            grad_out_bias,
        )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """`ensure_stride`: rows that begin at multiples of 8 elements, copied where they do not."""
    return tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class _Held:
    """What `_mamba_chunk_scan_combined_fwd` returns, all of which its caller holds to its own end."""

    scanned: torch.Tensor
    gated: torch.Tensor | None
    others: tuple[torch.Tensor, ...]


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype = _FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _chunks(sizes: _Sizes, x: torch.Tensor) -> tuple[int, int, int]:
    batch, tokens = x.shape[:2]
    return batch, tokens, ceil_div(tokens, sizes.chunk)


def _scan(sizes: _Sizes, x: torch.Tensor, *, has_gate: bool) -> _Held:
    """`_mamba_chunk_scan_combined_fwd`, step by step."""
    batch, tokens, chunks = _chunks(sizes, x)
    per_chunk = (batch, sizes.heads, chunks, sizes.chunk)
    dt, decay = _empty(x, *per_chunk), _empty(x, *per_chunk)  # _chunk_cumsum_fwd
    width = sizes.head_dim * sizes.states
    own = _empty(x, batch, chunks, sizes.heads, width)  # _chunk_state_fwd
    states = _empty(x, batch, chunks, sizes.heads, width, dtype=x.dtype)  # _state_passing_fwd
    last = _empty(x, batch, sizes.heads, width)
    del own
    products = _empty(x, batch, chunks, sizes.groups, sizes.chunk, sizes.chunk)  # _bmm_chunk_fwd
    shape = (batch, tokens, sizes.heads, sizes.head_dim)
    out = _empty(x, *shape, dtype=x.dtype)  # _chunk_scan_fwd
    ungated = _empty(x, *shape, dtype=x.dtype) if has_gate else None
    del products
    others = (dt, decay, states, last)
    if ungated is None:
        return _Held(out, None, others)
    return _Held(ungated, out, others)


@dataclass(frozen=True, slots=True)
class _Gradients:
    dt_bias: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    gated: torch.Tensor | None


def _scan_backward(
    sizes: _Sizes,
    x: torch.Tensor,
    grad: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    *,
    gate_given: torch.Tensor | None = None,
) -> _Gradients:
    """`_mamba_chunk_scan_combined_bwd`, step by step; gradients of x, B, C and dt are given by the caller."""
    batch, tokens, chunks = _chunks(sizes, x)
    heads, groups, chunk, width = (
        sizes.heads,
        sizes.groups,
        sizes.chunk,
        sizes.head_dim * sizes.states,
    )
    per_chunk = (batch, heads, chunks, chunk)
    blocks = ceil_div(chunk, 32)
    dt_in = dt.clone()
    decay, step = _empty(x, *per_chunk), _empty(x, *per_chunk)
    products = _empty(x, batch, chunks, groups, chunk, chunk)
    own = _empty(x, batch, chunks, heads, width)
    states, last = _empty(x, batch, chunks, heads, width), _empty(x, batch, heads, width)
    del own
    gated = of_ungated = grad_d = None
    if gate_given is not None:  # _chunk_scan_bwd_dz
        parts = _empty(x, blocks, batch, chunks, heads, 1)
        gated = torch.empty_like(gate_given)
        of_ungated = torch.empty_like(grad)
        grad_d = parts.sum(dim=(0, 1, 2)).to(d.dtype).squeeze(1)
        del parts
    of_states = _empty(x, batch, chunks, heads, width)  # _chunk_scan_bwd_dstates
    # _state_passing_bwd: states and their gradients go on in the type of x
    lowered = _empty(x, batch, chunks, heads, width, dtype=x.dtype)
    states_lowered = _empty(x, batch, chunks, heads, width, dtype=x.dtype)
    of_decay = _empty(x, batch, heads, chunks, ceil_div(width, 64)).sum(dim=-1)
    del of_states, states
    # _chunk_scan_chunk_state_bwd_dx
    parts = _empty(x, blocks, batch, chunks, heads, 1)
    of_step = _empty(x, *per_chunk)
    from_x = parts.sum(dim=(0, 1, 2)).to(d.dtype).squeeze(1)
    del parts
    splits = _splits(sizes, batch * chunks)
    next_decay = _empty(x, *per_chunk)  # _chunk_state_bwd_db
    of_b = _empty(x, batch, tokens, splits, groups, sizes.states).sum(2)
    before = _empty(x, *per_chunk)  # _chunk_scan_bwd_dC
    of_c = _empty(x, batch, tokens, splits, groups, sizes.states).sum(2)
    of_products = _empty(x, batch, chunks, splits, groups, chunk, chunk).sum(
        2
    )  # _chunk_scan_bwd_dcb
    before[..., -1] += of_decay
    previous = before.flip([-1]).cumsum(dim=-1).flip([-1])
    total = _empty(x, batch, heads, chunks, blocks, chunk).sum(dim=3)  # ..._bwd_ddAcs_stable
    total += next_decay + previous
    grad_bias, grad_a = _empty(x, heads), torch.empty_like(a, dtype=_FP32)  # _chunk_cumsum_bwd
    del dt_in, decay, step, products, last, of_ungated, lowered, states_lowered, of_step, of_b, of_c
    del of_products
    return _Gradients(grad_bias, grad_a, from_x if grad_d is None else grad_d, gated)


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _splits(sizes: _Sizes, batch_chunks: int) -> int:
    """Into how many parts the heads of a group are summed, so that the card is busy."""
    ratio = sizes.heads // sizes.groups
    together = max(min(ceil_div(batch_chunks * sizes.heads, _multiprocessors()), ratio), 1)
    return ceil_div(ratio, together)


def _norm_backward(
    sizes: _Sizes, scanned: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_layer_norm_bwd`: the weight's gradient in parts of as many rows as the card has programs."""
    grad = torch.empty_like(scanned.flatten(2).flatten(0, 1)).view(scanned.shape)
    group = sizes.inner // sizes.groups
    warps = min(max((1 << (group - 1).bit_length()) // 256, 1), 8)
    rows = math.ceil(_multiprocessors() * math.ceil(4 / warps) / sizes.groups)
    parts = _empty(scanned, rows, sizes.inner)
    return grad, parts.sum(0).to(weight.dtype)
