"""What a rehearsal saw: its events, peaks by phase, the breakdown of the peak, the timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from wazn.timeline.events import Category, Part, Phase, Segment, Tag, Timeline
from wazn.trace.tracker import StorageEvent, rounded_bytes

__all__ = ["Rehearsal", "signed_rounded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What happened: every allocation and free in order, and what the long-lived blocks are.

    Peaks are bytes as PyTorch counts them allocated, each block rounded to 512.
    """

    events: tuple[StorageEvent, ...]
    categories: dict[int, Category] = field(default_factory=dict)

    def peaks(self) -> dict[tuple[int, str], int]:
        """Return the peak by (step, phase), in order of appearance."""
        result: dict[tuple[int, str], int] = {}
        current_bytes = 0
        for event in self.events:
            key = (event.step, event.phase)
            result.setdefault(key, current_bytes)
            current_bytes += signed_rounded(event.num_bytes)
            result[key] = max(result[key], current_bytes)
        return result

    @property
    def peak_bytes(self) -> int:
        """The highest sum of live blocks."""
        return max(self.peaks().values(), default=0)

    def timeline(self) -> Timeline:
        """Return the events as a timeline: one part, one segment for each stretch of one phase and step.

        A block without a name of its own is a workspace of cuBLAS, of the logits and the loss when it was
        made in that phase, a temporary when it dies in the phase that made it, and an activation otherwise.
        """
        tags = self._tags()
        segments: list[Segment] = []
        for event in self.events:
            key = (event.step, event.phase)
            if not segments or (segments[-1].step, str(segments[-1].phase)) != key:
                segments.append(
                    Segment(
                        phase=Phase(event.phase),
                        step=event.step,
                        layer=None,
                        block_ids=[],
                        sizes=[],
                        tags=[],
                    )
                )
            segments[-1].block_ids.append(event.block_id)
            segments[-1].sizes.append(event.num_bytes)
            segments[-1].tags.append(tags[event.block_id])
        return Timeline(parts=(Part(segments=tuple(segments)),))

    def _tags(self) -> dict[int, Tag]:
        born: dict[int, StorageEvent] = {}
        tags: dict[int, Tag] = {}
        for event in self.events:
            made = born.setdefault(event.block_id, event)
            if event.num_bytes > 0:
                category = self.categories.get(event.block_id, Category.ACTIVATIONS)
                if event.block_id not in self.categories:
                    category = _category_by_birth(event)
                tags[event.block_id] = Tag(category, event.op)
            elif tags[event.block_id].category is Category.ACTIVATIONS and (
                (made.step, made.phase) == (event.step, event.phase)
            ):
                tags[event.block_id] = Tag(Category.TEMPORARY, made.op)
        return tags

    def breakdown_at_peak(self) -> dict[str, int]:
        """Return what was alive at the peak by category, largest first; the rest is `activations and
        temporary`.
        """
        peak_bytes, current_bytes = self.peak_bytes, 0
        alive: dict[int, int] = {}
        for event in self.events:
            current_bytes += signed_rounded(event.num_bytes)
            if event.num_bytes < 0:
                del alive[event.block_id]
                continue
            alive[event.block_id] = rounded_bytes(event.num_bytes)
            if current_bytes == peak_bytes:
                break
        sums: dict[str, int] = {}
        for block_id, num_bytes in alive.items():
            name = str(self.categories.get(block_id, "activations and temporary"))
            sums[name] = sums.get(name, 0) + num_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def signed_rounded(num_bytes: int) -> int:
    """Return an event's size rounded to blocks of 512 bytes, its sign kept."""
    return rounded_bytes(num_bytes) if num_bytes > 0 else -rounded_bytes(-num_bytes)


def _category_by_birth(event: StorageEvent) -> Category:
    if event.op.startswith("cublas"):
        return Category.WORKSPACES
    if event.phase == Phase.LOSS:
        return Category.LOGITS_AND_LOSS
    return Category.ACTIVATIONS
