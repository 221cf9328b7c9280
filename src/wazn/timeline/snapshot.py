"""A timeline as a memory snapshot that PyTorch's own tools open.

The layout is that of `torch.cuda.memory._snapshot()`; `torch.cuda._memory_viz` and https://pytorch.org/memory_viz
read it. Where PyTorch puts the stack of the Python call, the frames say what the block is for: its tag, layer, phase
and step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wazn.errors import InputError
from wazn.timeline.allocator import MASK, SHIFT, CachingAllocator, make_allocator
from wazn.timeline.settings import DEFAULT_SETTINGS, SMALL_BYTES, AllocatorSettings

if TYPE_CHECKING:
    from pathlib import Path

    from wazn.timeline.events import Event, Timeline

__all__ = ["snapshot", "write_snapshot"]

POOL_ID = (0, 0)  # the default pool


def snapshot(
    timeline: Timeline,
    *,
    capacity_bytes: int | None = None,
    device_total_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> dict[str, Any]:
    """Return the allocator's state at the end of a timeline (or where it ran out of memory), and its whole history.

    One trace entry takes the place of one microsecond. Arguments and errors are those of `replay`.

    Source: torch/cuda/memory.py, `_snapshot`, v2.13.0.
    """
    allocator = make_allocator(
        settings, capacity_bytes=capacity_bytes, device_total_bytes=device_total_bytes
    )
    recorder = _Recorder(allocator)
    for event in timeline.events():
        if event.num_bytes and not recorder.run(event):
            break
    return {
        "segments": recorder.segments(),
        "device_traces": [recorder.trace],
        "external_annotations": [],
        "allocator_settings": {
            "expandable_segments": settings.expandable_segments,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
            "roundup_power2_divisions": {
                str(2**power): divisions
                for power, divisions in enumerate(settings.roundup_power2_divisions)
            },
        },
    }


def write_snapshot(
    path: Path,
    timeline: Timeline,
    *,
    capacity_bytes: int | None = None,
    device_total_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> None:
    """Write `snapshot(...)` as the pickle that `torch.cuda.memory._dump_snapshot` would write."""
    import pickle

    data = snapshot(
        timeline,
        capacity_bytes=capacity_bytes,
        device_total_bytes=device_total_bytes,
        settings=settings,
    )
    with path.open("wb") as file:
        pickle.dump(data, file)


class _Recorder:
    """Runs events through an allocator and writes its trace."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        allocator.observer = self.device
        self.trace: list[dict[str, Any]] = []
        self.address_of: dict[int, int] = {}
        self.frames_of: dict[int, list[dict[str, Any]]] = {}
        self.frame_cache: dict[object, list[dict[str, Any]]] = {}
        self.frames: list[dict[str, Any]] = []

    def run(self, event: Event) -> bool:
        """Run one event; return whether it went well."""
        if event.num_bytes > 0:
            return self.allocate(event)
        if event.block_id not in self.address_of:
            raise InputError(f"the timeline frees block {event.block_id}, which is not allocated")
        address = self.address_of.pop(event.block_id)
        self.frames = self.frames_of.pop(address)
        for action in ("free_requested", "free_completed"):
            self.entry(action, address, -event.num_bytes)
        self.allocator.free(address)
        return True

    def allocate(self, event: Event) -> bool:
        """Run an allocation."""
        if event.block_id in self.address_of:
            raise InputError(f"the timeline allocates block {event.block_id}, which is allocated")
        self.frames = self.frames_for(event)
        address = self.allocator.malloc(event.num_bytes)
        if address is None:
            self.entry("oom", 0, self.allocator.settings.round_size(event.num_bytes))
            self.trace[-1]["device_free"] = self.allocator.device_free_bytes
            return False
        self.address_of[event.block_id] = address
        self.frames_of[address] = self.frames
        self.entry("alloc", address, event.num_bytes)
        return True

    def device(self, action: str, address: int, num_bytes: int) -> None:
        """Write what the allocator did with the device."""
        self.entry(action, address, num_bytes)

    def entry(self, action: str, address: int, num_bytes: int) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": num_bytes,
                "stream": 0,
                "pool_id": POOL_ID,
                "time_us": len(self.trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": self.frames,
            }
        )

    def frames_for(self, event: Event) -> list[dict[str, Any]]:
        """Return the frames of an event, innermost first: the same list for the same place and tag."""
        key = (event.tag, event.phase, event.step, event.layer)
        if key not in self.frame_cache:
            names = [f"{event.tag.category}: {event.tag.label}"]
            if event.layer is not None:
                names.append(f"layer {event.layer}")
            names += [str(event.phase), f"step {event.step}"]
            # `;` and line breaks would end a frame in a flame graph
            self.frame_cache[key] = [
                {"filename": "", "line": 0, "name": " ".join(name.replace(";", ",").split())}
                for name in names
            ]
        return self.frame_cache[key]

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments in order of address: ranges of blocks that touch."""
        allocator = self.allocator
        small = set(allocator.small)
        found: list[dict[str, Any]] = []
        end = -1
        for address, block in self.blocks():
            if address != end:
                live = allocator.live.get(address)
                in_small = (
                    allocator.free_from[address] in small
                    if live is None
                    else allocator.settings.round_size(live[1]) <= SMALL_BYTES
                )
                found.append(
                    {
                        "device": 0,
                        "address": address,
                        "total_size": 0,
                        "allocated_size": 0,
                        "active_size": 0,
                        "requested_size": 0,
                        "stream": 0,
                        "segment_type": "small" if in_small else "large",
                        "segment_pool_id": POOL_ID,
                        "is_expandable": allocator.settings.expandable_segments,
                        "frames": [],
                        "blocks": [],
                    }
                )
            segment = found[-1]
            segment["blocks"].append(block)
            segment["total_size"] += block["size"]
            if block["state"] == "active_allocated":
                segment["allocated_size"] += block["size"]
                segment["active_size"] += block["size"]
                segment["requested_size"] += block["requested_size"]
            end = address + block["size"]
        return found

    def blocks(self) -> list[tuple[int, dict[str, Any]]]:
        """Return live and free blocks in order of address."""
        allocator = self.allocator
        blocks = {
            block & MASK: {
                "address": block & MASK,
                "size": block >> SHIFT,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            }
            for block in (*allocator.small, *allocator.large)
        }
        for address, (size, num_bytes) in allocator.live.items():
            blocks[address] = {
                "address": address,
                "size": size,
                "requested_size": num_bytes,
                "state": "active_allocated",
                "frames": self.frames_of[address],
            }
        return sorted(blocks.items())
