"""The caching allocator with `expandable_segments:True`.

One range of addresses for each pool, reserved large enough for the whole device; physical pages (2 MiB for the small
pool, 20 MiB for the large one) are mapped into it where they are needed and unmapped when memory runs out. Besides the
free blocks there are then *unmapped* ones: addresses without memory behind them.

Source: "Note [Expandable Segments]" and the functions named below in `c10/cuda/CUDACachingAllocator.cpp`, as in
`allocator`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice

from wazn.timeline.allocator import MASK, SHIFT, CachingAllocator
from wazn.timeline.settings import SMALL_SEGMENT_BYTES

__all__ = ["ExpandableAllocator"]

UNLIMITED_BYTES = 1 << 48  # addresses of one range when the device has no limit


@dataclass(slots=True)
class _Pages:
    """The addresses of one pool.

    `unmapped` are the starts of unmapped ranges in order, `size_from` their sizes (those of the other pool too),
    `start_to` their starts by their ends; `ranges` are the sizes of the reserved ranges by their starts.
    """

    page_bytes: int
    size_from: dict[int, int]
    unmapped: list[int] = field(default_factory=list)
    start_to: dict[int, int] = field(default_factory=dict)
    ranges: dict[int, int] = field(default_factory=dict)

    def insert(self, address: int, size: int) -> None:
        insort(self.unmapped, address)
        self.size_from[address] = size
        self.start_to[address + size] = address

    def remove(self, address: int) -> int:
        del self.unmapped[bisect_left(self.unmapped, address)]
        size = self.size_from.pop(address)
        del self.start_to[address + size]
        return size


class ExpandableAllocator(CachingAllocator):
    """As `CachingAllocator`, with pages instead of segments."""

    def __init__(self, *args: object, **keywords: object) -> None:
        super().__init__(*args, **keywords)  # type: ignore[arg-type]
        self.small_pages = _Pages(SMALL_SEGMENT_BYTES, self.unmapped)
        self.large_pages = _Pages(self.settings.large_segment_bytes, self.unmapped)

    def pages_of(self, pool: list[int]) -> _Pages:
        """Return the addresses behind a pool of free blocks."""
        return self.small_pages if pool is self.small else self.large_pages

    def should_split(self, size: int, rest: int) -> bool:
        """Every rest can be split off: should_split."""
        return rest > 0

    def best_fit(self, size: int, pool: list[int]) -> int | None:
        """As without pages, but a block that can grow counts with what it can grow to: get_free_block."""
        at = bisect_left(pool, size << SHIFT)
        if at == len(pool):
            return None
        size_from = self.pages_of(pool).size_from
        block = pool[at]
        expandable = self._expandable_bytes(block, size_from)
        for following in islice(pool, at + 1, None):
            following_bytes = self._expandable_bytes(following, size_from)
            if following_bytes >= expandable:
                break
            block, expandable = following, following_bytes
        return block

    @staticmethod
    def _expandable_bytes(block: int, size_from: dict[int, int]) -> int:
        size = block >> SHIFT
        return size + size_from.get((block & MASK) + size, 0)

    def alloc_block(self, size: int, pool: list[int]) -> int | None:
        """Map pages until a block of `size` is there: alloc_block, try_allocate_expandable_block."""
        if not self.is_allowed(self.settings.segment_bytes(size)):
            return None
        pages = self.pages_of(pool)
        address = self._find(size, pages)
        block = self.free_from.get(address)
        if block is None:
            block = self._map(address, min(pages.size_from[address], size), pages, pool)
        while block is not None and block >> SHIFT < size:
            # "invariant: free -> unmapped -> *"
            end = (block & MASK) + (block >> SHIFT)
            missing = min(size - (block >> SHIFT), pages.size_from[end])
            block = self._map(end, missing, pages, pool)
        if block is not None:
            self.remove(block, pool)
        return block

    def _find(self, size: int, pages: _Pages) -> int:
        """Return the lowest address with room for `size` in free and unmapped blocks: find_expandable_block."""
        for start in pages.unmapped:
            before = self.free_to.get(start)
            address = start if before is None else before & MASK
            room = 0
            end = address
            while room < size:
                free = self.free_from.get(end)
                step = pages.size_from.get(end, 0) if free is None else free >> SHIFT
                if not step:
                    break
                room += step
                end += step
            if room >= size:
                return address
        return self._new_range(size, pages)

    def _new_range(self, size: int, pages: _Pages) -> int:
        """Reserve addresses for the device's memory and an eighth more: ExpandableSegment::ExpandableSegment."""
        total = self.device_total_bytes
        room = UNLIMITED_BYTES if total is None else total + total // 8
        # The source takes for granted that a request is smaller than the device; a larger one fails when it is mapped.
        room = max(room, size)
        range_bytes = -(-room // pages.page_bytes) * pages.page_bytes
        address = self.new_address(range_bytes)
        pages.ranges[address] = range_bytes
        pages.insert(address, range_bytes)
        return address

    def _map(self, address: int, size: int, pages: _Pages, pool: list[int]) -> int | None:
        """Put memory behind the first `size` bytes of an unmapped block, whole pages: map_block.

        Return the free block that results, merged with its free neighbours; None when the device has no room.
        """
        mapped_bytes = -(-size // pages.page_bytes) * pages.page_bytes
        if not self.fits(mapped_bytes):
            return None
        rest = pages.remove(address) - mapped_bytes
        if rest:
            pages.insert(address + mapped_bytes, rest)
        self.reserve("segment_map", address, mapped_bytes)
        return self.give(mapped_bytes << SHIFT | address, pool)

    def release_available_cached_blocks(self, size: int, pool: list[int]) -> bool:
        """Blocks of expandable segments are left alone: pytorch/pytorch#134338."""
        return False

    def release_cached_blocks(self) -> None:
        """Unmap every whole page inside a free block: release_blocks, unmap_block."""
        for pool in (self.large, self.small):
            pages = self.pages_of(pool)
            for block in list(pool):
                self._unmap(block, pages, pool)

    def _unmap(self, block: int, pages: _Pages, pool: list[int]) -> None:
        address = block & MASK
        end = address + (block >> SHIFT)
        base = max(start for start in pages.ranges if start <= address)
        first = base + -(-(address - base) // pages.page_bytes) * pages.page_bytes
        last = base + (end - base) // pages.page_bytes * pages.page_bytes
        if first >= last:
            return
        self.remove(block, pool)
        if first > address:
            self.insert((first - address) << SHIFT | address, pool)
        if last < end:
            self.insert((end - last) << SHIFT | last, pool)
        self.reserve("segment_unmap", first, first - last)
        before = pages.start_to.get(first)
        if before is not None:
            pages.remove(before)
            first = before
        if last in pages.size_from:
            last += pages.remove(last)
        if pages.ranges[base] == last - first:
            del pages.ranges[base]  # release_expandable_segment
        else:
            pages.insert(first, last - first)
