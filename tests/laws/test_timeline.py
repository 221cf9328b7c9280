"""Laws of timelines: a compressed answer is the brute-force answer; a replay is the allocator, event by event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.laws.timelines import MIB, timelines, written_out
from wazn.timeline.allocator import make_allocator
from wazn.timeline.breakdown import PhaseLevels, peak
from wazn.timeline.events import Phase, Tag, Timeline
from wazn.timeline.replay import Replay, replay
from wazn.timeline.settings import AllocatorSettings, parse_allocator_settings
from wazn.timeline.snapshot import snapshot

SETTINGS = st.sampled_from(
    (
        "",
        "",
        "",
        "roundup_power2_divisions:4",
        "max_split_size_mb:20",
        "expandable_segments:True",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        "per_process_memory_fraction:0.8",
    )
).map(parse_allocator_settings)
CAPACITIES = st.one_of(st.none(), st.integers(0, 1500).map(lambda mib: mib * MIB))


def rounded(num_bytes: int) -> int:
    """Round away from zero to 512 bytes."""
    return (abs(num_bytes) + 511) // 512 * 512 * (1 if num_bytes > 0 else -1)


@given(timelines())
def test_the_compressed_peak_is_the_highest_point_of_all_events(timeline: Timeline) -> None:
    """Level, location, breakdown and phases equal those of a walk over every event of every repetition."""
    index = level = top = 0
    where = None
    alive: dict[Tag, int] = {}
    at_top: dict[Tag, int] = {}
    phases: dict[tuple[int, Phase], PhaseLevels] = {}
    for part in written_out(timeline).parts:
        for segment in part.segments:
            highest = level
            for tag, num_bytes in zip(segment.tags, segment.sizes, strict=True):
                level += rounded(num_bytes)
                alive[tag] = alive.get(tag, 0) + rounded(num_bytes)
                highest = max(highest, level)
                if level > top:
                    top, at_top = level, dict(alive)
                    where = (index, segment.step, segment.phase, segment.layer)
                index += 1
            key = (segment.step, segment.phase)
            before = phases[key].peak_bytes if key in phases else 0
            phases[key] = PhaseLevels(
                step=segment.step,
                phase=segment.phase,
                peak_bytes=max(before, highest),
                resident_bytes=level,
            )
    found = peak(timeline)
    assert found.peak_bytes == top
    assert found.resident_bytes == level
    if where is not None:
        assert (found.index, found.step, found.phase, found.layer) == where
    assert found.alive == _without_zeros(at_top)
    assert sum(found.alive.values()) == sum(found.by_category().values()) == top
    assert found.phases == tuple(phases.values())


def by_hand(
    timeline: Timeline, settings: AllocatorSettings, capacity_bytes: int | None
) -> dict[str, object]:
    """Replay with `malloc` and `free`, one event after another, and sum up."""
    allocator = make_allocator(settings, capacity_bytes=capacity_bytes)
    address_of: dict[int, int] = {}
    tag_of: dict[int, Tag] = {}
    alive: dict[Tag, int] = {}
    peak_alive: dict[Tag, int] = {}
    where = None
    largest = 0
    failed = None
    highest = 0
    for index, event in enumerate(timeline.events()):
        if event.num_bytes < 0:
            address = address_of.pop(event.block_id)
            alive[tag_of.pop(address)] -= allocator.live[address][0]
            allocator.free(address)
            continue
        made = allocator.malloc(event.num_bytes)
        if made is None:
            failed = index
            break
        address_of[event.block_id] = made
        tag_of[made] = event.tag
        alive[event.tag] = alive.get(event.tag, 0) + allocator.live[made][0]
        if allocator.allocated_bytes > highest:
            highest = allocator.allocated_bytes
            peak_alive = dict(alive)
            where = (index, event.step, event.phase, event.layer)
            largest = allocator.largest_free_bytes
    return {
        "failed": failed,
        "alive_at_failure": None if failed is None else _without_zeros(alive),
        "peak_allocated_bytes": allocator.peak_allocated_bytes,
        "peak_requested_bytes": allocator.peak_requested_bytes,
        "peak_reserved_bytes": allocator.peak_reserved_bytes,
        "allocated_bytes": allocator.allocated_bytes,
        "requested_bytes": allocator.requested_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "num_alloc_retries": allocator.num_alloc_retries,
        "num_ooms": allocator.num_ooms,
        "largest_free_bytes": allocator.largest_free_bytes,
        "largest_free_bytes_at_peak": largest,
        "where": where,
        "alive": _without_zeros(peak_alive),
    }


def _without_zeros(alive: dict[Tag, int]) -> dict[Tag, int]:
    return {tag: size for tag, size in alive.items() if size}


def summary(found: Replay) -> dict[str, object]:
    """Return of a replay what `by_hand` returns."""
    peak, failure = found.peak, found.out_of_memory
    return {
        "failed": None if failure is None else failure.moment.index,
        "alive_at_failure": None if failure is None else dict(failure.alive),
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_requested_bytes": found.peak_requested_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "allocated_bytes": found.allocated_bytes,
        "requested_bytes": found.requested_bytes,
        "reserved_bytes": found.reserved_bytes,
        "num_alloc_retries": found.num_alloc_retries,
        "num_ooms": found.num_ooms,
        "largest_free_bytes": found.largest_free_bytes,
        "largest_free_bytes_at_peak": found.largest_free_bytes_at_peak,
        "where": None if peak is None else (peak.index, peak.step, peak.phase, peak.layer),
        "alive": dict(found.alive),
    }


@given(timelines(), SETTINGS, CAPACITIES)
def test_a_replay_is_the_allocator_event_by_event(
    timeline: Timeline, settings: AllocatorSettings, capacity_bytes: int | None
) -> None:
    """The fast loop, its jumps over repetitions and its attribution give what `malloc` and `free` give."""
    found = replay(timeline, capacity_bytes=capacity_bytes, settings=settings)
    assert summary(found) == by_hand(timeline, settings, capacity_bytes)
    assert sum(found.alive.values()) == found.peak_allocated_bytes
    if found.out_of_memory is None:
        assert found.num_events == timeline.num_events
    else:
        assert found.num_events == found.out_of_memory.moment.index
        assert sum(found.out_of_memory.alive.values()) == found.allocated_bytes


@given(timelines(layers=40, most=4), CAPACITIES)
def test_many_repetitions_are_no_different(timeline: Timeline, capacity_bytes: int | None) -> None:
    """A timeline with its repetitions written out (where nothing can be jumped over) replays alike, phases included."""
    found = replay(timeline, capacity_bytes=capacity_bytes)
    assert found == replay(written_out(timeline), capacity_bytes=capacity_bytes)


@given(timelines(), SETTINGS)
def test_without_a_capacity_nothing_fails(timeline: Timeline, settings: AllocatorSettings) -> None:
    """No limit: no error, no retry, and allocated memory is reserved memory in use."""
    found = replay(timeline, settings=settings)
    assert found.out_of_memory is None
    assert found.num_alloc_retries == found.num_ooms == 0
    assert found.peak_requested_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes


@given(timelines(), st.sampled_from(("", "expandable_segments:True", "max_split_size_mb:20")))
def test_a_capacity_that_is_never_reached_changes_nothing(timeline: Timeline, text: str) -> None:
    """With exactly the reserved peak as capacity the replay is the same as without one.

    The addresses of an expandable segment are as many as the device is large, so that this stays the same.
    """
    settings = parse_allocator_settings(text)
    free = replay(timeline, settings=settings, device_total_bytes=2**47)
    limited = replay(
        timeline,
        settings=settings,
        device_total_bytes=2**47,
        capacity_bytes=free.peak_reserved_bytes,
    )
    assert limited == free


@given(timelines(), SETTINGS)
def test_the_replay_is_never_below_the_breakdown(
    timeline: Timeline, settings: AllocatorSettings
) -> None:
    """Blocks are at least their rounded sizes, and at most 1 MiB more each without a split limit."""
    found = replay(timeline, settings=settings)
    assert found.peak_allocated_bytes >= peak(timeline).peak_bytes
    if settings.expandable_segments:
        assert found.peak_allocated_bytes == peak(timeline).peak_bytes


@given(timelines(most=6, layers=3), SETTINGS, CAPACITIES)
def test_a_snapshot_ends_where_the_replay_ends(
    timeline: Timeline, settings: AllocatorSettings, capacity_bytes: int | None
) -> None:
    """Segments sum to the reserved, allocated and requested bytes; the trace holds every event."""
    found = replay(timeline, capacity_bytes=capacity_bytes, settings=settings)
    data = snapshot(timeline, capacity_bytes=capacity_bytes, settings=settings)
    segments = data["segments"]
    assert sum(segment["total_size"] for segment in segments) == found.reserved_bytes
    assert sum(segment["allocated_size"] for segment in segments) == found.allocated_bytes
    assert sum(segment["requested_size"] for segment in segments) == found.requested_bytes
    (trace,) = data["device_traces"]
    actions = [entry["action"] for entry in trace]
    assert actions.count("alloc") + actions.count("free_completed") == found.num_events
    assert actions.count("oom") == found.num_ooms
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    moved = sum(signs.get(entry["action"], 0) * entry["size"] for entry in trace)
    assert moved == found.reserved_bytes
