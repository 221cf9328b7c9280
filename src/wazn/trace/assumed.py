"""What is assumed of data that nobody knows: as a healthy run has it.

A router spreads its tokens evenly over the experts, and no measured number is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ASSUMED"]

_ATEN = torch.ops.aten
_LARGEST_CHOICES = 1 << 20


def _balanced(scores: torch.Tensor, choices: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return choices among the columns of `scores` that take each column equally often.

    The i-th row takes the columns from i * k on, k to a row, round and round; none of them twice.
    """
    if dim % max(1, scores.dim()) != scores.dim() - 1 or choices.numel() > _LARGEST_CHOICES:
        return None
    return torch.arange(choices.numel()).view(choices.shape) % scores.shape[-1]


def _topk(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    dim = args[2] if len(args) > 2 else -1
    return None, _balanced(args[0], result[1], dim)


def _argmax(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    dim = args[1] if len(args) > 1 else None
    return (None if dim is None else _balanced(args[0], result, dim),)


def _max_dim(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    return None, _balanced(args[0], result[1], args[1])


def _is_zero(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    return (torch.zeros((), dtype=torch.bool).expand(result.shape) if args[1] == 0 else None,)


def _is_not_zero(args: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    return (torch.ones((), dtype=torch.bool).expand(result.shape) if args[1] == 0 else None,)


# Given the arguments and the results, the values of the results; None for those that stay unknown. They are asked of
# operations on floating-point numbers only.
ASSUMED: dict[Any, Callable[[tuple[Any, ...], Any], tuple[Any, ...]]] = {
    _ATEN.topk.default: _topk,
    _ATEN.argmax.default: _argmax,
    _ATEN.max.dim: _max_dim,
    _ATEN.eq.Scalar: _is_zero,
    _ATEN.ne.Scalar: _is_not_zero,
}
