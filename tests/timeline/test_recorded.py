"""The model against the real allocator: recorded runs of PyTorch 2.13.0, every address and every byte.

How they were recorded, without a GPU, is in `recorded/README.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wazn.timeline.allocator import make_allocator
from wazn.timeline.events import Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.replay import replay
from wazn.timeline.settings import parse_allocator_settings

MIB = 2**20
TAG = Tag(Category.TEMPORARY, "")
RUNS = [
    json.loads(line)
    for line in (Path(__file__).parent / "recorded" / "runs.jsonl").read_text().splitlines()
]


def steps(run: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the lines of a script: a verb and a number (0 for an emptied cache)."""
    words = iter(run["script"].split())
    return [(verb, 0 if verb == "e" else int(next(words))) for verb in words]


def name(run: dict[str, Any]) -> str:
    """Name a run by its settings and its memory."""
    return f"{run['settings'] or 'default'}-{run['capacity_bytes'] // MIB}MiB"


@pytest.mark.parametrize("run", RUNS, ids=name)
def test_every_block_lies_where_pytorch_puts_it(run: dict[str, Any]) -> None:
    """Addresses, reserved memory after every step, and the statistics at the end are the real allocator's."""
    allocator = make_allocator(
        parse_allocator_settings(run["settings"]),
        capacity_bytes=run["capacity_bytes"],
        device_total_bytes=run["total_bytes"],
    )
    blocks: list[int | None] = []
    reserved = []
    for verb, number in steps(run):
        if verb == "a":
            blocks.append(allocator.malloc(number))
        elif verb == "e":
            allocator.empty_cache()
        elif (address := blocks[number]) is not None:
            allocator.free(address)
        reserved.append(allocator.reserved_bytes)
    assert [-1 if block is None else block // 512 for block in blocks] == run["addresses"]
    assert reserved == [mib * MIB for mib in run["reserved_mib"]]
    for statistic in (
        "requested_bytes",
        "allocated_bytes",
        "peak_reserved_bytes",
        "num_alloc_retries",
        "num_ooms",
    ):
        assert getattr(allocator, statistic) == run[statistic], statistic


def until_failure(run: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the steps of a run up to the allocation that first failed."""
    found = []
    addresses = iter(run["addresses"])
    for verb, number in steps(run):
        found.append((verb, number))
        if verb == "a" and next(addresses) == -1:
            break
    return found


# A timeline has no event for an emptied cache.
FAILING = [run for run in RUNS if run["message"] and ("e", 0) not in until_failure(run)]


@pytest.mark.parametrize("run", FAILING, ids=name)
def test_the_message_is_pytorchs_message(run: dict[str, Any]) -> None:
    """A replay stops where the real run first failed, with the numbers of its message, word for word."""
    sizes: list[int] = []
    segment = Segment(phase=Phase.FORWARD, step=0, layer=None, block_ids=[], sizes=[], tags=[])
    for verb, number in until_failure(run):
        if verb == "a":
            segment.block_ids.append(len(sizes))
            segment.sizes.append(number)
            sizes.append(number)
        else:
            segment.block_ids.append(number)
            segment.sizes.append(-sizes[number])
        segment.tags.append(TAG)
    found = replay(
        Timeline(parts=(Part(segments=(segment,)),)),
        capacity_bytes=run["capacity_bytes"],
        device_total_bytes=run["total_bytes"],
        settings=parse_allocator_settings(run["settings"]),
    )
    assert found.out_of_memory is not None
    assert found.out_of_memory.message() == run["message"]
    failed_at = len(segment.sizes) - 1
    assert found.out_of_memory.moment.index == failed_at
    assert found.reserved_bytes == run["reserved_mib"][failed_at] * MIB
