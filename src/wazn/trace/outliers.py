"""The outliers of 8-bit layers: columns of the input that bitsandbytes multiplies in 16 bits.

transformers sets a threshold of 6.0, and trained language models have a few columns above it. How many depends on
data; here it is one, so that the path is the one with outliers and what the columns themselves hold is next to
nothing (one takes 2 bytes per token while its layer runs; models of 7B have up to 7).

Source: bitsandbytes 0.46 and later, `int8_vectorwise_quant` in backends/cuda/ops.py and `int8_mixed_scaled_mm` in
backends/default/ops.py. Their fake operators leave the number of columns open, which autograd functions cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from wazn.trace.imports import patched

__all__ = ["has_outlier_operators", "one_outlier_column"]

_NUM_COLUMNS = 1


def has_outlier_operators() -> bool:
    """Say whether the bitsandbytes that is imported has operators for outliers: since 0.46."""
    return hasattr(torch.ops.bitsandbytes, "int8_mixed_scaled_mm")


@contextmanager
def one_outlier_column(functional: ModuleType) -> Iterator[None]:
    """Let every input of an 8-bit layer with a threshold have one column of outliers, while the context lasts."""
    if not has_outlier_operators():
        yield
        return
    quantise = partial(_vectorwise_quant, functional.int8_vectorwise_quant)
    with (
        patched(functional, {"int8_vectorwise_quant": quantise}),
        patched(torch.ops.bitsandbytes, {"int8_mixed_scaled_mm": _mixed_scaled_mm}),
    ):
        yield


def _vectorwise_quant(
    own: Callable[..., Any], inputs: torch.Tensor, threshold: float = 0.0
) -> tuple[Any, ...]:
    if threshold == 0.0:
        result: tuple[Any, ...] = own(inputs, threshold)
        return result
    row_stats = torch.empty(
        inputs.numel() // inputs.shape[-1], dtype=torch.float32, device=inputs.device
    )
    out_row = torch.empty(inputs.shape, dtype=torch.int8, device=inputs.device)
    outliers = inputs.abs() >= threshold
    columns = outliers.any(dim=0)
    columns = torch.empty(_NUM_COLUMNS, dtype=torch.int64, device=inputs.device)
    out_row[:, columns] = 0
    return out_row, row_stats, columns


def _mixed_scaled_mm(
    inputs: torch.Tensor,
    quantised: torch.Tensor,
    weight: torch.Tensor,
    input_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outlier_cols: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    operators = torch.ops.bitsandbytes
    sub_a = inputs[:, outlier_cols].contiguous()
    columns = weight[:, outlier_cols].contiguous()
    sub_b = operators.int8_vectorwise_dequant.default(columns, weight_scales).to(inputs.dtype).t()
    del columns
    out = operators.int8_scaled_mm.default(
        quantised, weight, input_scales, weight_scales, bias=bias, dtype=inputs.dtype
    )
    return out.addmm(sub_a, sub_b), sub_a
