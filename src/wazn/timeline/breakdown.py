"""The peak of a timeline and what it is made of, without an allocator and without writing repetitions out.

This is allocated memory as PyTorch counts it, except for the at most 1 MiB by which a block of the large pool may be
larger than its request (`replay` knows those): every block counts with its size rounded up to 512 bytes.

The repetitions of a part differ by a constant: repetition t starts `t * net` higher than the first one, where `net`
is what one repetition leaves behind. So the highest point of a segment over all repetitions is that of the last one
if `net` is positive, else that of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate

from wazn.errors import InputError
from wazn.timeline.events import LAYER, Category, Phase, Segment, Tag, Timeline
from wazn.timeline.settings import MIN_BLOCK_BYTES

__all__ = ["Peak", "PhaseLevels", "peak"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseLevels:
    """One phase of one step: its highest point, and what was still allocated when it had last ended."""

    step: int
    phase: Phase
    peak_bytes: int
    resident_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The highest point of a timeline; of several equal ones the first.

    `index` counts the events of `Timeline.events()`; the peak is reached with this one. `resident_bytes` is what is
    left at the end. For an empty timeline, the location is None.
    """

    peak_bytes: int
    index: int | None
    step: int | None
    phase: Phase | None
    layer: int | None
    phases: tuple[PhaseLevels, ...]
    resident_bytes: int
    sum_alive: Callable[[], Mapping[Tag, int]] = field(repr=False, compare=False)

    @property
    def alive(self) -> Mapping[Tag, int]:
        """What is allocated at the peak: sums to `peak_bytes`, largest tag first; summed when first asked for.

        Raises: InputError if more is freed of a tag than was allocated.
        """
        return self.sum_alive()

    def by_category(self) -> dict[Category, int]:
        """Return `alive` summed over the labels, largest first."""
        totals: dict[Category, int] = {}
        for tag, num_bytes in self.alive.items():
            totals[tag.category] = totals.get(tag.category, 0) + num_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class _Place:
    """A point in a timeline: a part, a repetition of it, a segment of that, and an event in it."""

    part: int
    repetition: int
    segment: int
    position: int


@dataclass(frozen=True, slots=True)
class _Column:
    """The rounded sizes of a segment, their highest sum, the event that reaches it (-1: none), the whole sum."""

    sizes: list[int]
    top: int
    position: int
    net: int


def peak(timeline: Timeline) -> Peak:
    """Return the highest point of a timeline.

    A free must carry the tag of its allocation, as `Timeline` promises; the breakdown is a sum over tags.

    >>> from wazn.timeline.events import Part
    >>> tag = Tag(Category.WEIGHTS, "w")
    >>> load = Segment(
    ...     phase=Phase.LOAD, step=0, layer=None, block_ids=[1, 2, 1], sizes=[1000, 1, -1000], tags=[tag] * 3
    ... )
    >>> found = peak(Timeline(parts=(Part(segments=(load,)),)))
    >>> found.peak_bytes, found.index, found.resident_bytes
    (1536, 1, 512)
    """
    columns = _columns(timeline)
    phases: dict[tuple[int, Phase], tuple[int, int]] = {}
    level = 0
    highest = 0
    place: _Place | None = None
    for part_index, (part, rows) in enumerate(zip(timeline.parts, columns, strict=True)):
        if part.times <= 0:
            continue
        net = sum(column.net for column in rows)
        repetition = part.times - 1 if net > 0 else 0
        start = level + repetition * net  # where the highest repetition starts
        last = level + (part.times - 1) * net  # where the last one starts
        for segment_index, (segment, column) in enumerate(zip(part.segments, rows, strict=True)):
            top = start + column.top
            if top > highest:
                highest = top
                place = _Place(part_index, repetition, segment_index, column.position)
            start += column.net
            last += column.net
            key = (segment.step, segment.phase)
            before = phases.get(key)
            phases[key] = (top if before is None else max(top, before[0]), last)
        level += part.times * net
    where = None if place is None else timeline.parts[place.part].segments[place.segment]
    return Peak(
        peak_bytes=highest,
        index=None if place is None else _index(timeline, place),
        step=None if where is None else where.step,
        phase=None if where is None else where.phase,
        layer=None if place is None else _layer(timeline, place),
        phases=tuple(
            PhaseLevels(step=step, phase=phase, peak_bytes=top, resident_bytes=resident)
            for (step, phase), (top, resident) in phases.items()
        ),
        resident_bytes=level,
        sum_alive=dict if place is None else cache(partial(_alive, timeline, columns, place)),
    )


def _index(timeline: Timeline, place: _Place) -> int:
    """Return the number of events before a place."""
    before = sum(
        part.times * sum(len(segment.sizes) for segment in part.segments)
        for part in timeline.parts[: place.part]
    )
    lengths = [len(segment.sizes) for segment in timeline.parts[place.part].segments]
    return before + place.repetition * sum(lengths) + sum(lengths[: place.segment]) + place.position


def _layer(timeline: Timeline, place: _Place) -> int | None:
    """Return the layer of a place, or None outside the layers."""
    part = timeline.parts[place.part]
    layer = part.segments[place.segment].layer
    return None if layer is None else layer + place.repetition * (part.shift // LAYER)


def _columns(timeline: Timeline) -> list[list[_Column]]:
    """Round the sizes of every segment up to 512 bytes; copies of a segment share their lists, and then the result."""
    rounded: dict[int, int] = {}
    columns: dict[int, _Column] = {}
    rows = []
    for part in timeline.parts:
        row = []
        for segment in part.segments:
            column = columns.get(id(segment.sizes))
            if column is None:
                sizes = _round(segment.sizes, rounded)
                totals = list(accumulate(sizes, initial=0))
                top = max(totals)
                # totals begin with the 0 before the first event
                column = _Column(sizes, top, totals.index(top) - 1, totals[-1])
                columns[id(segment.sizes)] = column
            row.append(column)
        rows.append(row)
    return rows


def _round(sizes: list[int], rounded: dict[int, int]) -> list[int]:
    """Round each size up to 512 bytes, away from zero."""
    for size in set(sizes).difference(rounded):
        blocks = -(-abs(size) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        rounded[size] = blocks if size > 0 else -blocks
    return [rounded[size] for size in sizes]


def _alive(timeline: Timeline, columns: list[list[_Column]], place: _Place) -> dict[Tag, int]:
    """Return the bytes of each tag after the event at `place`: all events before it, each tag's summed."""
    # How often each pair of lists counts: what copies share is summed once.
    times: dict[tuple[int, int], int] = {}
    lists: dict[tuple[int, int], tuple[list[Tag], list[int]]] = {}

    def count(segment: Segment, column: _Column, repetitions: int) -> None:
        key = id(segment.tags), id(column)
        times[key] = times.get(key, 0) + repetitions
        lists[key] = segment.tags, column.sizes

    for part, row in zip(timeline.parts[: place.part], columns, strict=False):
        for segment, column in zip(part.segments, row, strict=True):
            count(segment, column, part.times)
    part, row = timeline.parts[place.part], columns[place.part]
    for number, (segment, column) in enumerate(zip(part.segments, row, strict=True)):
        count(segment, column, place.repetition + (number < place.segment))
    end = place.position + 1
    segment, column = part.segments[place.segment], row[place.segment]
    # Tags are few objects and many references: count by identity, which costs less than a hash of two strings.
    totals: dict[int, int] = {}
    tags: dict[int, Tag] = {}
    summed = [(repetitions, *lists[key]) for key, repetitions in times.items() if repetitions]
    for repetitions, names, sizes in (*summed, (1, segment.tags[:end], column.sizes[:end])):
        for tag, size in zip(names, sizes, strict=True):
            key_of_tag = id(tag)
            if key_of_tag in totals:
                totals[key_of_tag] += repetitions * size
            else:
                totals[key_of_tag] = repetitions * size
                tags[key_of_tag] = tag
    alive: dict[Tag, int] = {}
    for key_of_tag, num_bytes in totals.items():
        tag = tags[key_of_tag]
        alive[tag] = alive.get(tag, 0) + num_bytes
    for tag, num_bytes in alive.items():
        if num_bytes < 0:
            raise InputError(
                f"the timeline frees more of `{tag.category}: {tag.label}` than it allocates"
            )
    return {
        tag: num_bytes
        for tag, num_bytes in sorted(alive.items(), key=lambda item: -item[1])
        if num_bytes
    }
