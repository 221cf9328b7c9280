"""Timelines for property tests: consistent by construction, with repetitions up and down the layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from wazn.timeline.events import LAYER, PASS, Category, Part, Phase, Segment, Tag, Timeline

MIB = 2**20

SIZES = st.one_of(
    st.integers(1, 2000),
    st.sampled_from((512, 1024, MIB - 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB)),
    st.integers(1, 3 * MIB),
    st.integers(1, 30 * MIB),
    st.integers(1, 32).map(lambda number: number * MIB),
)
TAGS = tuple(
    Tag(category, label)
    for category in (Category.WEIGHTS, Category.ACTIVATIONS, Category.TEMPORARY)
    for label in ("a", "b")
)


@dataclass
class Writer:
    """Writes one segment; remembers the size and tag of what it allocated."""

    segment: Segment
    base: int
    made: dict[int, tuple[int, Tag]] = field(default_factory=dict)

    def event(self, block_id: int, size: int, tag: Tag) -> None:
        """Write a line."""
        self.segment.block_ids.append(block_id)
        self.segment.sizes.append(size)
        self.segment.tags.append(tag)

    def alloc(self, size: int, tag: Tag) -> int:
        """Allocate the next block of this segment's pass and layer."""
        block_id = self.base + len(self.made)
        self.made[block_id] = (size, tag)
        self.event(block_id, size, tag)
        return block_id

    def free(self, block_id: int) -> None:
        """Free a block that was made here."""
        size, tag = self.made[block_id]
        self.event(block_id, -size, tag)


def writer(phase: Phase, step: int, layer: int | None, base: int) -> Writer:
    """Start a segment."""
    segment = Segment(phase=phase, step=step, layer=layer, block_ids=[], sizes=[], tags=[])
    return Writer(segment=segment, base=base)


@st.composite
def scribbles(draw: st.DrawFn, out: Writer, most: int) -> list[int]:
    """Allocate and free some blocks in a segment; return those that are left."""
    live: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        if live and draw(st.booleans()):
            out.free(live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            out.alloc(draw(SIZES), draw(st.sampled_from(TAGS)))
            live.append(max(out.made))
    return live


@st.composite
def timelines(draw: st.DrawFn, *, most: int = 12, layers: int = 9) -> Timeline:
    """Some passes; each walks up its layers, keeping blocks, and later back down, freeing some of them.

    Every pass has a part outside the layers, a repeated part of one or two segments (the second may free what the first
    made), and a repeated part that only comes and goes.
    """
    parts: list[Part] = []
    for number in range(draw(st.integers(1, 3))):
        base = number * 4 * PASS
        step = draw(st.integers(0, 1))
        times = draw(st.integers(1, layers))

        out = writer(Phase.LOAD, step, None, base)
        outside = draw(scribbles(out, most))
        parts.append(Part(segments=(out.segment,)))

        up = writer(Phase.FORWARD, step, 0, base + PASS + LAYER)
        kept = draw(scribbles(up, most))
        segments = [up.segment]
        if draw(st.booleans()):
            second = writer(draw(st.sampled_from((Phase.FORWARD, Phase.LOSS))), step, 0, 0)
            second.made = up.made
            second.base = up.base
            count = draw(st.integers(0, len(kept)))
            for block_id in kept[:count]:
                second.free(block_id)
            kept = kept[count:]
            kept += draw(scribbles(second, most))
            segments.append(second.segment)
        parts.append(Part(segments=tuple(segments), times=times, shift=LAYER))

        steady = writer(Phase.OPTIMIZER, step, None, base + 2 * PASS + LAYER)
        for block_id in draw(scribbles(steady, most)):
            steady.free(block_id)
        parts.append(Part(segments=(steady.segment,), times=times, shift=LAYER))

        down = writer(Phase.BACKWARD, step, times - 1, base + 3 * PASS + times * LAYER)
        left = draw(scribbles(down, most))
        dropped = kept if draw(st.booleans()) else kept[: len(kept) // 2]
        for block_id in dropped:
            size, tag = up.made[block_id]
            down.event(block_id + (times - 1) * LAYER, -size, tag)
        for block_id in left[: len(left) // 2]:
            down.free(block_id)
        parts.append(Part(segments=(down.segment,), times=times, shift=-LAYER))

        if draw(st.booleans()):
            end = writer(Phase.ZERO_GRAD, step, None, 0)
            for block_id in outside:
                size, tag = out.made[block_id]
                end.event(block_id, -size, tag)
            parts.append(Part(segments=(end.segment,)))
    return Timeline(parts=tuple(parts))


def written_out(timeline: Timeline) -> Timeline:
    """Return the same timeline without a repetition: one part for each."""
    parts = []
    for part in timeline.parts:
        for repetition in range(part.times):
            shift = repetition * part.shift
            parts.append(
                Part(
                    segments=tuple(
                        Segment(
                            phase=segment.phase,
                            step=segment.step,
                            layer=None if segment.layer is None else segment.layer + shift // LAYER,
                            block_ids=[block_id + shift for block_id in segment.block_ids],
                            sizes=segment.sizes,
                            tags=segment.tags,
                        )
                        for segment in part.segments
                    )
                )
            )
    return Timeline(parts=tuple(parts))
