"""Equal layers are run three times, not a hundred times.

A stack of layers is: a prefix, a block of `period` layers that is repeated, a suffix. Only the first, one middle and
the last repetition of the block are run. The middle one's events, with the identities of its blocks moved up or down by
whole layers, are what all the others do. The result is exact, not an extrapolation: tests compare it with a run of
every layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from wazn.timeline.events import LAYER, PASS, Part, Segment

__all__ = ["Expansion", "LayerPlan", "NotRepeatable", "plan_layers"]

_LAYER_FIELD = PASS // LAYER - 1
_LONGEST_PERIOD = 16


class NotRepeatable(Exception):
    """A middle repetition touches what only the first or last one has; run every layer instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Which layers are run: `prefix` layers, three repetitions of `period` layers, the rest.

    `num_repetitions` counts them in the whole model; 3 or fewer means that every layer is run.
    """

    num_layers: int
    prefix: int = 0
    period: int = 1
    num_repetitions: int = 0

    @property
    def skipped(self) -> int:
        """How many layers are not run."""
        return max(0, self.num_repetitions - 3) * self.period

    @property
    def run(self) -> tuple[int, ...]:
        """The indices, in the whole model, of the layers that are run."""
        cut = self.prefix + 2 * self.period
        if not self.skipped:
            return tuple(range(self.num_layers))
        return (*range(cut), *range(cut + self.skipped, self.num_layers))

    @property
    def copies(self) -> dict[int | None, int]:
        """How many layers each layer of the middle repetition stands for."""
        first = self.prefix + self.period
        times = max(1, self.num_repetitions - 2)
        return dict.fromkeys(range(first, first + self.period), times) if self.skipped else {}


def plan_layers(kinds: Sequence[Hashable]) -> LayerPlan:
    """Return the plan that runs the fewest layers; equal kinds are layers that do the same.

    >>> plan_layers("dmmmmmmmm").run
    (0, 1, 2, 8)
    """
    num_layers = len(kinds)
    best = LayerPlan(num_layers=num_layers)
    for period in range(1, min(_LONGEST_PERIOD, num_layers // 4) + 1):
        start = 0
        for index in range(num_layers - period + 1):
            if index < num_layers - period and kinds[index] == kinds[index + period]:
                continue
            repetitions = (index + period - start) // period
            if (repetitions - 3) * period > best.skipped:
                best = LayerPlan(
                    num_layers=num_layers,
                    prefix=start,
                    period=period,
                    num_repetitions=repetitions,
                )
            start = index + 1
        if best.skipped == num_layers - 3 * period:
            break
    return best


class Expansion:
    """Writes segments of the layers that were run as parts of the whole model.

    `segments` are all that will be written, once each: a block of one may be freed in another.

    Raises: NotRepeatable.
    """

    def __init__(self, segments: Sequence[Segment], plan: LayerPlan) -> None:
        self.is_whole = not plan.skipped
        if self.is_whole:
            return
        self.segments = segments
        self.first_middle = plan.prefix + plan.period
        self.first_last = plan.prefix + 2 * plan.period
        # The identities of the middle's blocks within their pass are from `low` to below `high`.
        self.low = (self.first_middle + 1) * LAYER
        self.high = (self.first_last + 1) * LAYER
        self.times = plan.num_repetitions - 2
        self.block = plan.period * LAYER
        self.up = plan.skipped * LAYER
        self.skipped = plan.skipped
        self.sizes = {
            block_id: size
            for segment in segments
            for block_id, size in zip(segment.block_ids, segment.sizes, strict=True)
            if size > 0
        }
        self._check_neighbours()

    def parts(self, segments: Sequence[Segment]) -> list[Part]:
        """Return consecutive segments as parts. Raises: NotRepeatable."""
        if self.is_whole:
            return [Part(segments=(segment,)) for segment in segments]
        parts: list[Part] = []
        middle: list[Segment] = []
        before: int | None = None  # the layer that came before the middle
        for segment in segments:
            layer = segment.layer
            if layer is not None and self.first_middle <= layer < self.first_last:
                middle.append(segment)
                continue
            if middle:
                parts.append(self._repeat(middle, before))
                middle = []
            parts.append(Part(segments=(self._once(segment),)))
            before = layer
        if middle:
            parts.append(self._repeat(middle, before))
        return parts

    def _repeat(self, middle: list[Segment], before: int | None) -> Part:
        downward = before is not None and before >= self.first_last
        base = self.up if downward else 0
        for segment in middle:
            for block_id, size in zip(segment.block_ids, segment.sizes, strict=True):
                if size < 0 and not self.low <= block_id % PASS < self.high:
                    self._check(block_id)
        return Part(
            segments=tuple(
                Segment(
                    phase=segment.phase,
                    step=segment.step,
                    layer=_moved(segment.layer, base // LAYER),
                    block_ids=[block_id + base for block_id in segment.block_ids],
                    sizes=segment.sizes,
                    tags=segment.tags,
                )
                for segment in middle
            ),
            times=self.times,
            shift=-self.block if downward else self.block,
        )

    def _check_neighbours(self) -> None:
        """What the middle frees of its neighbours, they must free of the middle: repetitions are neighbours too.

        A first layer that makes one tensor less than the others numbers its blocks differently, and may still have a
        block of the same size at the same number.
        """
        freed: dict[tuple[int, int], set[int]] = {}
        for segment in self.segments:
            if segment.layer is None:
                continue
            here = self._repetition(segment.layer)
            own = segment.layer + 1
            foreign = [
                block_id
                for block_id, size in zip(segment.block_ids, segment.sizes, strict=True)
                if size < 0 and block_id // LAYER & _LAYER_FIELD != own
            ]
            for block_id in foreign:
                there = self._repetition(_layer_of(block_id))
                if there != here:
                    freed.setdefault((here, there), set()).add(block_id)
        for mine, theirs, shift in (
            ((0, -1), (1, 0), self.block),
            ((0, 1), (-1, 0), -self.block),
        ):
            if {block_id + shift for block_id in freed.get(mine, ())} != freed.get(theirs, set()):
                raise NotRepeatable
        if any(there == 0 and abs(here) > 1 for here, there in freed):
            raise NotRepeatable  # a layer outside the repetitions frees of one of them only

    def _repetition(self, layer: int) -> int:
        """-1, 0 or 1 for a layer of the first, the middle or the last repetition; further off for the others."""
        return (layer - self.first_middle) // (self.block // LAYER)

    def _check(self, block_id: int) -> None:
        """A block of a neighbour must have its like, in the same place, in the middle."""
        layer = _layer_of(block_id)
        if self.first_middle - self.block // LAYER <= layer < self.first_middle:
            like = block_id + self.block
        elif self.first_last <= layer < self.first_last + self.block // LAYER:
            like = block_id - self.block
        else:
            raise NotRepeatable
        if self.sizes.get(like) != self.sizes[block_id]:
            raise NotRepeatable

    def _once(self, segment: Segment) -> Segment:
        layer = segment.layer
        if layer is not None and layer < self.first_middle:
            return segment if self._touches_only_low(segment) else self._moved_once(segment, 0)
        if layer is None:
            return self._outside(segment)
        return self._moved_once(segment, self.up)

    def _touches_only_low(self, segment: Segment) -> bool:
        return all(block_id % PASS < self.high for block_id in segment.block_ids)

    def _moved_once(self, segment: Segment, middle_moves: int) -> Segment:
        """Blocks of the last layers move up; blocks of the middle move where the neighbour stands."""
        low, high, up = self.low, self.high, self.up
        return Segment(
            phase=segment.phase,
            step=segment.step,
            layer=_moved(segment.layer, middle_moves // LAYER),
            block_ids=[
                block_id + up
                if (within := block_id % PASS) >= high
                else block_id + middle_moves
                if within >= low
                else block_id
                for block_id in segment.block_ids
            ],
            sizes=segment.sizes,
            tags=segment.tags,
        )

    def _outside(self, segment: Segment) -> Segment:
        """What happens to the middle from outside the layers happens to all its repetitions, one after the other."""
        block_ids, sizes, tags = segment.block_ids, segment.sizes, segment.tags
        moved = Segment(
            phase=segment.phase, step=segment.step, layer=None, block_ids=[], sizes=[], tags=[]
        )
        start = 0
        downward = False
        # runs of consecutive rows about the low layers (or none), the middle, the high layers
        for place, group in groupby(block_ids, self._place):
            ids = list(group)
            stop = start + len(ids)
            shifts: Iterable[int] = (self.up if place > 0 else 0,)
            if place == 0:
                copies = range(self.times)
                shifts = [copy * self.block for copy in (reversed(copies) if downward else copies)]
            for shift in shifts:
                moved.block_ids.extend([block_id + shift for block_id in ids] if shift else ids)
                moved.sizes.extend(sizes[start:stop])
                moved.tags.extend(tags[start:stop])
            downward = place > 0
            start = stop
        return moved

    def _place(self, block_id: int) -> int:
        """-1, 0 or 1 for a block below, of or above the middle."""
        within = block_id % PASS
        return (within >= self.low) + (within >= self.high) - 1


def _layer_of(block_id: int) -> int:
    """The layer in an identity, -1 outside the layers."""
    return (block_id // LAYER & _LAYER_FIELD) - 1


def _moved(layer: int | None, by: int) -> int | None:
    return None if layer is None else layer + by
