"""Every optimizer of PyTorch takes its foreach form, and every `optim` of Trainer that can be installed is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.test_optimizers import MATRIX, SMALL, VECTOR, Model
from wazn.trace.tracker import StorageTracker
from wazn.trace.world import World

ALL = MATRIX + SMALL + VECTOR  # parameters


def steps(
    tracker: StorageTracker, make: Callable[[], torch.optim.Optimizer]
) -> tuple[list[int], int]:
    """Return the requested bytes that stay after the first step, and the bytes above them at the peak of the second."""
    before = {block.block_id for block in tracker.alive()}
    optimizer = make()
    optimizer.step()
    states = [block.num_bytes for block in tracker.alive() if block.block_id not in before]
    level = tracker.current_bytes
    tracker.reset_peak()
    optimizer.step()
    assert tracker.current_bytes == level
    return states, tracker.peak_bytes - level


@pytest.mark.parametrize(
    ("cls", "options", "num_states", "num_temporaries"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, 1, 0),
        (torch.optim.Adam, {}, 2, 1),  # exp_avg_sq_sqrt
        (torch.optim.AdamW, {}, 2, 1),
        (torch.optim.NAdam, {}, 2, 1),  # exp_avg_sq_sqrt
        (torch.optim.RAdam, {}, 2, 1),  # buffer
        (torch.optim.Adamax, {}, 2, 1),  # absolute gradients
        (torch.optim.RMSprop, {}, 1, 1),  # avg
        (torch.optim.Adagrad, {}, 1, 2),  # std and numerator
        (torch.optim.Adadelta, {}, 2, 2),  # std and deltas
        (torch.optim.ASGD, {}, 1, 1),  # intermediate
    ],
)
def test_foreach_holds_a_temporary_for_every_parameter_at_once(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], num_states: int, num_temporaries: int
) -> None:
    """bf16, 2 bytes each; the lists that each `_multi_tensor_*` in torch/optim makes out of place are named beside it.

    Scalars, such as numbers of steps, are left out.
    """
    model = Model(torch.bfloat16)
    with World() as world:
        world.materialise(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        states, temporary_bytes = steps(
            world.tracker, lambda: cls(model.parameters(), lr=1e-3, **options)
        )
    large = [size for size in states if size > 8]
    assert sorted(large) == sorted(num_states * [2 * MATRIX, 2 * SMALL, 2 * VECTOR])
    assert temporary_bytes - num_temporaries * 2 * ALL in range(9 * 512)  # and a few scalars


@pytest.mark.parametrize(
    "cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
)
def test_fused_holds_nothing(cls: type[torch.optim.Optimizer]) -> None:
    """One kernel reads and writes everything: `_fused_*` operators of torch/optim."""
    model = Model(torch.bfloat16)
    with World() as world:
        world.materialise(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        _, temporary_bytes = steps(
            world.tracker,
            lambda: cls(model.parameters(), lr=1e-3, fused=True),  # type: ignore[call-arg]
        )
    assert temporary_bytes == 0


SCALES = 600 * 4  # 153,600 / 256 blocks
QMAP = 1024


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("adagrad", [2 * MATRIX, 2 * SMALL, 2 * VECTOR]),
        ("rmsprop", [2 * MATRIX, 2 * SMALL, 2 * VECTOR]),
        ("rmsprop_bnb", [4 * MATRIX, 4 * SMALL, 4 * VECTOR]),
        ("rmsprop_bnb_8bit", [MATRIX, SCALES, QMAP, 4 * SMALL, 4 * VECTOR]),
        ("ademamix", [8 * MATRIX, 8 * SMALL, 8 * VECTOR, 4 * MATRIX, 4 * SMALL, 4 * VECTOR]),
        (
            "ademamix_8bit",
            [2 * MATRIX, MATRIX, 2 * SCALES, SCALES, QMAP, QMAP]
            + [8 * SMALL, 8 * VECTOR, 4 * SMALL, 4 * VECTOR],
        ),
        ("paged_ademamix_32bit", [8 * SMALL, 8 * VECTOR, 4 * SMALL, 4 * VECTOR]),
        ("paged_lion_32bit", [4 * SMALL, 4 * VECTOR]),
        ("paged_lion_8bit", [SCALES, QMAP, 4 * SMALL, 4 * VECTOR]),
    ],
)
def test_states_of_trainers_optimizers(name: str, states: list[int], tmp_path: Path) -> None:
    """AdEMAMix keeps a fast and a slow average in one tensor, and a second moment; below 4,096 elements all is fp32;
    from 100,000 on paged states are in managed memory. Source: bitsandbytes/optim.
    """
    from transformers import Trainer, TrainingArguments

    model = Model(torch.bfloat16)
    with World() as world:
        world.materialise(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, report_to="none")
        cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        made, _ = steps(world.tracker, lambda: cls(model.parameters(), **options))
    assert sorted(made) == sorted(states)
