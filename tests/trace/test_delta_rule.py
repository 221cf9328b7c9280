"""Linear attention runs the gated delta rule of flash-linear-attention: what it keeps and what its backward holds."""

from __future__ import annotations

import pytest
import torch

from tests.recipes import make_recipe
from wazn.trace.delta_rule import chunk_gated_delta_rule
from wazn.trace.script import Script
from wazn.trace.step import rehearse
from wazn.trace.tracker import DEVICE, rounded_bytes
from wazn.trace.world import World

B, T, H, W, K, V = 2, 256, 2, 4, 128, 64
BF16, FP32 = torch.bfloat16, torch.float32


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def _inputs() -> tuple[torch.Tensor, ...]:
    gates = _tensor(B, T, W, dtype=FP32), _tensor(B, T, W)
    return _tensor(B, T, H, K), _tensor(B, T, H, K), _tensor(B, T, W, V), *gates


def test_it_keeps_normalised_inputs_and_a_matrix_of_64_columns() -> None:
    """Queries and keys normalised [B, T, H, K] with an fp32 number each, the summed gates [B, T, W] in fp32, the solved
    matrix [B, T, W, 64] in bf16; and it returns [B, T, W, V]. Values and beta are its inputs.
    """
    with World() as world:
        inputs = _inputs()
        given = world.tracker.current_bytes
        out, state = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        normalised = [B * T * H * K * 2, B * T * H * 4]
        kept = [*normalised * 2, B * T * W * 4, B * T * W * 64 * 2, B * T * W * V * 2]
        assert world.tracker.current_bytes - given == sum(rounded_bytes(size) for size in kept)
    assert (out.shape, state) == ((B, T, W, V), None)


def test_its_backward_gives_every_input_its_gradient() -> None:
    """In the inputs' own shapes and types, summed over the heads of values that share a head of keys."""
    with World():
        inputs = _inputs()
        chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0].sum().backward()
        for tensor in inputs:
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize(("capability", "tiles"), [((8, 0), 2), ((9, 0), 1)])
def test_gates_are_summed_per_tile_of_keys(capability: tuple[int, int], tiles: int) -> None:
    """Keys of 128 are two tiles of 64 on an A100, one of 128 on an H100. States [B, 4, W, K, V] are there twice."""
    with World(capability=capability) as world:
        out, _ = chunk_gated_delta_rule(*_inputs())
        before = len(world.tracker.events)
        out.backward(torch.empty_like(out))
        shapes = [event.shape for event in world.tracker.events[before:] if event.num_bytes > 0]
    assert shapes.count((tiles, B, T, W)) == 1
    assert shapes.count((B, T // 64, W, K, V)) == 2


def test_the_last_state_is_in_fp32() -> None:
    """[B, W, K, V], when it is asked for."""
    with World():
        _, state = chunk_gated_delta_rule(*_inputs(), output_final_state=True)
    assert state is not None
    assert (state.shape, state.dtype) == ((B, W, K, V), FP32)


def test_a_real_model_takes_it() -> None:
    """Qwen3-Next of transformers: no queries in fp32, into which its own code casts them."""
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "vocab_size": 1000,
    }
    rehearsal = rehearse(config, make_recipe(micro_batch=1, seq_len=128), Script(num_steps=1))
    made = {(event.shape, event.dtype) for event in rehearsal.events}
    assert ((1, 2, 4, 16, 32), "bfloat16") in made
    assert not any(shape == (1, 4, 128, 16) and dtype == "float32" for shape, dtype in made)
