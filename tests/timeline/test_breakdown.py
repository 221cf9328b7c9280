"""The compressed peak, by pencil."""

from __future__ import annotations

import pytest

from wazn.errors import InputError
from wazn.timeline.breakdown import PhaseLevels, peak
from wazn.timeline.events import LAYER, Category, Part, Phase, Segment, Tag, Timeline

WEIGHT = Tag(Category.WEIGHTS, "w")
HIDDEN = Tag(Category.ACTIVATIONS, "hidden")
SCRATCH = Tag(Category.TEMPORARY, "scratch")


def segment(
    rows: list[tuple[int, int, Tag]],
    phase: Phase = Phase.FORWARD,
    step: int = 0,
    layer: int | None = None,
) -> Segment:
    """Write rows as columns."""
    return Segment(
        phase=phase,
        step=step,
        layer=layer,
        block_ids=[row[0] for row in rows],
        sizes=[row[1] for row in rows],
        tags=[row[2] for row in rows],
    )


def test_an_empty_timeline_has_no_peak() -> None:
    """Nothing is alive nowhere."""
    found = peak(Timeline(parts=()))
    assert (found.peak_bytes, found.index, found.phase, found.step, found.layer) == (
        0,
        None,
        None,
        None,
        None,
    )
    assert dict(found.alive) == {}
    assert found.phases == ()


def test_sizes_round_up_one_by_one() -> None:
    """1 + 513 + 1024 bytes take 512 + 1024 + 1024."""
    rows = [(1, 1, WEIGHT), (2, 513, HIDDEN), (3, 1024, HIDDEN)]
    found = peak(Timeline(parts=(Part(segments=(segment(rows),)),)))
    assert found.peak_bytes == 2560
    assert dict(found.alive) == {HIDDEN: 2048, WEIGHT: 512}
    assert found.by_category() == {Category.ACTIVATIONS: 2048, Category.WEIGHTS: 512}


def test_a_part_that_grows_peaks_in_its_last_repetition() -> None:
    """Each of 5 layers keeps 512 and passes through 1024 more: 5 x 512 + 1024, at the second event of layer 4."""
    rows = [(LAYER, 512, HIDDEN), (LAYER + 1, 1024, SCRATCH), (LAYER + 1, -1024, SCRATCH)]
    part = Part(segments=(segment(rows, layer=0),), times=5, shift=LAYER)
    found = peak(Timeline(parts=(part,)))
    assert found.peak_bytes == 5 * 512 + 1024
    assert (found.index, found.layer) == (4 * 3 + 1, 4)
    assert dict(found.alive) == {HIDDEN: 2560, SCRATCH: 1024}
    assert found.resident_bytes == 2560


def test_a_part_that_shrinks_peaks_in_its_first_repetition() -> None:
    """Walking down, the first of 3 layers finds the most alive: 3 x 512 and its own 1024, in layer 2."""
    up = Part(segments=(segment([(LAYER, 512, HIDDEN)], layer=0),), times=3, shift=LAYER)
    rows = [(9 * LAYER, 1024, SCRATCH), (3 * LAYER, -512, HIDDEN), (9 * LAYER, -1024, SCRATCH)]
    down = Part(segments=(segment(rows, Phase.BACKWARD, 0, 2),), times=3, shift=-LAYER)
    found = peak(Timeline(parts=(up, down)))
    assert found.peak_bytes == 3 * 512 + 1024
    assert (found.index, found.phase, found.layer) == (3, Phase.BACKWARD, 2)
    assert dict(found.alive) == {HIDDEN: 1536, SCRATCH: 1024}
    assert found.phases == (
        PhaseLevels(step=0, phase=Phase.FORWARD, peak_bytes=1536, resident_bytes=1536),
        PhaseLevels(step=0, phase=Phase.BACKWARD, peak_bytes=2560, resident_bytes=0),
    )


def test_the_first_of_equal_peaks_is_taken() -> None:
    """A part that leaves nothing behind has the same top in every repetition: the first is named."""
    rows = [(LAYER, 512, SCRATCH), (LAYER, -512, SCRATCH)]
    part = Part(segments=(segment(rows, layer=0),), times=4, shift=LAYER)
    found = peak(Timeline(parts=(part, part)))
    assert (found.peak_bytes, found.index, found.layer) == (512, 0, 0)


def test_segments_of_one_part_alternate() -> None:
    """Two segments repeated 3 times: the second starts where the first has left off, in each repetition.

    First: keep 1024. Second: 2048 come, 2048 and 512 go (a net of -512). Top: in the last repetition,
    2 x 512 + 1024 + 2048 = 4096.
    """
    first = segment([(LAYER, 512, HIDDEN), (LAYER + 1, 512, WEIGHT)], Phase.FORWARD, 0, 0)
    second = segment(
        [
            (LAYER + 2, 2048, SCRATCH),
            (LAYER + 2, -2048, SCRATCH),
            (LAYER, -512, HIDDEN),
        ],
        Phase.BACKWARD,
        0,
        0,
    )
    found = peak(Timeline(parts=(Part(segments=(first, second), times=3, shift=LAYER),)))
    assert found.peak_bytes == 4096
    assert (found.index, found.phase, found.layer) == (2 * 5 + 2, Phase.BACKWARD, 2)
    assert dict(found.alive) == {SCRATCH: 2048, WEIGHT: 1536, HIDDEN: 512}
    assert found.phases == (
        PhaseLevels(step=0, phase=Phase.FORWARD, peak_bytes=2048, resident_bytes=2048),
        PhaseLevels(step=0, phase=Phase.BACKWARD, peak_bytes=4096, resident_bytes=1536),
    )


def test_a_part_that_never_happens_changes_nothing() -> None:
    """Zero layers: no peak, no phase."""
    part = Part(segments=(segment([(1, 512, HIDDEN)]),), times=0)
    assert peak(Timeline(parts=(part,))).phases == ()


def test_a_free_with_another_tag_is_refused() -> None:
    """The sum by tag would show a negative component: an error, not a breakdown."""
    rows = [(1, 512, HIDDEN), (1, -512, WEIGHT), (2, 2048, SCRATCH)]
    with pytest.raises(InputError, match="frees more of `weights: w`"):
        _ = peak(Timeline(parts=(Part(segments=(segment(rows),)),))).alive
