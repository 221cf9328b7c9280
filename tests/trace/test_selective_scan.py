"""State-space models of the first kind run the kernels of mamba-ssm and causal-conv1d: what these keep and hold."""

from __future__ import annotations

import torch

from tests.recipes import make_recipe
from wazn.trace.script import Script
from wazn.trace.selective_scan import causal_conv1d_fn, mamba_inner_fn, selective_scan_fn
from wazn.trace.step import rehearse
from wazn.trace.tracker import DEVICE, rounded_bytes
from wazn.trace.world import World

B, D, L, N, R, H = 2, 64, 256, 16, 4, 32
BF16, FP32 = torch.bfloat16, torch.float32


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def _inner() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    inputs = (
        _tensor(B, 2 * D, L),
        _tensor(D, 1, 4),
        _tensor(D),
        _tensor(R + 2 * N, D),
        _tensor(D, R),
        _tensor(H, D),
    )
    a, d, bias = _tensor(D, N, dtype=FP32), _tensor(D, dtype=FP32), _tensor(D, dtype=FP32)
    out = mamba_inner_fn(*inputs, None, a, None, None, d, delta_bias=bias)
    return (*inputs, a, d, bias), out


def test_the_fused_mixer_keeps_no_convolution_and_no_step() -> None:
    """They are computed again. Beside the inputs it keeps, and returns:

    the projection [B L, R + 2 N], B and C [B, 1, N, L], what the scan made [B, D, L], all in bf16; for each chunk of
    2,048 tokens two fp32 numbers per state [B, D, 1, 2 N]; the result [B, L, H].
    """
    with World() as world:
        inputs, out = _inner()
        given = sum(rounded_bytes(tensor.nbytes) for tensor in inputs)
        kept = [
            B * L * (R + 2 * N) * 2,
            B * N * L * 2,
            B * N * L * 2,
            B * D * L * 2,
            B * D * 2 * N * 4,
            B * L * H * 2,
        ]
        assert world.tracker.current_bytes - given == sum(rounded_bytes(size) for size in kept)
        assert out.shape == (B, L, H)


def test_its_backward_gives_every_input_its_gradient() -> None:
    """In the inputs' own shapes and types; autograd refuses others."""
    with World():
        inputs, out = _inner()
        out.sum().backward()
        for tensor in inputs:
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)


def test_the_backward_of_the_scan_sums_b_and_c_in_fp32() -> None:
    """Their gradients in bf16 are copies of fp32 ones: `selective_scan_bwd` in selective_scan.cpp."""
    with World() as world:
        u, delta, z = _tensor(B, D, L), _tensor(B, D, L), _tensor(B, D, L)
        a, b, c = _tensor(D, N, dtype=FP32), _tensor(B, N, L), _tensor(B, N, L)
        out = selective_scan_fn(u, delta, a, b, c, z=z)
        before = len(world.tracker.events)
        out.backward(torch.empty_like(out))
        made = [event for event in world.tracker.events[before:] if event.num_bytes > 0]
    states = [event.dtype for event in made if event.shape == (B, N, L)]
    assert sorted(states) == ["bfloat16"] * 2 + ["float32"] * 2


def test_the_scan_returns_its_last_state() -> None:
    """[B, D, N], in fp32, without a gradient."""
    with World():
        u, delta = _tensor(B, D, L), _tensor(B, D, L)
        a, b, c = _tensor(D, N, dtype=FP32), _tensor(B, N, L), _tensor(B, N, L)
        out, state = selective_scan_fn(u, delta, a, b, c, return_last_state=True)
    assert (state.shape, state.dtype, state.requires_grad) == ((B, D, N), FP32, False)
    assert out.shape == (B, D, L)


def test_the_convolution_keeps_its_input_alone() -> None:
    """One result in forward, and one gradient of the input in backward, beside fp32 sums for the weight."""
    with World() as world:
        x, weight = _tensor(B, D, L), _tensor(D, 4)
        before = world.tracker.current_bytes
        out = causal_conv1d_fn(x, weight, None, activation="silu")
        assert world.tracker.current_bytes - before == B * D * L * 2
        out.backward(torch.empty_like(out))
        assert x.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == ((D, 4), BF16)


def test_a_mamba_does_not_go_token_by_token() -> None:
    """However long the sequence, the real class makes as many allocations."""
    config = {
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "state_size": 16,
    }
    counts = {
        len(rehearse(config, make_recipe(seq_len=length), Script(num_steps=1)).events)
        for length in (128, 1024)
    }
    assert len(counts) == 1
