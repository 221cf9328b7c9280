"""Indexing as PyTorch did it when these runs were made: each slice is a view of its own, even one of everything.

`x[..., :-1, :]` has two nodes in the graph of 2.4.1, and one in 2.13, which leaves the last slice out. In backward each
node makes zeros of the size of its input for a moment: allocated peaks do not change, but what is reserved does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["OLD_TORCH", "every_slice_is_a_view"]

OLD_TORCH = "2.4.1"  # in which this was seen


@contextmanager
def every_slice_is_a_view() -> Iterator[None]:
    """Index tensors by slices as `applySlice` in torch/csrc/autograd/python_variable_indexing.cpp did in 2.4."""
    original = torch.Tensor.__getitem__

    def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or _is_plain(part) for part in parts):
            return original(tensor, index)
        result, dim = tensor, 0
        for part in parts:
            if part is Ellipsis:
                dim += tensor.dim() - (len(parts) - 1)
                continue
            start = 0 if part.start is None else part.start
            stop = sys.maxsize if part.stop is None else part.stop
            step = 1 if part.step is None else part.step
            if (start, stop, step) != (0, result.shape[dim], 1):
                result = torch.ops.aten.slice.Tensor(result, dim, start, stop, step)
            dim += 1
        return original(tensor, index) if result is tensor else result

    torch.Tensor.__getitem__ = getitem
    try:
        yield
    finally:
        del torch.Tensor.__getitem__  # it inherits the original


def _is_plain(part: object) -> bool:
    """Whether it is a slice between numbers."""
    if not isinstance(part, slice):
        return False
    return all(end is None or type(end) is int for end in (part.start, part.stop, part.step))
