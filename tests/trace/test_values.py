"""What is known of tensors that come from a batch: the same numbers that PyTorch computes with data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

ROWS = [[1, 1, 1, 0], [1, 1, 0, 0]]  # a mask that is padded


def masked(mask: torch.Tensor) -> torch.Tensor:
    """Return rows of eight numbers where the mask is true."""
    return torch.zeros((2, 4, 8), device=mask.device)[mask.bool()]


ASKED: dict[str, Callable[[torch.Tensor], object]] = {
    "is anything padded": lambda mask: mask.all().item(),
    "how many tokens": lambda mask: mask.sum().item(),
    "the longest row": lambda mask: mask.sum(-1).max().item(),
    "does it rise": lambda mask: bool((mask.cumsum(-1).diff() >= 0).all()),
    "where padding begins": lambda mask: mask.argmin(-1).tolist(),
    "positions": lambda mask: tuple((mask != 0).nonzero().shape),
    "rows under a mask": lambda mask: tuple(masked(mask).shape),
    "numbers under a mask": lambda mask: mask[mask.bool()].tolist(),
    "labels": lambda mask: mask.masked_fill(mask == 0, -100)[:, 1:].reshape(-1).tolist(),
    "joined": lambda mask: torch.cat([mask, torch.ones_like(mask)], -1).sum().item(),
    "repeated": lambda mask: torch.repeat_interleave(mask.sum(-1)).tolist(),
    "runs": lambda mask: torch.unique_consecutive(mask[0]).tolist(),
    "a range": lambda mask: torch.arange(4)[mask[0].bool()].tolist(),
}


@pytest.mark.parametrize("question", ASKED)
def test_a_question_about_the_batch_has_its_true_answer(question: str) -> None:
    """Asked of a fake mask of two padded rows, the answer is the one that PyTorch gives with data."""
    ask = ASKED[question]
    with World():
        answer = ask(torch.tensor(ROWS).to(DEVICE))
    assert answer == ask(torch.tensor(ROWS))


def test_what_is_written_in_place_is_followed_through_views() -> None:
    """A row set to zero is zero in the whole mask: 2 of 5 ones are left."""
    with World():
        mask = torch.tensor(ROWS).to(DEVICE)
        mask[0] = 0
        assert mask.sum().item() == 2


def test_an_unknown_write_makes_a_value_unknown() -> None:
    """After a copy from memory without data the sum is not 5 any more: any number does, and 1 is given."""
    with World():
        mask = torch.tensor(ROWS).to(DEVICE)
        mask.copy_(torch.empty((2, 4), dtype=torch.int64, device=DEVICE))
        assert mask.sum().item() == 1


def test_a_shuffle_leaves_things_in_order() -> None:
    """A sampler's permutation is 0, 1, 2, ...: samples of different lengths come in the order of the data set."""
    with World():
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]


def test_large_masks_stay_without_data() -> None:
    """A mask of 2,048 x 2,048 is more than four million elements: it has no value, and takes no room here."""
    with World():
        assert (
            "_wazn_value" not in torch.ones((2048, 2048), dtype=torch.bool, device=DEVICE).__dict__
        )


def test_positions_under_a_mask_live_for_the_operation_alone() -> None:
    """Indexing with a mask of 5 ones makes 5 x 2 positions of 8 bytes, as `expandTensors` in IndexingUtils.h, and frees
    them when it returns; 5 rows of 8 fp32 numbers stay.
    """
    with World() as world:
        mask = torch.tensor(ROWS).to(DEVICE).bool()
        rows = torch.empty((2, 4, 8), device=DEVICE)
        start = len(world.tracker.events)
        taken = rows[mask]
        seen = [(event.num_bytes, event.op) for event in world.tracker.events[start:]]
    assert seen == [
        (80, "aten.nonzero.default"),
        (160, "aten.index.Tensor"),
        (-80, "aten.nonzero.default"),
    ]
    del taken


def test_a_scaler_of_a_healthy_run_finds_no_infinity() -> None:
    """The flag that `_amp_foreach_non_finite_check_and_unscale_` may raise is still 0."""
    with World():
        gradient, flag = torch.empty(4, device=DEVICE), torch.full((), 0.0, device=DEVICE)
        scale = torch.full((), 2.0, device=DEVICE)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, scale)
        assert flag.item() == 0.0


def test_inference_mode_hides_no_part_of_an_operation() -> None:
    """A linear layer with a bias on [2, 3, 4] makes its product as outside inference mode, and a number is still asked
    for: `item` and `linear` are composite, and arrive undivided where autograd is off altogether.
    """

    def ops(mode: bool) -> list[str]:
        with World() as world, torch.inference_mode(mode), torch.no_grad():
            layer = torch.nn.Linear(4, 8, device=DEVICE)
            start = len(world.tracker.events)
            torch.nn.functional.linear(
                torch.empty((2, 3, 4), device=DEVICE), layer.weight.t().t(), layer.bias
            )
            assert torch.tensor(ROWS).to(DEVICE).sum().item() == 5
            return [event.op for event in world.tracker.events[start:]]

    assert ops(True) == ops(False)
