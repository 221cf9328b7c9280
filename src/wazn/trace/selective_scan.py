"""Stand-ins for the packages mamba-ssm and causal-conv1d: the memory of their kernels without the kernels.

`transformers` calls them for the state-space models of the first kind (Mamba, Falcon-Mamba, Jamba) where they are
installed. Its own code instead goes through a sequence token by token, which nobody trains with.

Shape legend: B batch, D channels, L tokens, N states, R rank of the step, W width of the convolution.
Source: mamba_ssm/ops/selective_scan_interface.py and csrc/selective_scan/selective_scan.cpp of mamba-ssm 2;
causal_conv1d/causal_conv1d_interface.py and csrc/causal_conv1d.cpp of causal-conv1d 1.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch.amp.autocast_mode import custom_bwd, custom_fwd

from wazn.trace.autocast import autocast_dtype
from wazn.units import ceil_div

__all__ = ["causal_conv1d_fn", "conv_backward", "mamba_inner_fn", "selective_scan_fn"]

_TOKENS_PER_CHUNK = 2048  # `n_chunks` in selective_scan.cpp


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Depthwise convolution over [B, D, L] with a weight [D, W]; the activation is part of the kernel."""
    return _CausalConv1d.apply(x, weight, bias)


class _CausalConv1d(torch.autograd.Function):
    """`CausalConv1dFn`: keeps its inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        if grad_out.stride(2) != 1 and grad_out.stride(1) != 1:
            grad_out = grad_out.contiguous()
        return conv_backward(x, weight, bias, grad_out, torch.empty_like(x))


def conv_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad_out: torch.Tensor,
    grad_x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`causal_conv1d_bwd`: gradients of weight and bias are summed in fp32."""
    if x.stride(1) == 1 and x.stride(2) > 1:
        if grad_out.stride(1) != 1:
            grad_out = grad_out.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif grad_out.stride(2) != 1:
        grad_out = grad_out.contiguous()
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    return (
        grad_x,
        grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # the names of the paper and of the package
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Scan [B, D, L] inputs and steps, A [D, N], B and C [B, N, L], D and the step's bias [D], a gate z like u."""
    out, last_state = _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias)
    return (out, last_state) if return_last_state else out


def _last_contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


class _SelectiveScan(torch.autograd.Function):
    """`SelectiveScanFn`: keeps its inputs, the states at the chunks' ends, and what it made before the gate."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor | None) -> tuple[Any, Any]:
        u, delta, a, b, c, d, z, delta_bias = inputs
        u, delta, d, b, c, z = (_last_contiguous(tensor) for tensor in (u, delta, d, b, c, z))
        assert u is not None
        assert delta is not None
        gated, out, states = _scan(u, delta, a, z)
        ctx.save_for_backward(
            u, delta, a, b, c, d, z, delta_bias, states, None if z is None else out
        )
        ctx.mark_non_differentiable(last_state := states[:, :, -1, 1::2])
        return (out if gated is None else gated), last_state

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
        u, delta, a, b, c, d, z, delta_bias, *_kept = ctx.saved_tensors
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        grad_z = None if z is None else torch.empty_like(z)
        return _scan_backward(u, delta, a, b, c, d, delta_bias, grad_z)


def _scan(
    u: torch.Tensor, delta: torch.Tensor, a: Any, z: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`selective_scan_fwd`: the gated result, the one before the gate, and two fp32 numbers a state and chunk."""
    gated = None if z is None else torch.empty_like(z)
    out = torch.empty_like(delta)
    batch, channels, tokens = u.shape
    shape = (batch, channels, ceil_div(tokens, _TOKENS_PER_CHUNK), 2 * a.shape[-1])
    return gated, out, torch.empty(shape, dtype=a.dtype, device=u.device)


def _scan_backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    grad_z: torch.Tensor | None,
) -> tuple[Any, ...]:
    """`selective_scan_bwd`: gradients of B and C are summed in fp32."""
    grad_u, grad_delta, grad_a = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    grad_b, grad_c = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (b, c))
    grad_d = None if d is None else torch.zeros_like(d)
    grad_bias = None if delta_bias is None else torch.zeros_like(delta_bias)
    lowered = grad_b.to(b.dtype), grad_c.to(c.dtype)
    return grad_u, grad_delta, grad_a, *lowered, grad_d, grad_z, grad_bias


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,  # noqa: N803
    B: None = None,  # noqa: N803
    C: None = None,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    **_: Any,
) -> torch.Tensor:
    """Return the whole mixer but its first projection, for inputs and gates [B, 2 D, L]."""
    return _MambaInner.apply(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        out_proj_weight,
        out_proj_bias,
        A,
        D,
        delta_bias,
    )


class _MambaInner(torch.autograd.Function):
    """`MambaInnerFn`: convolution and step are computed again in backward."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(
        ctx: Any,
        xz: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        x_weight: torch.Tensor,
        delta_weight: torch.Tensor,
        out_weight: torch.Tensor,
        out_bias: torch.Tensor | None,
        a: torch.Tensor,
        d: torch.Tensor | None,
        delta_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        lowered = autocast_dtype()
        if lowered is not None:
            x_weight, delta_weight, out_weight = (
                weight.to(lowered) for weight in (x_weight, delta_weight, out_weight)
            )
            out_bias = None if out_bias is None else out_bias.to(lowered)
        if xz.stride(-1) != 1:
            xz = xz.contiguous()
        conv_weight = conv_weight.squeeze(1)
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        tokens, rank, states = x.shape[-1], delta_weight.shape[1], a.shape[-1]
        projected = F.linear(_tokens_first(convolved), x_weight)
        delta = _delta(delta_weight, projected, tokens)
        b = _states(projected[:, rank : rank + states], tokens)
        c = _states(projected[:, -states:], tokens)
        gated, out, chunk_states = _scan(convolved, delta, a, z)
        ctx.save_for_backward(
            xz,
            conv_weight,
            conv_bias,
            projected,
            x_weight,
            delta_weight,
            out_weight,
            a,
            b,
            c,
            d,
            delta_bias,
            chunk_states,
            out,
        )
        ctx.has_out_bias = out_bias is not None
        assert gated is not None
        del convolved, delta
        return F.linear(gated.transpose(1, 2), out_weight, out_bias)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)  # asked for once: a checkpoint gives them once
        xz, conv_weight, conv_bias, projected, x_weight, delta_weight, out_weight = islice(saved, 7)
        a, b, c, d, delta_bias, _chunk_states, out = saved
        x, _z = xz.chunk(2, dim=1)
        batch, channels, tokens = x.shape
        rank, states = delta_weight.shape[1], a.shape[-1]
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        convolved = torch.empty_like(x)
        delta = _delta(delta_weight, projected, tokens)
        grad_xz = torch.empty_like(xz)
        grad_x, grad_z = grad_xz.chunk(2, dim=1)
        grad = grad.permute(2, 0, 1).reshape(-1, batch * tokens)
        grad_y = out_weight.t() @ grad  # held while the scan runs backward
        gated = torch.empty_like(out)
        grad_convolved, grad_delta, grad_a, grad_b, grad_c, grad_d, _, grad_delta_bias = (
            _scan_backward(convolved, delta, a, b, c, d, delta_bias, grad_z)
        )
        grad_out_weight = torch.einsum("eB,dB->ed", grad, _channels_first(gated))
        grad_out_bias = grad.sum(dim=(0, 1)) if ctx.has_out_bias else None
        grad_projected = torch.empty_like(projected)
        for first, part in ((rank, grad_b), (grad_projected.shape[1] - states, grad_c)):
            rows = part.squeeze(1).permute(0, 2, 1).reshape(-1, states)
            grad_projected[:, first : first + states] = rows.contiguous()
        del grad_b, grad_c, part
        grad_delta = _channels_first(grad_delta)
        grad_delta_weight = torch.einsum("dB,Br->dr", grad_delta, projected[:, :rank])
        grad_projected[:, :rank] = torch.einsum("dB,dr->Br", grad_delta, delta_weight)
        grad_convolved = _channels_first(grad_convolved)
        grad_x_weight = torch.einsum("Br,Bd->rd", grad_projected, _tokens_first(convolved))
        grad_convolved.addmm_(x_weight.t(), grad_projected.t())
        grad_convolved = grad_convolved.view(channels, batch, tokens).transpose(0, 1)
        _, grad_conv_weight, grad_conv_bias = conv_backward(
            x, conv_weight, conv_bias, grad_convolved, grad_x
        )
        del grad_y
        return (
            grad_xz,
            grad_conv_weight.unsqueeze(1),
            grad_conv_bias,
            grad_x_weight,
            grad_delta_weight,
            grad_out_weight,
            grad_out_bias,
            grad_a,
            grad_d,
            grad_delta_bias,
        )


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """[B, D, L] as [B * L, D]."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def _channels_first(tensor: torch.Tensor) -> torch.Tensor:
    """[B, D, L] as [D, B * L]."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)


def _delta(weight: torch.Tensor, projected: torch.Tensor, tokens: int) -> torch.Tensor:
    """The step [B, D, L], laid out as [D, B, L]."""
    delta = weight @ projected[:, : weight.shape[1]].t()
    return delta.view(weight.shape[0], -1, tokens).transpose(0, 1)


def _states(columns: torch.Tensor, tokens: int) -> torch.Tensor:
    """[B * L, N] as [B, 1, N, L], copied."""
    batch = columns.shape[0] // tokens
    return columns.unflatten(0, (batch, tokens)).transpose(1, 2).unsqueeze(1).contiguous()
