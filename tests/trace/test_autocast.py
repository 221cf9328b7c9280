"""Autocast on fake tensors follows CUDA's lists: torch/include/ATen/autocast_mode.h and PyTorch's documentation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from wazn.trace.opcheck import Spec, measure_op
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

BF16, FP32 = torch.bfloat16, torch.float32

FP32_ON_CUDA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "pow": lambda x: x.pow(2),
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "sum": torch.sum,
    "sum over a dimension": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softplus": F.softplus,
    "mse_loss": lambda x: F.mse_loss(x, x),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
}
AS_THE_INPUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + x,
    "mul": lambda x: x * x,
    "mean": lambda x: x.mean(-1),
    "silu": F.silu,
    "gelu": F.gelu,
    "cat": lambda x: torch.cat([x, x]),
    "dropout": lambda x: F.dropout(x, 0.1),
    "cos": torch.cos,
}


def result_of(function: Callable[..., torch.Tensor], *dtypes: torch.dtype) -> torch.dtype:
    with World(), torch.autocast("cpu", dtype=BF16):
        return function(*(torch.empty(8, 8, dtype=dtype, device=DEVICE) for dtype in dtypes)).dtype


@pytest.mark.parametrize("name", FP32_ON_CUDA)
def test_what_runs_in_fp32(name: str) -> None:
    """These are on CUDA's fp32 list: a bf16 input gives an fp32 result."""
    assert result_of(FP32_ON_CUDA[name], BF16) is FP32


@pytest.mark.parametrize("name", AS_THE_INPUT)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_autocast_leaves_alone(name: str, dtype: torch.dtype) -> None:
    """These are on no list: the result has the input's type."""
    assert result_of(AS_THE_INPUT[name], dtype) is dtype


@pytest.mark.parametrize("function", [torch.matmul, torch.mm, F.linear])
def test_products_run_in_the_lower_type(function: Callable[..., torch.Tensor]) -> None:
    """Matrix products are on the list of lower precision."""
    assert result_of(function, FP32, FP32) is BF16


def test_mixed_types_are_promoted_where_the_kernel_cannot_mix() -> None:
    """`index_put` and `scatter_add` widen to the widest input: the promote list."""

    def scatter(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(8, 8, dtype=torch.int64, device=DEVICE)
        return torch.scatter_add(target, 0, index, source)

    assert result_of(scatter, FP32, BF16) is FP32


def test_a_concatenation_of_mixed_types_makes_no_copies() -> None:
    """`cat` promotes inside its kernel on CUDA; the CPU's list would first widen the bf16 input."""
    trace = measure_op(
        lambda a, b: torch.cat([a, b]),
        Spec((64, 64), "float32"),
        Spec((64, 64), "bfloat16"),
        autocast="bfloat16",
    )
    assert trace.changes("forward") == [128 * 64 * 4]


def test_a_weight_is_cast_once_per_region() -> None:
    """A leaf in fp32 that requires gradients is cached until the outermost region ends; an activation is not."""
    with World() as world:
        weight = torch.empty(64, 32, device=DEVICE, requires_grad=True)
        frozen = torch.empty(64, 32, device=DEVICE)
        x = torch.empty(16, 32, dtype=BF16, device=DEVICE)
        start = len(world.tracker.events)
        with torch.autocast("cpu", dtype=BF16), torch.no_grad():
            for _ in range(3):
                F.linear(x, weight)
                F.linear(x, frozen)
        events = world.tracker.events[start:]
    casts = [event for event in events if event.op == "aten._to_copy.default"]
    assert [event.num_bytes > 0 for event in casts].count(True) == 1 + 3


def test_libraries_that_ask_for_cuda_get_the_same_answer() -> None:
    """peft and bitsandbytes ask `torch.is_autocast_enabled()`, which means CUDA, and for the type."""
    with World():
        assert not torch.is_autocast_enabled()
        with torch.autocast("cpu", dtype=BF16):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is BF16
