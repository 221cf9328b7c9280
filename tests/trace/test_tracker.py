"""The tracker records what tensors do with storages. Sizes are counted with a pencil."""

from __future__ import annotations

import torch

from wazn.trace.tracker import DEVICE, rounded_bytes
from wazn.trace.world import World


def sizes(world: World) -> list[int]:
    return [event.num_bytes for event in world.tracker.events]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def test_a_tensor_is_one_block_until_it_dies() -> None:
    """A 3 x 5 fp32 tensor is an allocation of 60 bytes, and its death frees the same block."""
    with World() as world:
        tensor = empty(3, 5)
        del tensor
    first, second = world.tracker.events
    assert (first.num_bytes, second.num_bytes) == (60, -60)
    assert first.block_id == second.block_id
    assert (first.shape, first.dtype) == ((3, 5), "float32")


def test_views_share_the_block_and_keep_it_alive() -> None:
    """A view, a slice and a transpose allocate nothing; the block is freed when the last of them dies."""
    with World() as world:
        tensor = empty(4, 8)
        views = [tensor.view(32), tensor[1:], tensor.t()]
        del tensor
        assert sizes(world) == [128]
        views.clear()
        assert sizes(world) == [128, -128]


def test_an_operation_in_place_allocates_nothing() -> None:
    """`add_` and `copy_` write into the block that is there."""
    with World() as world:
        tensor, other = empty(8), empty(8)
        tensor.add_(other).copy_(other)
        assert sizes(world) == [32, 32]


def test_pytorch_counts_blocks_of_512_bytes() -> None:
    """Allocated bytes are multiples of 512: `kMinBlockSize` in c10/cuda/CUDACachingAllocator.cpp."""
    assert [rounded_bytes(size) for size in (1, 512, 513)] == [512, 512, 1024]
    with World() as world:
        kept = [empty(1), empty(129)]  # 4 and 516 bytes
        assert world.tracker.current_bytes == 512 + 1024
        kept.clear()
        assert (world.tracker.current_bytes, world.tracker.peak_bytes) == (0, 1536)


def test_nothing_is_allocated_for_an_empty_tensor() -> None:
    """PyTorch asks its allocator for no memory when a tensor has no elements."""
    with World() as world:
        kept = empty(0)
        assert sizes(world) == []
        del kept


def test_a_storage_that_changes_its_size_is_a_new_block() -> None:
    """`resize_` to more elements allocates the larger block; FSDP empties and refills storages this way."""
    with World() as world:
        tensor = empty(4)
        tensor.resize_(8)
        assert sizes(world) == [16, -16, 32]


def test_marks_go_into_the_events() -> None:
    """Each event carries the phase and the step in which it happened, the free of a block its own."""
    with World() as world:
        world.tracker.phase, world.tracker.step = "forward", 1
        tensor = empty(1)
        world.tracker.phase, world.tracker.step = "backward", 2
        del tensor
    assert [(e.phase, e.step) for e in world.tracker.events] == [("forward", 1), ("backward", 2)]


def test_host_memory_is_not_counted() -> None:
    """A factory without a device makes a tensor in host memory; what is computed from it stays there."""
    with World() as world:
        host = torch.zeros(100)
        twice = host * 2
        scalar = torch.tensor(1.0, device="cpu")
        assert sizes(world) == []
        on_device = twice.to(DEVICE)  # 400 bytes travel
        mixed = on_device + scalar
        back = on_device.to("cpu")
        assert sizes(world) == [400, 400]
        del host, twice, scalar, on_device, mixed, back
        assert sum(sizes(world)) == 0


def test_a_workspace_is_a_block_without_a_tensor() -> None:
    """Buffers inside a kernel are taken and given back by hand."""
    with World() as world:
        block_id = world.tracker.take(1000, op="kernel")
        world.tracker.give_back(block_id)
    assert sizes(world) == [1000, -1000]
