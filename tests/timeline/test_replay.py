"""The replay of small timelines, by pencil."""

from __future__ import annotations

import pytest

from wazn.errors import InputError
from wazn.timeline.events import LAYER, Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.replay import Moment, PhasePeak, replay
from wazn.timeline.settings import AllocatorSettings

MIB = 2**20
GIB = 2**30
WEIGHT = Tag(Category.WEIGHTS, "w")
HIDDEN = Tag(Category.ACTIVATIONS, "hidden")
SCRATCH = Tag(Category.TEMPORARY, "scratch")

Events = list[tuple[int, int, Tag]]


def segment(
    events: Events, phase: Phase = Phase.FORWARD, step: int = 0, layer: int | None = None
) -> Segment:
    """Write rows as columns."""
    return Segment(
        phase=phase,
        step=step,
        layer=layer,
        block_ids=[row[0] for row in events],
        sizes=[row[1] for row in events],
        tags=[row[2] for row in events],
    )


def timeline(*segments: Segment) -> Timeline:
    """One part for each segment."""
    return Timeline(parts=tuple(Part(segments=(one,)) for one in segments))


def test_an_empty_timeline_needs_nothing() -> None:
    """No events: no peak, no bytes, no error, also on a device without memory."""
    found = replay(timeline(segment([])), capacity_bytes=0)
    assert found.peak is None
    assert found.out_of_memory is None
    assert (found.num_events, found.peak_allocated_bytes, found.peak_reserved_bytes) == (0, 0, 0)
    assert dict(found.alive) == {}


def test_the_three_peaks_and_what_was_alive() -> None:
    """11 MiB (a block of 12), 3 MiB and 1 byte: requested, allocated, reserved, and the breakdown, by pencil."""
    load = segment([(1, 11 * MIB, WEIGHT), (2, 1, WEIGHT)], Phase.LOAD)
    work = segment([(3, 3 * MIB, SCRATCH), (3, -3 * MIB, SCRATCH)], Phase.FORWARD, 1, 7)
    found = replay(timeline(load, work))
    assert found.peak_requested_bytes == 14 * MIB + 1
    assert found.peak_allocated_bytes == 15 * MIB + 512
    assert found.peak_reserved_bytes == (12 + 2 + 20) * MIB
    assert found.peak == Moment(index=2, step=1, phase=Phase.FORWARD, layer=7)
    assert dict(found.alive) == {WEIGHT: 12 * MIB + 512, SCRATCH: 3 * MIB}
    assert found.by_category() == {Category.WEIGHTS: 12 * MIB + 512, Category.TEMPORARY: 3 * MIB}
    assert found.largest_free_bytes_at_peak == 17 * MIB
    assert found.largest_free_bytes == 20 * MIB
    assert found.allocated_bytes == 12 * MIB + 512
    assert found.requested_bytes == 11 * MIB + 1
    assert found.phases == (
        PhasePeak(
            step=0,
            phase=Phase.LOAD,
            peak_allocated_bytes=12 * MIB + 512,
            reserved_bytes=14 * MIB,
        ),
        PhasePeak(
            step=1,
            phase=Phase.FORWARD,
            peak_allocated_bytes=15 * MIB + 512,
            reserved_bytes=34 * MIB,
        ),
    )


def test_running_out_of_memory_is_an_answer_with_pytorchs_numbers() -> None:
    """100 MiB, 16 of them another process's: 20 more do not fit, and the message says why.

    2 MiB of weights hold a segment of 20 MiB, 52 of hidden states have one of their own; 12 are free.
    """
    load = segment(
        [(1, 2 * MIB, WEIGHT), (2, 16 * MIB, WEIGHT), (2, -16 * MIB, WEIGHT)], Phase.LOAD
    )
    work = segment([(3, 52 * MIB, HIDDEN), (4, 20 * MIB, SCRATCH)], Phase.FORWARD, 0, 3)
    found = replay(timeline(load, work), capacity_bytes=84 * MIB, device_total_bytes=100 * MIB)
    failure = found.out_of_memory
    assert failure is not None
    assert failure.moment == Moment(index=4, step=0, phase=Phase.FORWARD, layer=3)
    assert failure.tag == SCRATCH
    assert (failure.requested_bytes, failure.tried_bytes) == (20 * MIB, 20 * MIB)
    assert failure.free_bytes == (84 - 20 - 52) * MIB
    assert failure.allocated_bytes == 54 * MIB
    assert failure.reserved_bytes == 72 * MIB
    assert failure.unallocated_bytes == 18 * MIB
    assert dict(failure.alive) == {HIDDEN: 52 * MIB, WEIGHT: 2 * MIB}
    assert (found.num_events, found.num_ooms, found.num_alloc_retries) == (4, 1, 1)
    assert failure.message() == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
        "100.00 MiB of which 12.00 MiB is free. Including non-PyTorch memory, this process has "
        "88.00 MiB memory in use. Of the allocated memory 54.00 MiB is allocated by PyTorch, "
        "and 18.00 MiB is reserved by PyTorch but unallocated."
    )


def test_a_timeline_that_fits_after_a_release_counts_the_retry() -> None:
    """50 MiB free in the cache stand in the way of 60 on a device of 80: PyTorch returns them and goes on."""
    events = [(1, 50 * MIB, SCRATCH), (1, -50 * MIB, SCRATCH), (2, 60 * MIB, HIDDEN)]
    found = replay(timeline(segment(events)), capacity_bytes=80 * MIB)
    assert found.out_of_memory is None
    assert found.num_alloc_retries == 1
    assert found.peak_reserved_bytes == found.reserved_bytes == 60 * MIB


def test_repetitions_move_identities_and_layers() -> None:
    """Three layers keep 2 MiB each, walked up, then freed walking down; the peak is in the last layer."""
    up = Part(segments=(segment([(LAYER, 2 * MIB, HIDDEN)], layer=0),), times=3, shift=LAYER)
    down = Part(
        segments=(segment([(3 * LAYER, -2 * MIB, HIDDEN)], Phase.BACKWARD, 0, 2),),
        times=3,
        shift=-LAYER,
    )
    found = replay(Timeline(parts=(up, down)))
    assert found.peak == Moment(index=2, step=0, phase=Phase.FORWARD, layer=2)
    assert dict(found.alive) == {HIDDEN: 6 * MIB}
    assert found.num_events == 6
    assert found.allocated_bytes == 0
    assert found.peak_reserved_bytes == 20 * MIB


def test_a_million_repetitions_that_leave_no_trace_are_run_twice() -> None:
    """Temporaries that come and go find the same free blocks each time: nobody waits for a million of them."""
    once = segment([(LAYER, 5 * MIB, SCRATCH), (LAYER, -5 * MIB, SCRATCH)], Phase.OPTIMIZER)
    found = replay(Timeline(parts=(Part(segments=(once,), times=10**6, shift=LAYER),)))
    assert found.num_events == 2 * 10**6
    assert found.peak == Moment(index=0, step=0, phase=Phase.OPTIMIZER, layer=None)
    assert found.peak_allocated_bytes == 5 * MIB
    assert found.peak_reserved_bytes == 20 * MIB


def test_repetitions_that_keep_fresh_segments_add_up() -> None:
    """1,000 layers keep 11 MiB each in segments of 12; the last 600 are freed again, and lie where they must.

    The 400 that stay hold 4,800 MiB; the gaps of 12 MiB are single segments: 13 MiB need a new one.
    """
    up = Part(segments=(segment([(LAYER, 11 * MIB, HIDDEN)], layer=0),), times=1000, shift=LAYER)
    down = Part(
        segments=(segment([(1000 * LAYER, -11 * MIB, HIDDEN)], Phase.BACKWARD, 0, 999),),
        times=600,
        shift=-LAYER,
    )
    more = Part(segments=(segment([(5, 13 * MIB, SCRATCH)], Phase.OPTIMIZER),))
    found = replay(Timeline(parts=(up, down, more)))
    assert found.peak == Moment(index=999, step=0, phase=Phase.FORWARD, layer=999)
    assert dict(found.alive) == {HIDDEN: 12_000 * MIB}
    assert found.peak_reserved_bytes == 12_014 * MIB
    assert found.allocated_bytes == (4800 + 14) * MIB
    assert found.largest_free_bytes == 12 * MIB


def test_repetitions_stop_at_the_capacity() -> None:
    """Of segments of 12 MiB a device of 1,000 MiB holds 83: the 84th layer fails, and is named."""
    up = Part(segments=(segment([(LAYER, 11 * MIB, HIDDEN)], layer=0),), times=1000, shift=LAYER)
    found = replay(Timeline(parts=(up,)), capacity_bytes=1000 * MIB)
    assert found.out_of_memory is not None
    assert found.out_of_memory.moment == Moment(index=83, step=0, phase=Phase.FORWARD, layer=83)
    assert found.out_of_memory.alive == {HIDDEN: 83 * 12 * MIB}
    assert found.peak_allocated_bytes == 83 * 12 * MIB


def test_nothing_is_allocated_for_empty_tensors() -> None:
    """An event of 0 bytes makes no block, as in PyTorch, and can be anywhere."""
    events = [(1, 0, HIDDEN), (2, 512, HIDDEN), (1, 0, HIDDEN)]
    found = replay(timeline(segment(events)))
    assert found.num_events == 3
    assert found.peak_allocated_bytes == 512
    assert found.peak == Moment(index=1, step=0, phase=Phase.FORWARD, layer=None)


def test_a_block_larger_than_its_request_counts_whole() -> None:
    """A free block of 12 MiB serves 11.5 without a split: 12 are allocated, 0.5 more than in a sum of requests."""
    events = [
        (1, 12 * MIB, SCRATCH),
        (1, -12 * MIB, SCRATCH),
        (2, 23 * MIB // 2, HIDDEN),
    ]
    found = replay(timeline(segment(events)))
    assert found.allocated_bytes == 12 * MIB
    assert found.requested_bytes == 23 * MIB // 2


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([(1, -512, HIDDEN)], "frees block 1, which is not allocated"),
        ([(1, 512, HIDDEN), (1, -512, HIDDEN), (1, -512, HIDDEN)], "frees block 1"),
        ([(1, 512, HIDDEN), (1, 512, HIDDEN)], "allocates block 1 twice"),
        ([(1, 2**60, HIDDEN)], "the limit is 2"),
        ([(1, -(2**60), HIDDEN)], "the limit is 2"),
    ],
)
def test_impossible_timelines_are_refused(events: Events, fault: str) -> None:
    """A timeline that frees or allocates twice is wrong, and says where."""
    with pytest.raises(InputError, match=fault):
        replay(timeline(segment(events)))


def test_a_block_of_another_segment_is_not_allocated_again() -> None:
    """Two segments that both allocate block 1 and keep it are one too many."""
    first, second = segment([(1, 512, HIDDEN)]), segment([(1, 512, HIDDEN)], Phase.BACKWARD)
    with pytest.raises(InputError, match="backward of step 0 allocates a block that is allocated"):
        replay(timeline(first, second))


def test_more_memory_than_addresses_is_refused() -> None:
    """Without a capacity a hostile timeline ends with an error, not with a wrapped address."""
    events = [(number, 2**59, HIDDEN) for number in range(4)]
    with pytest.raises(InputError, match="more than 2"):
        replay(timeline(segment(events)))


@pytest.mark.parametrize("name", ["capacity_bytes", "device_total_bytes"])
def test_memory_is_not_negative(name: str) -> None:
    """A device with less than nothing is a mistake of the caller."""
    with pytest.raises(InputError, match="must not be negative"):
        replay(timeline(segment([])), **{name: -1})


def test_the_settings_are_used() -> None:
    """The run of PyTorch's own advice: what fragments with fixed segments fits with expandable ones."""
    events = [
        (1, 18 * MIB, SCRATCH),
        (1, -18 * MIB, SCRATCH),
        (2, 2 * MIB, HIDDEN),
        (3, 42 * MIB + 1, SCRATCH),
    ]
    fixed = replay(timeline(segment(events)), capacity_bytes=60 * MIB)
    assert fixed.out_of_memory is not None
    expandable = replay(
        timeline(segment(events)),
        capacity_bytes=60 * MIB,
        settings=AllocatorSettings(expandable_segments=True),
    )
    assert expandable.out_of_memory is None
    assert expandable.reserved_bytes == 60 * MIB


def test_the_fraction_is_named_in_the_message() -> None:
    """`per_process_memory_fraction` adds PyTorch's "allowed"."""
    found = replay(
        timeline(segment([(1, 30 * GIB, HIDDEN)])),
        capacity_bytes=40 * GIB,
        settings=AllocatorSettings(per_process_memory_fraction=0.5),
    )
    assert found.out_of_memory is not None
    assert "20.00 GiB allowed; Of the allocated memory 0 bytes is" in found.out_of_memory.message()
