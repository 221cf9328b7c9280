"""The caching allocator, by pencil, from the rules of its source."""

from __future__ import annotations

import pytest

from wazn.errors import InputError
from wazn.timeline.allocator import CachingAllocator, make_allocator
from wazn.timeline.settings import AllocatorSettings, parse_allocator_settings

MIB = 2**20


def made(settings: str = "", capacity_mib: int | None = None) -> CachingAllocator:
    """Return an empty allocator."""
    return make_allocator(
        parse_allocator_settings(settings),
        capacity_bytes=None if capacity_mib is None else capacity_mib * MIB,
    )


def take(allocator: CachingAllocator, num_bytes: int) -> int:
    """Allocate what is known to fit."""
    address = allocator.malloc(num_bytes)
    assert address is not None
    return address


def test_one_byte_takes_512_of_a_2_mib_segment() -> None:
    """Requested, allocated and reserved are three numbers: 1, 512, 2 MiB."""
    allocator = made()
    take(allocator, 1)
    assert allocator.requested_bytes == 1
    assert allocator.allocated_bytes == 512
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.largest_free_bytes == 2 * MIB - 512


def test_small_and_large_requests_never_share_a_segment() -> None:
    """1 MiB is small and goes into 2 MiB, one byte more is large and goes into 20 MiB."""
    allocator = made()
    take(allocator, MIB)
    assert allocator.reserved_bytes == 2 * MIB
    take(allocator, MIB + 1)
    assert allocator.reserved_bytes == 22 * MIB
    take(allocator, MIB)  # the other half of the small segment
    assert allocator.reserved_bytes == 22 * MIB


def test_up_to_1_mib_stays_inside_a_large_block() -> None:
    """11 MiB get a segment of 12: 1 MiB is not more than kSmallSize, is not split off, and counts as allocated."""
    allocator = made()
    take(allocator, 11 * MIB)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 12 * MIB
    take(allocator, 11 * MIB - 512)  # leaves 1 MiB and 512 bytes: split
    assert allocator.reserved_bytes == 24 * MIB
    assert allocator.allocated_bytes == 23 * MIB - 512
    assert allocator.largest_free_bytes == MIB + 512


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    """Of free blocks of 30, 14 and 20 MiB a request for 13 MiB takes the one of 14."""
    allocator = made()
    blocks = {mib: take(allocator, mib * MIB) for mib in (30, 14, 20)}
    for address in blocks.values():
        allocator.free(address)
    assert take(allocator, 13 * MIB) == blocks[14]
    assert allocator.reserved_bytes == 64 * MIB


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    """BlockComparatorSize orders by size, then by address, whatever the order of the frees."""
    allocator = made()
    blocks = [take(allocator, 16 * MIB) for _ in range(3)]
    for address in reversed(blocks):
        allocator.free(address)
    assert take(allocator, 16 * MIB) == blocks[0]


def test_freed_neighbours_become_one_block() -> None:
    """Five blocks of 4 MiB fill a segment of 20; freed in any order they are one free block of 20 MiB."""
    allocator = made()
    blocks = [take(allocator, 4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for index in (1, 3, 0, 4, 2):
        allocator.free(blocks[index])
    assert allocator.largest_free_bytes == 20 * MIB
    assert len(allocator.large) == 1


def test_blocks_of_different_segments_are_not_merged() -> None:
    """Two free segments of 12 MiB do not hold 20 MiB: a third is made."""
    allocator = made()
    for address in [take(allocator, 12 * MIB) for _ in range(2)]:
        allocator.free(address)
    take(allocator, 20 * MIB)
    assert allocator.reserved_bytes == 44 * MIB


def test_memory_is_kept_until_the_cache_is_emptied() -> None:
    """Freed memory stays reserved; emptying the cache returns whole segments only."""
    allocator = made()
    first, second = take(allocator, 5 * MIB), take(allocator, 5 * MIB)
    alone = take(allocator, 30 * MIB)
    allocator.free(first)
    allocator.free(alone)
    assert allocator.reserved_bytes == 50 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB  # the second block holds its segment
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.peak_reserved_bytes == 50 * MIB


def test_a_full_device_makes_the_allocator_release_and_try_again() -> None:
    """With 60 MiB, two free segments of 20 go back before 40 MiB can be had; that is one retry, and no error."""
    allocator = made(capacity_mib=60)
    for address in [take(allocator, 20 * MIB) for _ in range(2)]:
        allocator.free(address)
    take(allocator, 40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 0)


def test_fragments_cannot_be_released() -> None:
    """A segment with one live block stays whole: 18 MiB free inside it do not help a request for 42 MiB."""
    allocator = made(capacity_mib=60)
    first = take(allocator, 18 * MIB)
    allocator.free(first)
    take(allocator, 2 * MIB)  # out of the free 18
    assert allocator.malloc(44 * MIB) is None
    assert allocator.reserved_bytes == 18 * MIB
    assert allocator.allocated_bytes == 2 * MIB
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)
    assert allocator.device_free_bytes == 42 * MIB
    take(allocator, 42 * MIB)  # it goes on after the error


def test_blocks_over_the_split_limit_are_used_whole_or_not_at_all() -> None:
    """`max_split_size_mb:64`: a free block of 100 MiB serves 90 MiB unsplit, but neither 30 nor 70 MiB."""
    allocator = made("max_split_size_mb:64")
    allocator.free(take(allocator, 100 * MIB))
    take(allocator, 30 * MIB)  # below the limit: may not touch an oversize block
    assert allocator.reserved_bytes == 130 * MIB
    take(allocator, 70 * MIB)  # 100 >= 70 + 20: too much would be wasted
    assert allocator.reserved_bytes == 200 * MIB
    take(allocator, 90 * MIB)
    assert allocator.reserved_bytes == 200 * MIB
    assert allocator.allocated_bytes == (30 + 70 + 100) * MIB


def test_oversize_blocks_go_first_when_memory_is_short() -> None:
    """With a split limit the smallest oversize block that suffices is released; the rest of the cache stays."""
    allocator = made("max_split_size_mb:64", capacity_mib=300)
    for address in [take(allocator, mib * MIB) for mib in (120, 80, 30)]:
        allocator.free(address)
    take(allocator, 95 * MIB)  # 230 + 96 > 300; 80 is too small, so the 120 go
    assert allocator.reserved_bytes == (80 + 30 + 96) * MIB
    assert allocator.num_alloc_retries == 0


def test_rounding_to_divisions_makes_different_sizes_interchangeable() -> None:
    """With two divisions 5 and 6 MiB are both 6 MiB, so that one serves the other."""
    allocator = made("roundup_power2_divisions:2")
    allocator.free(take(allocator, 5 * MIB))
    take(allocator, 6 * MIB)
    assert allocator.allocated_bytes == 6 * MIB
    assert allocator.requested_bytes == 6 * MIB


def test_garbage_is_collected_above_the_threshold() -> None:
    """An unused segment goes once more than half of the 400 MiB is reserved that the fraction allows.

    250 MiB are reserved at the request for 160; the only unused segment, of 100, is as old as the average, and goes.
    """
    settings = parse_allocator_settings(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
    )
    allocator = make_allocator(settings, capacity_bytes=500 * MIB)
    old = take(allocator, 100 * MIB)
    allocator.free(old)
    young = take(allocator, 150 * MIB)
    assert allocator.reserved_bytes == 250 * MIB
    take(allocator, 160 * MIB)
    assert allocator.reserved_bytes == (150 + 160) * MIB
    allocator.free(young)


def test_expandable_segments_grow_page_by_page() -> None:
    """Large pages are 20 MiB: 30 MiB take two, 5 more fit into the second, 10 more need a third."""
    allocator = made("expandable_segments:True")
    first = take(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    second = take(allocator, 5 * MIB)
    assert second == first + 30 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    assert take(allocator, 10 * MIB) == second + 5 * MIB
    assert allocator.reserved_bytes == 60 * MIB
    take(allocator, 1)  # the small pool has pages of 2 MiB
    assert allocator.reserved_bytes == 62 * MIB


def test_expandable_segments_leave_no_rest_inside_a_block() -> None:
    """Without them 11 MiB take a block of 12; with them every rest from 512 bytes on is split off."""
    allocator = made("expandable_segments:True")
    take(allocator, 11 * MIB)
    assert allocator.allocated_bytes == 11 * MIB


def test_only_whole_free_pages_are_unmapped() -> None:
    """Of 60 MiB with a live block at 25..30 MiB the pages 0..20 and 40..60 can go, the one between them not."""
    allocator = made("expandable_segments:True", capacity_mib=80)
    before, held, after = (take(allocator, mib * MIB) for mib in (25, 5, 30))
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(before)
    allocator.free(after)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    # The hole is filled first, as the lowest address with room: the page before the held block comes back.
    assert take(allocator, 22 * MIB) == before
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(held)


def test_expandable_segments_survive_what_fragments_do_not() -> None:
    """The run that fails with fixed segments fits: 42 MiB grow behind a block that is still in use."""
    allocator = made("expandable_segments:True", capacity_mib=60)
    allocator.free(take(allocator, 18 * MIB))
    take(allocator, 2 * MIB)
    take(allocator, 42 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("num_bytes", [0, -1, 2**60])
def test_absurd_requests_are_refused(num_bytes: int) -> None:
    """PyTorch refuses 1 EB and more; nothing and less than nothing are no allocations."""
    with pytest.raises(InputError, match="cannot allocate"):
        CachingAllocator().malloc(num_bytes)


def test_a_block_is_freed_once() -> None:
    """A second free of the same address is an error, not a negative number."""
    allocator = CachingAllocator()
    address = take(allocator, 100)
    allocator.free(address)
    with pytest.raises(InputError, match="no block"):
        allocator.free(address)


def test_the_fraction_counts_from_the_whole_device() -> None:
    """`per_process_memory_fraction:0.5` of 80 MiB allows 40, also where 60 are free."""
    settings = AllocatorSettings(per_process_memory_fraction=0.5)
    allocator = make_allocator(settings, capacity_bytes=60 * MIB, device_total_bytes=80 * MIB)
    assert allocator.malloc(42 * MIB) is None
    take(allocator, 40 * MIB)
