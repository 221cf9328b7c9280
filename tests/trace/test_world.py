"""Fake tensors behave as CUDA tensors do where the CPU or the fakeness would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from wazn.trace.opcheck import Spec, measure_op
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World

F = torch.nn.functional
WEIGHT = (8, 8)

MEETING_GRADIENTS: dict[str, Callable[..., torch.Tensor]] = {
    "two products": lambda h, w: h @ w + h @ w,
    "three products": lambda h, w: h @ w + h @ w + h @ w,
    "residual": lambda h, w: h + h @ w,
    "residual, product first": lambda h, w: h @ w + h,
    "residuals in a chain": lambda h, w: (h + h @ w) + (h + h @ w) @ w,
    "gradients that are views": lambda h, w: (
        (h.view(2, 16) * 2).view(4, 8) + (h.view(2, 16) * 3).view(4, 8)
    ),
    "linear layers over three dimensions": lambda h, w: (
        F.linear(h.view(2, 2, 8), w) + F.linear(h.view(2, 2, 8), w)
    ),
    "a product after a view": lambda h, w: h @ w + h.view(2, 16).view(4, 8),
    "expanded gradients": lambda h, w: h.sum() + h.sum(),
    "transposed": lambda h, w: (h.t() * 2).t() + h @ w,
    "slices": lambda h, w: torch.cat([h[:, :4] * 2, h[:, 4:] * 3], 1),
    "casts": lambda h, w: h.to(torch.bfloat16).float() + h * h,
    "a vector used twice": lambda h, w: (h * h[0]) * (h * h[0]),
}


def backward_of(function: Callable[..., torch.Tensor]) -> None:
    weight = torch.zeros(WEIGHT, device=DEVICE)
    leaf = torch.zeros(4, 8, device=DEVICE, requires_grad=True)
    out = function(leaf * 1, weight)
    (out * 1).sum().backward()


def additions_of_the_real_engine(function: Callable[..., torch.Tensor]) -> list[bool]:
    """Return for each addition whether it was in place, of a run on real tensors; backward ends the list."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        backward_of(function)
    names = sorted((event.time_range.start, event.name) for event in record.events())
    return [name == "aten::add_" for _, name in names if name in ("aten::add", "aten::add_")]


def allocations_of_additions(function: Callable[..., torch.Tensor]) -> int:
    with World() as world:
        backward_of(function)
    return sum(e.num_bytes > 0 and e.op == "aten.add.Tensor" for e in world.tracker.events)


@pytest.mark.parametrize("name", MEETING_GRADIENTS)
def test_gradients_meet_in_place_as_with_real_tensors(name: str) -> None:
    """The engine adds a second gradient into the first when nobody else holds it; the real engine says when that is.

    Out of place each addition allocates; in place none does. Forward's additions are out of place in both.
    """
    in_place = additions_of_the_real_engine(MEETING_GRADIENTS[name])
    assert in_place, "the case has no addition"
    assert allocations_of_additions(MEETING_GRADIENTS[name]) == in_place.count(False)


@pytest.mark.parametrize(
    ("name", "function", "inputs"),
    [
        ("topk", lambda x: torch.topk(x, 2, -1)[0], ()),
        ("index", lambda x, i: x[i], (Spec((16,), "int64"),)),
        ("gather", lambda x, i: x.gather(1, i), (Spec((8, 4), "int64"),)),
    ],
)
def test_backward_fills_one_block_of_zeros(
    name: str, function: Callable[..., torch.Tensor], inputs: tuple[Spec, ...]
) -> None:
    """The gradient of a selection is one tensor of the input's size, filled in place: 8 x 64 x 4 bytes."""
    trace = measure_op(function, Spec((8, 64), "float32", requires_grad=True), *inputs)
    assert [size for size in trace.changes("backward") if size > 0] == [8 * 64 * 4]


def test_layer_norm_keeps_fp32_statistics() -> None:
    """On CUDA mean and reciprocal deviation of a bf16 layer norm are fp32: `layer_norm_cuda`, `toAccumulateType`."""
    layer = torch.nn.LayerNorm(64, device="meta", dtype=torch.bfloat16)
    trace = measure_op(layer, Spec((4, 32, 64), requires_grad=True))
    assert trace.changes("forward") == [4 * 32 * 64 * 2, 4 * 32 * 4, 4 * 32 * 4]


def test_layer_norm_under_autocast_runs_in_fp32() -> None:
    """`layer_norm` is on CUDA's fp32 list: the bf16 input is copied to fp32 and the result is fp32."""
    layer = torch.nn.LayerNorm(64, device="meta", dtype=torch.float32)
    trace = measure_op(layer, Spec((4, 32, 64), requires_grad=True), autocast="bfloat16")
    assert trace.changes("forward")[:2] == [4 * 32 * 64 * 4, 4 * 32 * 64 * 4]


def test_few_tokens_need_no_buffers_in_the_embeddings_backward() -> None:
    """Up to 3,072 tokens `embedding_dense_backward_cuda` allocates the gradient only: 100 x 64 x 2 bytes."""
    layer = torch.nn.Embedding(100, 64, device="meta", dtype=torch.bfloat16)
    trace = measure_op(layer, Spec((1, 3072), "int64"))
    assert [size for size in trace.changes("backward") if size > 0] == [100 * 64 * 2]


def test_many_tokens_are_sorted_and_summed_in_fp32() -> None:
    """4,096 tokens of 100 words: sums for 4096 // 10 + 100 partial segments, fp32; indices of 8 bytes.

    Source: `embedding_backward_cuda_kernel` in aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    layer = torch.nn.Embedding(100, 64, device="meta", dtype=torch.bfloat16)
    trace = measure_op(layer, Spec((1, 4096), "int64"))
    tokens, partials = 4096 * 8, 409 + 100
    assert [size for size in trace.changes("backward") if size > 0] == [
        tokens,
        tokens,
        100 * 64 * 2,
        tokens,
        8,
        100 * 8,
        100 * 8,
        8,
        partials * 8,
        partials * 64 * 4,
    ]


def test_the_norm_of_many_tensors_has_a_number_per_chunk() -> None:
    """`foreach_tensor_norm_cuda` reduces chunks of 65,536 elements: 2 tensors x 3 chunks x 4 bytes, then scalars."""
    with World() as world:
        grads = [torch.empty(65536 * 3, device=DEVICE), torch.empty(8, device=DEVICE)]
        start = len(world.tracker.events)
        norms = torch._foreach_norm(grads)
        sizes = [event.num_bytes for event in world.tracker.events[start:]]
        del norms
    assert sizes == [24, 4, 4, -24]


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_experts_are_multiplied_in_any_dtype(dtype: str, itemsize: int) -> None:
    """By pencil: 4 experts from 64 to 30 for 100 rows give [100, 30], each row padded to 16 bytes (32 elements
    in either dtype), and gradients as large as the inputs.

    Source: GroupedMMUtils.h of ATen: bfloat16 has a kernel, other dtypes fall back to a product per expert
    into the same result.
    """
    trace = measure_op(
        lambda x, weight, offsets: torch.nn.functional.grouped_mm(
            x, weight.transpose(1, 2), offs=offsets
        ),
        Spec((100, 64), dtype, requires_grad=True),
        Spec((4, 30, 64), dtype, requires_grad=True),
        Spec((4,), "int32"),
    )
    assert trace.changes("forward")[:1] == [(99 * 32 + 30) * itemsize]
    assert trace.gradient_bytes >= (100 * 64 + 4 * 64 * 30) * itemsize
    assert {100 * 64 * itemsize, 4 * 64 * 30 * itemsize} <= set(trace.changes("backward"))


def test_cublas_gets_a_workspace_in_forward_and_one_in_backward() -> None:
    """8.125 MiB (`:4096:2:16:8`) for the handle of each thread, and for good; 32 MiB on Hopper."""
    for capability, size in (((8, 0), 8_519_680), ((9, 0), 33_554_432)):
        with World(capability=capability, matmul_workspaces=True) as world:
            for _ in range(2):
                leaf = torch.empty(4, 4, device=DEVICE, requires_grad=True)
                (leaf @ leaf).sum().backward()
        taken = [e.num_bytes for e in world.tracker.events if e.op.startswith("cublas")]
        assert taken == [size, size]


def test_questions_for_values_are_answered_as_in_a_healthy_run() -> None:
    """A mask is all ones, nothing is NaN, and `item()` gives a number of the tensor's kind."""
    with World():
        mask = torch.empty(4, dtype=torch.int64, device=DEVICE)
        loss = torch.empty((), device=DEVICE)
        assert bool((mask == 1).all())
        assert not bool(torch.isnan(loss).any())
        assert not bool(torch.isinf(loss))
        assert (loss.item(), mask[0].item()) == (1.0, 1)


def test_weights_that_are_tied_stay_tied() -> None:
    """A parameter under two names gets one storage: 100 x 8 fp32 once."""
    model = torch.nn.ModuleList(
        [torch.nn.Embedding(100, 8, device="meta"), torch.nn.Linear(8, 100, False, device="meta")]
    )
    model[1].weight = model[0].weight
    with World() as world:
        world.materialise(model)
        assert model[0].weight is model[1].weight
        assert world.tracker.current_bytes == 3584  # 3,200 bytes, rounded
    assert model[0].weight.requires_grad


def test_leaving_the_world_restores_pytorch() -> None:
    """Autocast's lists, its questions and the engine are PyTorch's own again after the context."""
    before = (torch.is_autocast_enabled, torch.autograd._engine_run_backward)
    with World():
        assert before[0] is not torch.is_autocast_enabled
    assert before == (torch.is_autocast_enabled, torch.autograd._engine_run_backward)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = torch.zeros(4, dtype=torch.bfloat16)
        assert torch.softmax(real, -1).dtype is torch.bfloat16  # the CPU's list, not CUDA's
