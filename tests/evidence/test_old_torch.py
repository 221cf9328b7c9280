"""Indexing as PyTorch 2.4 did it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evidence.old_torch import every_slice_is_a_view


def nodes(tensor: torch.Tensor) -> list[str]:
    """Return the names of the nodes from a result to its leaf."""
    names, node = [], tensor.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def test_a_slice_of_everything_is_a_node() -> None:
    """Asked for the nodes of `x[..., :-1, :]`, PyTorch 2.4.1 says SliceBackward0, SliceBackward0, AccumulateGrad."""
    x = torch.zeros(2, 3, 4, requires_grad=True)
    with every_slice_is_a_view():
        assert nodes(x[..., :-1, :]) == ["SliceBackward0", "SliceBackward0", "AccumulateGrad"]
    assert torch.Tensor.__getitem__ is torch._C.TensorBase.__getitem__


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(1, None)),
        (..., slice(0, 2)),
        (slice(0, 1), ..., slice(None, None, 2)),
        (0, slice(None)),
        (slice(None), None),
        slice(-2, None),
        1,
        ...,
    ],
    ids=str,
)
def test_the_result_is_the_same(index: Any) -> None:
    """Only the graph differs, not what is taken."""
    x = torch.arange(24).reshape(2, 3, 4)
    expected = x[index]
    with every_slice_is_a_view():
        assert torch.equal(x[index], expected)
