"""The allocator as a state machine: whatever happens, its books balance."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from tests.laws.timelines import MIB, SIZES
from wazn.timeline.allocator import MASK, SHIFT, CachingAllocator, make_allocator
from wazn.timeline.expandable import ExpandableAllocator
from wazn.timeline.settings import SMALL_BYTES, parse_allocator_settings


class AllocatorMachine(RuleBasedStateMachine):
    """Allocate, free and empty the cache in any order, with any settings, with and without a limit."""

    blocks = Bundle("blocks")
    allocator: CachingAllocator

    @initialize(
        text=st.sampled_from(
            (
                "",
                "max_split_size_mb:20",
                "roundup_power2_divisions:[1:4,64:2,>:8]",
                "expandable_segments:True",
                "expandable_segments:True,large_segment_size_mb:12",
                "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
            )
        ),
        capacity_mib=st.one_of(st.none(), st.integers(0, 400)),
    )
    def start(self, text: str, capacity_mib: int | None) -> None:
        """Any settings, with a limit or without."""
        capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
        self.allocator = make_allocator(
            parse_allocator_settings(text), capacity_bytes=capacity_bytes
        )

    @rule(target=blocks, num_bytes=SIZES)
    def allocate(self, num_bytes: int) -> object:
        """A block is as large as asked for; only a device with a limit has no room."""
        allocator = self.allocator
        ooms = allocator.num_ooms
        address = allocator.malloc(num_bytes)
        if address is None:
            assert allocator.num_ooms == ooms + 1
            assert allocator.capacity_bytes is not None
            return multiple()
        size, requested = allocator.live[address]
        assert requested == num_bytes
        assert size >= allocator.settings.round_size(num_bytes)
        return address

    @rule(address=consumes(blocks))
    def free(self, address: int) -> None:
        """Only a release lowers what is reserved."""
        before = self.allocator.reserved_bytes
        self.allocator.free(address)
        assert self.allocator.reserved_bytes == before

    @rule()
    def empty_the_cache(self) -> None:
        """No whole free segment is left, and nothing at all when nothing is alive."""
        allocator = self.allocator
        allocator.empty_cache()
        pages = isinstance(allocator, ExpandableAllocator)
        assert pages or not any(map(allocator.is_segment, allocator.small + allocator.large))
        if not allocator.live:
            assert allocator.reserved_bytes == 0

    @rule()
    def empty_it_twice(self) -> None:
        """The second time there is nothing to return."""
        self.allocator.empty_cache()
        before = self.allocator.reserved_bytes
        self.allocator.empty_cache()
        assert self.allocator.reserved_bytes == before

    @invariant()
    def blocks_tile_what_is_reserved(self) -> None:
        """Live and free blocks do not overlap, and together they are the reserved memory."""
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        free = [(block & MASK, block >> SHIFT, True) for block in allocator.small + allocator.large]
        live = [(address, size, False) for address, (size, _) in allocator.live.items()]
        tiles = sorted(free + live)
        assert sum(size for _, size, _ in tiles) == allocator.reserved_bytes
        for (address, size, is_free), (following, _, next_is_free) in pairwise(tiles):
            assert address + size <= following
            # "no two free neighbours": they would have been merged
            assert not (is_free and next_is_free and address + size == following)
        if not isinstance(allocator, ExpandableAllocator):
            assert sum(allocator.segments.values()) == allocator.reserved_bytes

    @invariant()
    def the_books_balance(self) -> None:
        """requested <= allocated <= reserved <= capacity, each the sum of its blocks."""
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        live = allocator.live.values()
        assert allocator.requested_bytes == sum(requested for _, requested in live)
        assert allocator.allocated_bytes == sum(size for size, _ in live)
        assert 0 <= allocator.requested_bytes <= allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        if allocator.capacity_bytes is not None:
            assert allocator.peak_reserved_bytes <= allocator.capacity_bytes
        if allocator.allowed_bytes is not None:
            assert allocator.peak_reserved_bytes <= allocator.allowed_bytes

    @invariant()
    def the_indices_agree(self) -> None:
        """The four structures hold the same free blocks, in order."""
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        for pool in (allocator.small, allocator.large):
            assert pool == sorted(set(pool))
        free = allocator.small + allocator.large
        assert allocator.free_from == {block & MASK: block for block in free}
        assert allocator.free_to == {(block & MASK) + (block >> SHIFT): block for block in free}
        assert all(size <= SMALL_BYTES or requested for size, requested in allocator.live.values())


AllocatorMachine.TestCase.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestAllocator = AllocatorMachine.TestCase
