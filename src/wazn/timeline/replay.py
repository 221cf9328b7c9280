"""A timeline, replayed event by event through the allocator: what is reserved, and whether it fits.

`replay` gives what `torch.cuda.memory_stats` and an out-of-memory message would have said. The sum of block sizes
alone, without an allocator, is in `breakdown` and far cheaper.

Most of the time goes into one loop. It works on the allocator's own structures (see `allocator`), takes the common
cases (a free block fits; a freed block is merged) inline, and calls the allocator for everything else; with settings
whose search is not a plain best fit it calls the allocator for every event.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import length_hint

from wazn.errors import InputError
from wazn.timeline.allocator import LIMIT_BYTES, MASK, SHIFT, CachingAllocator, make_allocator
from wazn.timeline.events import LAYER, Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.settings import (
    DEFAULT_SETTINGS,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
)

__all__ = ["Moment", "OutOfMemory", "PhasePeak", "Replay", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where in a timeline: `index` counts the events of `Timeline.events()` from 0."""

    index: int
    step: int
    phase: Phase
    layer: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """One phase of one step: its highest allocated bytes, and the reserved bytes when it had last ended."""

    step: int
    phase: Phase
    peak_allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The allocation that failed although everything unused had been released, and the numbers of PyTorch's message.

    `tried_bytes` is the segment that was asked of the device, `requested_bytes` what the tensor wanted. `alive` sums to
    `allocated_bytes`.
    """

    moment: Moment
    tag: Tag
    requested_bytes: int
    tried_bytes: int
    total_bytes: int
    free_bytes: int
    allowed_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    alive: Mapping[Tag, int]

    @property
    def unallocated_bytes(self) -> int:
        """Reserved by the allocator and not allocated: cached blocks that cannot be given back."""
        return self.reserved_bytes - self.allocated_bytes

    def message(self) -> str:
        """Return the numbers in the words of PyTorch's error (v2.13.0)."""
        allowed = "" if self.allowed_bytes is None else f"{_size(self.allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.tried_bytes)}. "
            f"GPU 0 has a total capacity of {_size(self.total_bytes)} "
            f"of which {_size(self.free_bytes)} is free. "
            "Including non-PyTorch memory, this process has "
            f"{_size(self.total_bytes - self.free_bytes)} memory in use. {allowed}"
            f"Of the allocated memory {_size(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {_size(self.unallocated_bytes)} is reserved by PyTorch but unallocated."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What the allocator would have reported, in the words of `torch.cuda.memory_stats`.

    `alive` is what held the peak of allocated memory, by category and label, in block sizes: it sums to
    `peak_allocated_bytes`. After an `out_of_memory` everything describes the run up to the failed event.
    """

    num_events: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak: Moment | None
    alive: Mapping[Tag, int]
    largest_free_bytes_at_peak: int
    peak_reserved_bytes: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    num_alloc_retries: int
    num_ooms: int
    phases: tuple[PhasePeak, ...]
    out_of_memory: OutOfMemory | None

    def by_category(self) -> dict[Category, int]:
        """Return `alive` summed over the labels, largest first."""
        totals: dict[Category, int] = {}
        for tag, num_bytes in self.alive.items():
            totals[tag.category] = totals.get(tag.category, 0) + num_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def replay(
    timeline: Timeline,
    *,
    capacity_bytes: int | None = None,
    device_total_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> Replay:
    """Replay every event; stop at the first allocation that does not fit even after releasing what is unused.

    Args:
        capacity_bytes: what the allocator may reserve: the device's memory less what others hold. None: no limit.
        device_total_bytes: all of the device's memory, for the message and for `per_process_memory_fraction`;
            the capacity when not given.
    Raises: InputError if a block is freed that is not alive, allocated twice, or absurdly large.
    Source: `allocator`.
    """
    for name, value in (("capacity", capacity_bytes), ("device total", device_total_bytes)):
        if value is not None and value < 0:
            raise InputError(f"the {name} must not be negative, found {value} bytes")
    allocator = make_allocator(
        settings, capacity_bytes=capacity_bytes, device_total_bytes=device_total_bytes
    )
    run = _Run(timeline, allocator)
    run.run()
    return run.result()


# Segments as the loop wants them

SPLIT_SMALL = (
    MIN_BLOCK_BYTES << SHIFT
)  # the least rest of a block that is split off, as a key: any rest ...
SPLIT_LARGE = (
    SMALL_BYTES + MIN_BLOCK_BYTES
) << SHIFT  # ... and in the large pool one of more than 1 MiB


@dataclass(slots=True)
class _Template:
    """A segment's columns, prepared once for all its repetitions.

    `sizes` are rounded, with the sign of the event; `keys` are `size << SHIFT`. `kept` are the positions of allocations
    that outlive the segment, `freed` the identities that it frees without having allocated them.

    Most blocks come and go within the segment. In `names` these are numbered below zero, the same in all repetitions;
    only the names at the `outer` positions are block identities, and shift.
    """

    segment: Segment
    names: list[int]
    outer: list[int]
    sizes: list[int]
    keys: list[int]
    requested_net: int
    requested_max: int
    kept: list[int]
    freed: list[int]


def _template(
    segment: Segment, rounded: dict[int, int], round_size: Callable[[int], int]
) -> _Template:
    for size in set(segment.sizes).difference(rounded):
        if abs(size) >= LIMIT_BYTES:
            raise InputError(f"a block of {abs(size)} bytes: the limit is 2^60")
        rounded[size] = round_size(size) if size > 0 else -round_size(-size) if size else 0
    sizes = [rounded[size] for size in segment.sizes]
    totals = list(accumulate(segment.sizes, initial=0))
    names = segment.block_ids[:]
    inside: dict[int, int] = {}
    freed = []
    outer = []
    for position, (block_id, size) in enumerate(zip(segment.block_ids, sizes, strict=True)):
        if size > 0:
            if block_id in inside:
                raise InputError(
                    f"{segment.phase} of step {segment.step} allocates block {block_id} twice"
                )
            inside[block_id] = position
        elif size:
            made_at = inside.pop(block_id, None)
            if made_at is None:
                freed.append(block_id)
                outer.append(position)
            else:
                names[made_at] = names[position] = -1 - made_at
    return _Template(
        segment=segment,
        names=names,
        outer=outer + list(inside.values()),
        sizes=sizes,
        keys=[size << SHIFT for size in sizes],
        requested_net=totals[-1],
        requested_max=max(totals),
        kept=list(inside.values()),
        freed=freed,
    )


class _Run:
    """One replay, in progress."""

    def __init__(self, timeline: Timeline, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.live: dict[int, int] = {}  # block identity -> block size << SHIFT | address
        self.odd: dict[int, int] = {}  # event index -> block size, where it is not the rounded size
        self.index = 0
        self.requested = self.peak_requested = 0
        self.allocated = self.peak_allocated = 0
        self.peak_index: int | None = None
        self.free_at_peak = 0
        self.phases: dict[tuple[int, Phase], tuple[int, int]] = {}
        self.failed_at: int | None = None
        rounded: dict[int, int] = {}
        round_size = allocator.settings.round_size
        self.parts = [
            (part, [_template(segment, rounded, round_size) for segment in part.segments])
            for part in timeline.parts
        ]

    def run(self) -> None:
        """Replay all parts, or up to the event that fails."""
        for part, templates in self.parts:
            jumps = part.times > 2 and self.allocator.takes_best_fit and _is_closed(templates)
            repetition = 0
            while repetition < part.times:
                start = _Start.of(self) if jumps and part.times - repetition > 2 else None
                for template in templates:
                    if not self._segment(template, repetition * part.shift):
                        return
                if start is not None:
                    repetition += self._jump(start, part, templates, repetition)
                repetition += 1

    def _segment(self, template: _Template, shift: int) -> bool:
        """Run one segment and keep its statistics; return whether it was run to its end."""
        segment = template.segment
        before = self.requested
        start = self.index
        num_live = len(self.live) + len(template.kept) - len(template.freed)
        try:
            highest = self._events(template, shift)
        except KeyError as error:
            raise InputError(
                f"the timeline frees block {error.args[0]}, which is not allocated "
                f"({segment.phase} of step {segment.step})"
            ) from None
        if self.failed_at is None:
            if len(self.live) != num_live:
                raise InputError(
                    f"{segment.phase} of step {segment.step} allocates a block that is allocated"
                )
            self.index = start + len(template.sizes)
            self.requested = before + template.requested_net
            self.peak_requested = max(self.peak_requested, before + template.requested_max)
        else:
            self.index = self.failed_at
            totals = list(accumulate(segment.sizes[: self.index - start], initial=before))
            self.requested = totals[-1]
            self.peak_requested = max(self.peak_requested, *totals)
        key = (segment.step, segment.phase)
        if key in self.phases:
            highest = max(highest, self.phases[key][0])
        self.phases[key] = (highest, self.allocator.reserved_bytes)
        return self.failed_at is None

    def _events(self, template: _Template, shift: int) -> int:
        """Run the events of one segment; return the highest allocated bytes. On failure set `failed_at`."""
        allocator = self.allocator
        small, large = allocator.small, allocator.large
        free_from, free_to = allocator.free_from, allocator.free_to
        free_from_pop, free_to_pop = free_from.pop, free_to.pop
        live, odd = self.live, self.odd
        live_pop = live.pop
        inline, unmapped = allocator.takes_best_fit, allocator.unmapped
        split_large = SPLIT_SMALL if allocator.settings.expandable_segments else SPLIT_LARGE
        allocated = highest = self.allocated
        peak = self.peak_allocated
        names = template.names
        if shift:
            names = names[:]
            for position in template.outer:
                names[position] += shift
        end_index = self.index + len(template.sizes) - 1
        sizes = iter(template.sizes)
        for name, size, key in zip(names, sizes, template.keys, strict=True):
            if size > 0:
                pool = small if size <= SMALL_BYTES else large
                at = bisect_left(pool, key)
                block = pool[at] if inline and at < len(pool) else 0
                address = block & MASK
                end = address + (block >> SHIFT)
                if block and not (unmapped and end in unmapped):
                    rest = block - key  # the bytes that are left over << SHIFT | address
                    del free_from[address]
                    if rest >= split_large or (rest >= SPLIT_SMALL and pool is small):
                        rest += size  # the address moves behind the new block
                        if at and pool[at - 1] > rest:
                            del pool[at]
                            insort(pool, rest, 0, at)
                        else:
                            pool[at] = rest
                        free_from[address + size] = free_to[end] = rest
                        live[name] = key | address
                        allocated += size
                    else:
                        del pool[at]
                        del free_to[end]
                        live[name] = block
                        block_bytes = block >> SHIFT
                        allocated += block_bytes
                        if block_bytes != size:
                            odd[end_index - length_hint(sizes)] = block_bytes
                else:
                    taken = allocator.take(size)
                    if taken is None:
                        self.failed_at = end_index - length_hint(sizes)
                        break
                    live[name] = taken
                    block_bytes = taken >> SHIFT
                    allocated += block_bytes
                    if block_bytes != size:
                        odd[end_index - length_hint(sizes)] = block_bytes
                if allocated > highest:
                    highest = allocated
                    if allocated > peak:
                        peak = allocated
                        self.peak_index = end_index - length_hint(sizes)
                        self.free_at_peak = max(
                            large[-1] if large else 0, small[-1] if small else 0
                        )
            elif size:
                block = live_pop(name)
                block_bytes = block >> SHIFT
                allocated -= block_bytes
                pool = small if size >= -SMALL_BYTES else large
                if not inline:
                    allocator.give(block, pool)
                    continue
                address = block & MASK
                end = address + block_bytes
                after = free_from_pop(end, 0)
                before = free_to_pop(address, 0)
                if after or before:
                    if after:
                        block += after - end
                        end += after >> SHIFT
                        at = bisect_left(pool, after)
                        if before:
                            del pool[at]
                    if before:
                        block += before - address
                        address = before & MASK
                        at = bisect_left(pool, before)
                    # The neighbour's entry grows into that of the merged block: mostly it can stay where it is.
                    if at + 1 == len(pool) or pool[at + 1] > block:
                        pool[at] = block
                    else:
                        del pool[at]
                        insort(pool, block, at)
                else:
                    insort(pool, block)
                free_from[address] = free_to[end] = block
        self.allocated = allocated
        self.peak_allocated = peak
        return highest

    def _jump(self, start: _Start, part: Part, templates: list[_Template], repetition: int) -> int:
        """Skip repetitions that must go like the one just run; return how many.

        The last one that fits is always run, since it is the one that may set a peak.

        If a repetition left the free blocks exactly as it had found them, and freed nothing from outside, then all that
        it kept lies in segments that it took fresh from the device. The next repetition finds the same free blocks, so
        it decides the same; only its fresh segments lie further on. So do all that follow, while the capacity lasts.
        """
        allocator = self.allocator
        if not start.is_like(self):
            return 0
        times = part.times - repetition - 2
        fresh_bytes = allocator.reserved_bytes - start.reserved_bytes
        if fresh_bytes and allocator.settings.expandable_segments:
            return 0  # new pages lie where there is room, not where the last ones did
        for limit in (allocator.capacity_bytes, allocator.allowed_bytes):
            if limit is not None and fresh_bytes:
                times = min(times, (limit - allocator.reserved_bytes) // fresh_bytes - 1)
        if times <= 0:
            return 0
        num_events = self.index - start.index
        further = allocator.next_address - start.next_address
        fresh = {at: size for at, size in allocator.segments.items() if at >= start.next_address}
        odd = {index: size for index, size in self.odd.items() if index >= start.index}
        kept = {
            block_id: self.live[block_id]
            for template in templates
            for position in template.kept
            if (block_id := template.segment.block_ids[position] + repetition * part.shift)
            in self.live
        }
        for jump in range(1, times + 1):
            for block_id, block in kept.items():
                self.live[block_id + jump * part.shift] = block + jump * further
            for at, size in fresh.items():
                allocator.segments[at + jump * further] = size
            for index, size in odd.items():
                self.odd[index + jump * num_events] = size
        allocator.next_address += times * further
        allocator.reserved_bytes += times * fresh_bytes
        allocator.peak_reserved_bytes = max(allocator.peak_reserved_bytes, allocator.reserved_bytes)
        self.index += times * num_events
        self.requested += times * (self.requested - start.requested)
        self.allocated += times * (self.allocated - start.allocated)
        return times

    # What came of it

    def alive(self, end: int) -> dict[Tag, int]:
        """Return the bytes of the blocks that are alive after the first `end` events, largest tag first."""
        alive: dict[int, tuple[_Template, int, int]] = {}
        for template, shift, start in self._instances():
            block_ids = template.segment.block_ids
            if start + len(block_ids) <= end:
                for block_id in template.freed:
                    del alive[block_id + shift]
                for position in template.kept:
                    alive[block_ids[position] + shift] = (template, position, start + position)
                continue
            for position in range(end - start):
                if template.sizes[position] > 0:
                    alive[block_ids[position] + shift] = (template, position, start + position)
                elif template.sizes[position]:
                    del alive[block_ids[position] + shift]
            break
        totals: dict[Tag, int] = {}
        for template, position, index in alive.values():
            tag = template.segment.tags[position]
            size = self.odd.get(index) or template.sizes[position]
            totals[tag] = totals.get(tag, 0) + size
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def moment(self, index: int) -> tuple[Moment, Tag]:
        """Say where an event is, and what its block is for."""
        for template, shift, start in self._instances():
            segment = template.segment
            if index < start + len(template.sizes):
                layer = None if segment.layer is None else segment.layer + shift // LAYER
                where = Moment(index=index, step=segment.step, phase=segment.phase, layer=layer)
                return where, segment.tags[index - start]
        raise IndexError(index)

    def _instances(self) -> Iterator[tuple[_Template, int, int]]:
        """Yield every segment in order: its template, the shift of its identities, the index of its first event."""
        start = 0
        for part, templates in self.parts:
            for repetition in range(part.times):
                for template in templates:
                    yield template, repetition * part.shift, start
                    start += len(template.sizes)

    def result(self) -> Replay:
        """Sum up."""
        allocator = self.allocator
        peak = self.peak_index
        return Replay(
            num_events=self.index,
            peak_requested_bytes=self.peak_requested,
            peak_allocated_bytes=self.peak_allocated,
            peak=None if peak is None else self.moment(peak)[0],
            alive={} if peak is None else self.alive(peak + 1),
            largest_free_bytes_at_peak=self.free_at_peak >> SHIFT,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            requested_bytes=self.requested,
            allocated_bytes=self.allocated,
            reserved_bytes=allocator.reserved_bytes,
            largest_free_bytes=allocator.largest_free_bytes,
            num_alloc_retries=allocator.num_alloc_retries,
            num_ooms=0 if self.failed_at is None else 1,
            phases=tuple(
                PhasePeak(
                    step=step, phase=phase, peak_allocated_bytes=highest, reserved_bytes=reserved
                )
                for (step, phase), (highest, reserved) in self.phases.items()
            ),
            out_of_memory=None if self.failed_at is None else self._out_of_memory(self.failed_at),
        )

    def _out_of_memory(self, index: int) -> OutOfMemory:
        allocator = self.allocator
        moment, tag = self.moment(index)
        template, _, start = next(
            instance
            for instance in self._instances()
            if index < instance[2] + len(instance[0].sizes)
        )
        free_bytes = allocator.device_free_bytes
        total_bytes = allocator.device_total_bytes
        assert free_bytes is not None  # nothing fails without a limit
        assert total_bytes is not None
        return OutOfMemory(
            moment=moment,
            tag=tag,
            requested_bytes=template.segment.sizes[index - start],
            tried_bytes=allocator.settings.segment_bytes(template.sizes[index - start]),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            allowed_bytes=allocator.allowed_bytes,
            allocated_bytes=self.allocated,
            reserved_bytes=allocator.reserved_bytes,
            alive=self.alive(index),
        )


def _is_closed(templates: list[_Template]) -> bool:
    """Whether one repetition frees only what it has allocated itself."""
    inside: set[int] = set()
    for template in templates:
        if not inside.issuperset(template.freed):
            return False
        inside.difference_update(template.freed)
        inside.update(template.segment.block_ids[position] for position in template.kept)
    return True


@dataclass(slots=True)
class _Start:
    """What a repetition found when it began."""

    small: list[int]
    large: list[int]
    index: int
    requested: int
    allocated: int
    next_address: int
    reserved_bytes: int
    num_alloc_retries: int

    @classmethod
    def of(cls, run: _Run) -> _Start:
        """Look at a run before a repetition."""
        allocator = run.allocator
        return cls(
            small=allocator.small[:],
            large=allocator.large[:],
            index=run.index,
            requested=run.requested,
            allocated=run.allocated,
            next_address=allocator.next_address,
            reserved_bytes=allocator.reserved_bytes,
            num_alloc_retries=allocator.num_alloc_retries,
        )

    def is_like(self, run: _Run) -> bool:
        """Whether the run has the same free blocks again, and nothing was released in between."""
        allocator = run.allocator
        return (
            allocator.num_alloc_retries == self.num_alloc_retries
            and allocator.small == self.small
            and allocator.large == self.large
        )


def _size(num_bytes: int) -> str:
    """Write a size as PyTorch does: CUDACachingAllocator.cpp, `format_size`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes > unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
