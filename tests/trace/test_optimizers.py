"""Optimizers make the states that their documentation says, and hold the temporaries of their CUDA
implementations.
"""

from __future__ import annotations

import pytest
import torch

from wazn.errors import InputError
from wazn.trace.optimizers import OPTIMIZERS, make_optimizer
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

MATRIX, SMALL, VECTOR = 512 * 300, 64 * 32, 512  # elements


class Model(torch.nn.Module):
    """A matrix, a matrix of less than 4,096 elements and the weight of a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(512, 300, bias=False, device="meta", dtype=dtype)
        self.small = torch.nn.Linear(64, 32, bias=False, device="meta", dtype=dtype)
        self.norm = torch.nn.LayerNorm(512, bias=False, device="meta", dtype=dtype)


def first_step(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[int], int]:
    """Return the requested bytes that stay after the first step, and the bytes above them at the peak of
    the second.
    """
    model = Model(dtype)
    with World() as world:
        world.materialise(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        tracker = world.tracker
        optimizer = make_optimizer(name, model, tracker)
        before = {block.block_id for block in tracker.alive()}
        optimizer.step()
        states = [block.num_bytes for block in tracker.alive() if block.block_id not in before]
        level = tracker.current_bytes
        tracker.reset_peak()
        optimizer.step()
        return states, tracker.peak_bytes - level


def test_adamw_keeps_two_states_in_the_weights_type() -> None:
    """exp_avg and exp_avg_sq are `zeros_like`; the step counts stay on the host; foreach holds the square
    roots of a group.

    The norm has no weight decay, so it is in a group of its own: `Trainer.get_decay_parameter_names`.
    """
    states, temporary = first_step("adamw")
    assert sorted(states) == sorted(2 * [2 * MATRIX, 2 * SMALL, 2 * VECTOR])
    assert temporary == 2 * MATRIX + 2 * SMALL


def test_fused_adamw_counts_its_steps_on_the_device_and_holds_nothing() -> None:
    """The fused kernel reads the step count from the device: one fp32 per parameter, and there are no
    temporaries.
    """
    states, temporary = first_step("adamw-fused")
    assert sorted(states) == sorted(2 * [2 * MATRIX, 2 * SMALL, 2 * VECTOR] + [4, 4, 4])
    assert temporary == 0


def test_8bit_adamw_keeps_bytes_and_a_scale_for_256_of_them() -> None:
    """Below 4,096 elements the states are fp32; two tables of 256 fp32 values are shared: `init_state`
    in bitsandbytes.
    """
    states, temporary = first_step("adamw-8bit")
    scales = 600 * 4  # 153,600 / 256 blocks
    small = [4 * SMALL, 4 * VECTOR]
    assert sorted(states) == sorted(2 * [MATRIX, scales, 1024, *small])
    assert temporary == 0


def test_paged_states_are_outside_the_allocator() -> None:
    """Tensors of at least 100,000 elements are in managed memory: `get_state_buffer`."""
    states, _ = first_step("paged-adamw-8bit")
    assert sorted(states) == sorted(2 * [600 * 4, 1024, 4 * SMALL, 4 * VECTOR])
    states, _ = first_step("paged-adamw")
    assert sorted(states) == sorted(2 * [4 * SMALL, 4 * VECTOR])


def test_lion_keeps_one_state() -> None:
    """Momentum only, in fp32 or in bytes with one table."""
    assert sorted(first_step("lion")[0]) == sorted([4 * MATRIX, 4 * SMALL, 4 * VECTOR])
    eight_bit = first_step("lion-8bit")[0]
    assert sorted(eight_bit) == sorted([MATRIX, 600 * 4, 1024, 4 * SMALL, 4 * VECTOR])


def test_sgd() -> None:
    """Without momentum there is no state; with it one, in the weights' type."""
    assert first_step("sgd")[0] == []
    assert sorted(first_step("sgd-momentum")[0]) == sorted([2 * MATRIX, 2 * SMALL, 2 * VECTOR])


def test_adafactor_keeps_rows_and_columns() -> None:
    """A matrix has an fp32 average per row and per column, a vector one per element."""
    states, _ = first_step("adafactor")
    assert {4 * 300, 4 * 512, 4 * 32, 4 * 64} <= set(states)
    assert sum(states) < 4 * (300 + 512 + 32 + 64 + 512) + 100


def test_muon_keeps_momentum_of_matrices_and_adamw_has_the_rest() -> None:
    """One state per matrix, in the weights' type, and AdamW's two for the vector."""
    states = [2 * MATRIX, 2 * SMALL, 2 * VECTOR, 2 * VECTOR]
    assert sorted(first_step("muon")[0]) == sorted(states)


def test_8bit_optimizers_keep_embeddings_in_32_bits() -> None:
    """`Trainer.create_optimizer` registers them with bitsandbytes' GlobalOptimManager; a world has its own."""
    from bitsandbytes.optim import GlobalOptimManager

    model = torch.nn.Sequential(torch.nn.Embedding(100, 64, device="meta"))
    with World() as world:
        world.materialise(model)
        model[0].weight.grad = torch.empty_like(model[0].weight)
        optimizer = make_optimizer("adamw-8bit", model, world.tracker)
        optimizer.step()
        states = [block.num_bytes for block in world.tracker.alive()]
    assert states.count(100 * 64 * 4) == 2 + 2  # weight and gradient in fp32, and two states
    assert GlobalOptimManager.get_instance().pid2config == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_leaks_nothing(name: str) -> None:
    """The second step leaves exactly what the first left."""
    model = Model(torch.bfloat16)
    with World() as world:
        world.materialise(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
        optimizer = make_optimizer(name, model, world.tracker)
        levels = []
        for _ in range(2):
            optimizer.step()
            levels.append(world.tracker.current_bytes)
    assert levels[0] == levels[1]


def test_an_unknown_optimizer_is_refused() -> None:
    """The message carries the name, the hint those that are known."""
    with World() as world, pytest.raises(InputError, match="nonsense") as caught:
        make_optimizer("nonsense", Model(torch.bfloat16), world.tracker)
    assert "`adamw-fused`" in str(caught.value.hint)
