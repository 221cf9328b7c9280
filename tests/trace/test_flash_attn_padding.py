"""Padding taken out of a batch and put back, with data: the same numbers, the same gradients."""

from __future__ import annotations

import torch

from wazn.trace.flash_attn_padding import index_first_axis, pad_input, unpad_input

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


def test_a_batch_comes_back_with_zeros_for_its_padding() -> None:
    """4 of 8 tokens are taken out, rows of 3 and 1; back in place they are the batch times its mask."""
    batch = torch.arange(1.0, 17.0).view(2, 4, 2)
    taken, positions, begins, longest, used = unpad_input(batch, MASK)
    assert taken.shape == (4, 2)
    assert positions.tolist() == [0, 1, 2, 4]
    assert begins.tolist() == [0, 3, 4]
    assert begins.dtype is torch.int32  # what the kernels take
    assert (longest, used.tolist()) == (3, [3, 1])
    assert torch.equal(pad_input(taken, positions, 2, 4), batch * MASK.unsqueeze(-1))


def test_gradients_come_back_to_the_tokens_that_count() -> None:
    """Of a sum of twice the tokens the gradient is 2 where the mask is 1, and 0 elsewhere."""
    batch = torch.ones((2, 4, 3, 2), requires_grad=True)
    taken, positions, *_ = unpad_input(batch, MASK)
    (2 * pad_input(taken, positions, 2, 4)).sum().backward()
    assert batch.grad is not None
    assert torch.equal(batch.grad, (2.0 * MASK).view(2, 4, 1, 1).expand(2, 4, 3, 2))


def test_unused_tokens_keep_their_room() -> None:
    """Tokens of a second mask are taken out too, but not counted: used are 3 and 1 of rows of 4 and 1."""
    unused = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    _, positions, begins, longest, used = unpad_input(torch.ones((2, 4, 1)), MASK, unused)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    assert (begins.tolist(), longest, used.tolist()) == ([0, 4, 5], 4, [3, 1])


def test_rows_are_taken_by_position() -> None:
    """[N, ...] at positions [T] is what indexing gives."""
    rows = torch.arange(12.0).view(4, 3)
    positions = torch.tensor([3, 1])
    assert torch.equal(index_first_axis(rows, positions), rows[positions])
