"""A model of PyTorch's caching allocator for one stream of one GPU, without the GPU.

Source: `c10/cuda/CUDACachingAllocator.cpp`, read at 001074d25084; a docstring here names the function there whose rules
it follows, and the constants are in `settings`. What changed from then to v2.13.0 (cf30153c4c13) is held to that
release's own binary: the recorded runs in `tests/timeline/recorded` must come out the same, block by block and address
by address.

The state is four structures of plain integers, so that `replay` can work on them without a function call per event:

    small, large    the free blocks of each pool, sorted; a key is `size << SHIFT | address`, so that the order is
                    PyTorch's (BlockComparatorSize: by size, then by address) and best fit is a bisection
    free_from       address of a free block -> its key
    free_to         address behind a free block -> its key

Segments never touch (there is a gap between them), so that two free blocks that do touch belong to one segment and
are merged. Addresses only grow. The real driver's addresses cannot be known; they matter only between free blocks of
equal size.

Outside the model: more than one stream (and `record_stream`), CUDA graphs' private pools, `cudaMallocAsync`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from wazn.errors import InputError
from wazn.timeline.settings import (
    DEFAULT_SETTINGS,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
)
from wazn.units import round_up

__all__ = ["SHIFT", "CachingAllocator", "make_allocator"]

SHIFT = 56
MASK = (1 << SHIFT) - 1
LIMIT_BYTES = 1 << 60  # NativeCachingAllocator::allocate: "Tried to allocate more than 1EB memory"


class CachingAllocator:
    """The allocator with segments from `cudaMalloc`; `make_allocator` gives the right kind for some settings.

    `capacity_bytes` is the memory of the device that this process can have: reserved memory never exceeds it. None: no
    limit. `device_total_bytes` is what the device has in all (the capacity when not given); a
    `per_process_memory_fraction` is a fraction of it.

    Statistics have the names of `torch.cuda.memory_stats`: requested, allocated (whole blocks, what could not be split
    off included), reserved, `num_alloc_retries`, `num_ooms`. With one stream, active is the same as allocated.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        capacity_bytes: int | None = None,
        device_total_bytes: int | None = None,
    ) -> None:
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.device_total_bytes = (
            capacity_bytes if device_total_bytes is None else device_total_bytes
        )
        self.small: list[int] = []
        self.large: list[int] = []
        self.free_from: dict[int, int] = {}
        self.free_to: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.next_address = ROUND_LARGE_BYTES
        self.live: dict[int, tuple[int, int]] = {}
        self.requested_bytes = self.peak_requested_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        # Told of every range taken from or given back to the device: the action of a TraceEntry, address, bytes.
        self.observer: Callable[[str, int, int], None] | None = None
        fraction = settings.per_process_memory_fraction
        self.allowed_bytes: int | None = None
        if fraction < 1.0 and self.device_total_bytes is not None:
            self.allowed_bytes = int(fraction * float(self.device_total_bytes))
        # Ages are kept only while garbage collection can run: get_free_block.
        self.collects_garbage = (
            settings.garbage_collection_threshold > 0.0 and self.allowed_bytes is not None
        )
        # Whether the first block that fits is taken, so that `replay` may do it inline; except for blocks that end
        # where one of these unmapped ranges begins.
        self.takes_best_fit = not self.collects_garbage and settings.max_split_bytes is None
        self.unmapped: dict[int, int] = {}
        self.large_searches = 0
        self.inserted_at: dict[int, int] = {}

    # What the world calls

    def malloc(self, num_bytes: int) -> int | None:
        """Allocate; return the block's address, or None when out of memory after the release and the retry."""
        if num_bytes >= LIMIT_BYTES or num_bytes <= 0:
            raise InputError(f"cannot allocate {num_bytes} bytes: must be between 1 and 2^60")
        block = self.take(self.settings.round_size(num_bytes))
        if block is None:
            self.num_ooms += 1
            return None
        self.live[block & MASK] = (block >> SHIFT, num_bytes)
        self.requested_bytes += num_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.allocated_bytes += block >> SHIFT
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block & MASK

    def free(self, address: int) -> None:
        """Give the block at `address` back to its pool."""
        if address not in self.live:
            raise InputError(f"no block was allocated at address {address}")
        size, num_bytes = self.live.pop(address)
        self.requested_bytes -= num_bytes
        self.allocated_bytes -= size
        pool = self.small if self.settings.round_size(num_bytes) <= SMALL_BYTES else self.large
        self.give(size << SHIFT | address, pool)

    def empty_cache(self) -> None:
        """Return unused segments to the device: `torch.cuda.empty_cache`."""
        self.release_cached_blocks()

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block in the cache: the largest request that needs no new segment."""
        return max((pool[-1] >> SHIFT for pool in (self.small, self.large) if pool), default=0)

    @property
    def device_free_bytes(self) -> int | None:
        """What the device has left for this process, or None without a capacity."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.reserved_bytes

    # What PyTorch calls malloc and free, below the statistics

    def take(self, size: int) -> int | None:
        """Return the key of a block of at least `size` (rounded) bytes that is no longer free; None: out of memory.

        DeviceCachingAllocator::malloc. A remainder that is large enough stays in the pool.
        """
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self.get_free_block(size, pool)
        if block is None:
            if self.collects_garbage:
                self.garbage_collect_cached_blocks()
            block = self.alloc_block(size, pool)
            if block is None and self.release_available_cached_blocks(size, pool):
                block = self.alloc_block(size, pool)
            if block is None:
                self.release_cached_blocks()
                self.num_alloc_retries += 1
                block = self.alloc_block(size, pool)
            if block is None:
                return None
        rest = (block >> SHIFT) - size
        if not self.should_split(size, rest):
            return block
        address = block & MASK
        self.insert((rest << SHIFT) | (address + size), pool)
        return size << SHIFT | address

    def give(self, block: int, pool: list[int]) -> int:
        """Put a block into its pool and merge it with free neighbours; return the result: free_block."""
        address = block & MASK
        size = block >> SHIFT
        before = self.free_to.get(address)
        after = self.free_from.get(address + size)
        if before is not None:
            self.remove(before, pool)
            address = before & MASK
            size += before >> SHIFT
        if after is not None:
            self.remove(after, pool)
            size += after >> SHIFT
        merged = size << SHIFT | address
        self.insert(merged, pool)
        return merged

    def insert(self, block: int, pool: list[int]) -> None:
        """Add a free block: BlockPool::insert_into_blocks."""
        insort(pool, block)
        address = block & MASK
        self.free_from[address] = block
        self.free_to[address + (block >> SHIFT)] = block
        if self.collects_garbage:
            self.inserted_at[address] = self.large_searches

    def remove(self, block: int, pool: list[int]) -> None:
        """Take a free block out of its pool."""
        del pool[bisect_left(pool, block)]
        address = block & MASK
        del self.free_from[address]
        del self.free_to[address + (block >> SHIFT)]
        if self.collects_garbage:
            del self.inserted_at[address]

    def get_free_block(self, size: int, pool: list[int]) -> int | None:
        """Take the smallest free block that fits, at the lowest address among equals: get_free_block."""
        if self.collects_garbage and pool is self.large:
            self.large_searches += 1
        found = self.best_fit(size, pool)
        if found is None:
            return None
        max_split_bytes = self.settings.max_split_bytes
        if max_split_bytes is not None:
            # "Do not return an oversized block for a large request"
            if size < max_split_bytes <= found >> SHIFT:
                return None
            # "Allow oversized block size to be rounded up but within a limit"
            limit = size + self.settings.max_non_split_rounding_bytes
            if size >= max_split_bytes and found >> SHIFT >= limit:
                return None
        self.remove(found, pool)
        return found

    def best_fit(self, size: int, pool: list[int]) -> int | None:
        """Return the key of the free block to use, or None."""
        at = bisect_left(pool, size << SHIFT)
        return pool[at] if at < len(pool) else None

    def should_split(self, size: int, rest: int) -> bool:
        """Whether what a request leaves of its block becomes a free block: should_split.

        All sizes are multiples of 512, so that any rest of a small block is at least kMinBlockSize.
        """
        if size <= SMALL_BYTES:
            return rest > 0
        limit = self.settings.max_split_bytes
        return rest > SMALL_BYTES and (limit is None or size < limit)

    def fits(self, num_bytes: int) -> bool:
        """Whether the device has `num_bytes` left for this process."""
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def is_allowed(self, num_bytes: int) -> bool:
        """Whether `per_process_memory_fraction` leaves room for `num_bytes`: alloc_block."""
        return self.allowed_bytes is None or self.reserved_bytes + num_bytes <= self.allowed_bytes

    def reserve(self, action: str, address: int, num_bytes: int) -> None:
        """Count memory taken from the device, or given back where `num_bytes` is negative."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self.observer is not None:
            self.observer(action, address, abs(num_bytes))

    def new_address(self, num_bytes: int) -> int:
        """Return the address of a new range, with a gap behind it."""
        address = self.next_address
        self.next_address += round_up(num_bytes, ROUND_LARGE_BYTES) + ROUND_LARGE_BYTES
        if self.next_address >= MASK:
            raise InputError(f"the timeline takes more than 2^{SHIFT} bytes from the device")
        return address

    def alloc_block(self, size: int, pool: list[int]) -> int | None:
        """Take a new segment from the device; None when it has no room: alloc_block."""
        segment_bytes = self.settings.segment_bytes(size)
        if not self.is_allowed(segment_bytes) or not self.fits(segment_bytes):
            return None
        address = self.new_address(segment_bytes)
        self.segments[address] = segment_bytes
        self.reserve("segment_alloc", address, segment_bytes)
        return segment_bytes << SHIFT | address

    def release_block(self, block: int, pool: list[int]) -> None:
        """Return a whole segment to the device: release_block."""
        self.remove(block, pool)
        size = self.segments.pop(block & MASK)
        self.reserve("segment_free", block & MASK, -size)

    def is_segment(self, block: int) -> bool:
        """Whether a free block is a whole segment: `!block->is_split()`."""
        return self.segments.get(block & MASK) == block >> SHIFT

    def release_available_cached_blocks(self, size: int, pool: list[int]) -> bool:
        """Return oversize blocks, as many as `size` needs; only with `max_split_size_mb`.

        release_available_cached_blocks.
        """
        max_split_bytes = self.settings.max_split_bytes
        if max_split_bytes is None:
            return False
        needed = max(size, max_split_bytes)
        at = bisect_left(pool, needed << SHIFT)
        if at < len(pool):
            self.release_block(pool[at], pool)
            return True
        # "No single block is large enough; free multiple oversize blocks, starting with the largest"
        released = 0
        while pool and released < needed and pool[-1] >> SHIFT >= max_split_bytes:
            released += pool[-1] >> SHIFT
            self.release_block(pool[-1], pool)
        return released >= needed

    def release_cached_blocks(self) -> None:
        """Return every segment without a live block to the device: release_blocks."""
        for pool in (self.large, self.small):
            for block in [block for block in pool if self.is_segment(block)]:
                self.release_block(block, pool)

    def garbage_collect_cached_blocks(self) -> None:
        """Return unused large segments that are older than the average one: garbage_collect_cached_blocks."""
        if self.allowed_bytes is None:
            return
        threshold_bytes = int(
            self.settings.garbage_collection_threshold * float(self.allowed_bytes)
        )
        if self.reserved_bytes <= threshold_bytes:
            return
        target_bytes = self.reserved_bytes - threshold_bytes
        ages = {
            block: self.large_searches - self.inserted_at[block & MASK]
            for block in self.large
            if self.is_segment(block)
        }
        reclaimed_bytes = 0
        freed = True
        while ages and freed and reclaimed_bytes < target_bytes:
            # Like the source, the threshold of a round is fixed before the round, and a round is not cut short.
            threshold = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= threshold]
            freed = bool(old)
            for block in old:
                del ages[block]
                reclaimed_bytes += block >> SHIFT
                self.release_block(block, self.large)


def make_allocator(
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    capacity_bytes: int | None = None,
    device_total_bytes: int | None = None,
) -> CachingAllocator:
    """Return an empty allocator of the kind that the settings ask for."""
    if settings.expandable_segments:
        from wazn.timeline.expandable import ExpandableAllocator

        kind: type[CachingAllocator] = ExpandableAllocator
    else:
        kind = CachingAllocator
    return kind(settings, capacity_bytes=capacity_bytes, device_total_bytes=device_total_bytes)
