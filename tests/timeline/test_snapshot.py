"""The snapshot: PyTorch's own tools read it, and read what we wrote."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from wazn.timeline.events import LAYER, Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.settings import AllocatorSettings
from wazn.timeline.snapshot import snapshot, write_snapshot

MIB = 2**20
WEIGHT = Tag(Category.WEIGHTS, "embed; tokens")
HIDDEN = Tag(Category.ACTIVATIONS, "hidden")

RUN = Timeline(
    parts=(
        Part(
            segments=(
                Segment(
                    phase=Phase.LOAD,
                    step=0,
                    layer=None,
                    block_ids=[1, 2],
                    sizes=[30 * MIB - 100, 1000],
                    tags=[WEIGHT, WEIGHT],
                ),
            )
        ),
        Part(
            segments=(
                Segment(
                    phase=Phase.FORWARD,
                    step=0,
                    layer=0,
                    block_ids=[LAYER, LAYER + 1, LAYER],
                    sizes=[4 * MIB, 6 * MIB, -4 * MIB],
                    tags=[HIDDEN, HIDDEN, HIDDEN],
                ),
            ),
            times=3,
            shift=LAYER,
        ),
    )
)


@pytest.fixture
def viz() -> Any:
    """PyTorch's memory visualiser."""
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    return _memory_viz


def reread(data: dict[str, Any]) -> dict[str, Any]:
    """Send a snapshot through the pickle in which it travels."""
    again: dict[str, Any] = pickle.loads(pickle.dumps(data))
    assert again == data
    return again


def test_pytorchs_summary_adds_up(viz: Any) -> None:
    """`segsum` checks that free and allocated bytes sum to each segment.

    30 MiB and a small segment; then 4 + 6 + 6 + (gap) fill a segment of 20 MiB (each layer's 4 lie in the gap that the
    last one's left), and the third 6 need a second one.
    """
    text = viz.segsum(reread(snapshot(RUN)))
    assert "segments: 4" in text
    assert "total_reserved: 72.0MiB" in text
    assert "total_allocated: 48.0MiB" in text


def test_pytorch_prints_the_history(viz: Any) -> None:
    """`trace` reads every entry: 4 segments, 8 allocations, each in the segment that holds it, and 3 frees."""
    text = viz.trace(reread(snapshot(RUN)))
    assert text.count("cudaMalloc") == 4
    assert text.count("[0:") + text.count("[4194304:") + text.count("[10485760:") == 8
    assert text.count("del ") == 3
    assert "MEM[" not in text


def test_pytorch_draws_it(viz: Any) -> None:
    """`trace_plot` and `segment_plot` put the snapshot into their pages, with and without what came and went."""
    for page in (
        viz.trace_plot(snapshot(RUN)),
        viz.trace_plot(snapshot(RUN), plot_segments=True),
        viz.trace_plot(snapshot(RUN), filter_freed=True),
        viz.segment_plot(snapshot(RUN)),
    ):
        assert "snapshot.pickle" in page


def test_a_flame_graph_shows_what_the_bytes_are_for(viz: Any) -> None:
    """`memory` and `segments` fold the frames: step, phase, layer, tag; a `;` in a label does not end a frame."""
    text = viz.memory(snapshot(RUN), format_flamegraph=lambda lines: lines)
    assert (
        "active_allocated;:0:step 0;:0:load;:0:weights: embed, tokens " + str(30 * MIB - 100)
    ) in text
    assert "step 0;:0:forward;:0:layer 2;:0:activations: hidden 6291456" in text
    assert viz.segments(snapshot(RUN), format_flamegraph=lambda lines: lines).count("seg_") >= 8


def test_two_snapshots_compare(viz: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` takes two lists of segments: what the forward pass took is only in the second."""
    before = snapshot(Timeline(parts=RUN.parts[:1]))["segments"]
    after = snapshot(RUN)["segments"]
    text = viz.compare(before, after, format_flamegraph=lambda lines: lines)
    assert "only_before = []" in capsys.readouterr().out
    assert text.count("only_after") >= 3


def test_a_failure_is_the_last_entry() -> None:
    """On a device of 60 MiB the second 20 MiB segment does not fit: `oom`, with what is free."""
    data = snapshot(RUN, capacity_bytes=60 * MIB)
    last = data["device_traces"][0][-1]
    assert last["action"] == "oom"
    assert last["size"] == 6 * MIB
    assert last["device_free"] == (60 - 30 - 2 - 20) * MIB


def test_expandable_segments_are_mapped_ranges(viz: Any) -> None:
    """One contiguous range for each pool: 2 x 20 MiB and one more page of each, by page."""
    settings = AllocatorSettings(expandable_segments=True)
    data = snapshot(RUN, settings=settings)
    assert [segment["total_size"] for segment in data["segments"]] == [60 * MIB, 2 * MIB]
    assert all(segment["is_expandable"] for segment in data["segments"])
    assert [segment["segment_type"] for segment in data["segments"]] == ["large", "small"]
    actions = {entry["action"] for entry in data["device_traces"][0]}
    assert actions == {"segment_map", "alloc", "free_requested", "free_completed"}
    assert "total_reserved: 62.0MiB" in viz.segsum(data)


def test_it_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    """The file is the pickle of the same dictionary."""
    path = tmp_path / "snapshot.pickle"
    write_snapshot(path, RUN)
    assert pickle.loads(path.read_bytes()) == snapshot(RUN)
