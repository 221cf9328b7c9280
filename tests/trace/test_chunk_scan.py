"""State-space models of the second kind run the fused kernel of mamba-ssm: what it keeps, what backward holds."""

from __future__ import annotations

import pytest
import torch

from tests.recipes import make_recipe
from wazn.trace.chunk_scan import mamba_split_conv1d_scan_combined
from wazn.trace.script import Script
from wazn.trace.step import rehearse
from wazn.trace.tracker import DEVICE, rounded_bytes
from wazn.trace.world import World

B, L, H, P, G, N, Q, OUT = 2, 512, 8, 16, 1, 16, 128, 96
D = H * P
BF16, FP32 = torch.bfloat16, torch.float32


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def _mixer(*, has_norm: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    projected = _tensor(B, L, 2 * D + 2 * G * N + H)
    conv, conv_bias = _tensor(D + 2 * G * N, 4), _tensor(D + 2 * G * N)
    dt_bias, a, d, out_weight = _tensor(H), _tensor(H, dtype=FP32), _tensor(H), _tensor(OUT, D)
    norm = _tensor(D) if has_norm else None
    out = mamba_split_conv1d_scan_combined(
        projected,
        conv,
        conv_bias,
        dt_bias,
        a,
        D=d,
        chunk_size=Q,
        rmsnorm_weight=norm,
        outproj_weight=out_weight,
        headdim=P,
        ngroups=G,
    )
    inputs = [projected, conv, conv_bias, dt_bias, a, d, out_weight]
    return inputs + ([] if norm is None else [norm]), out


@pytest.mark.parametrize("has_norm", [True, False])
def test_the_fused_mixer_keeps_only_what_the_scan_made(has_norm: bool) -> None:
    """Beside its inputs [B, L, H P] in bf16, and the norm's fp32 number per row and group; it returns [B, L, OUT]."""
    with World() as world:
        inputs, out = _mixer(has_norm=has_norm)
        given = sum(rounded_bytes(tensor.nbytes) for tensor in inputs)
        kept = [B * L * D * 2, B * L * OUT * 2, *[B * L * G * 4] * has_norm]
        assert world.tracker.current_bytes - given == sum(rounded_bytes(size) for size in kept)
        assert out.shape == (B, L, OUT)


@pytest.mark.parametrize("has_norm", [True, False])
def test_its_backward_gives_every_input_its_gradient(has_norm: bool) -> None:
    """In the inputs' own shapes and types; autograd refuses others."""
    with World():
        inputs, out = _mixer(has_norm=has_norm)
        out.sum().backward()
        for tensor in inputs:
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)


def test_states_are_held_per_chunk_and_sums_are_split_over_the_card() -> None:
    """States [B, chunks, H, P N]: in fp32 twice in forward-again and once as gradient, then twice in bf16.

    An A100 has 108 multiprocessors: 2 x 4 chunks x 8 heads are 64 programs, one head to each, so that the sums
    for B and C are taken over 8 parts [B, L, 8, G, N].
    """
    with World(capability=(8, 0)) as world:
        _, out = _mixer(has_norm=True)
        before = len(world.tracker.events)
        out.backward(torch.empty_like(out))
        made = [event for event in world.tracker.events[before:] if event.num_bytes > 0]
    states = [event.dtype for event in made if event.shape == (B, L // Q, H, P * N)]
    assert sorted(states) == ["bfloat16"] * 2 + ["float32"] * 3
    assert sum(event.shape == (B, L, 8, G, N) for event in made) == 2


def test_a_real_model_takes_it() -> None:
    """Mamba 2 of transformers: products in a chunk are per group [B, c, G, Q, Q], not per head as in its own code."""
    config = {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "state_size": 16,
        "chunk_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
    }
    rehearsal = rehearse(config, make_recipe(micro_batch=1, seq_len=256), Script(num_steps=1))
    shapes = {event.shape for event in rehearsal.events}
    assert (1, 4, 1, 64, 64) in shapes
    assert (1, 4, 64, 64, 8) not in shapes
