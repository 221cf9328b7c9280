"""What a rehearsal saw: its events, peaks by phase, and the timeline, in which each block knows what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from wazn.timeline.events import Category, Origin, Part, Phase, Segment, Tag, Timeline
from wazn.trace.tracker import StorageEvent, rounded_bytes

__all__ = ["LOSS", "Rehearsal", "signed_rounded"]

LOSS = "loss"  # the place of the loss function, which is no module of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What happened: every allocation and free in order, and what the blocks are that somebody named.

    names: by block, its category and the module it belongs to.
    head: the path of the module that makes the logits, if there is one.
    managed_bytes: what the optimizer keeps in managed memory, outside PyTorch's allocator.
    tensors: on what kind of fake tensors it ran.
    Peaks are bytes as PyTorch counts them allocated, each block rounded to 512.
    """

    events: tuple[StorageEvent, ...]
    names: dict[int, tuple[Category, str]] = field(default_factory=dict)
    head: str | None = None
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    managed_bytes: int = 0
    tensors: str = "cpu"

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

        A block without a name of its own is a workspace of cuBLAS; of the logits and the loss when the head or the
        loss function made it; a temporary when it dies in the phase that made it; and an activation otherwise.
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
        make = cache(_tag)
        died: dict[int, StorageEvent] = {
            event.block_id: event for event in self.events if event.num_bytes < 0
        }
        tags: dict[int, Tag] = {}
        for event in self.events:
            if event.num_bytes < 0:
                continue
            module, line = event.place
            category, owner = self.names.get(event.block_id, (None, ""))
            if category is None:
                category = self._category(event, died.get(event.block_id))
            tags[event.block_id] = make(category, event.op, owner or module, line)
        return tags

    def _category(self, born: StorageEvent, died: StorageEvent | None) -> Category:
        if born.op.startswith("cublas"):
            return Category.WORKSPACES
        if born.phase == Phase.LOSS or born.place.module == LOSS:
            return Category.LOGITS_AND_LOSS
        if self._is_of_head(born.place.module) and born.phase == Phase.FORWARD:
            return Category.LOGITS_AND_LOSS
        if died is not None and (died.step, died.phase) == (born.step, born.phase):
            return Category.TEMPORARY
        return Category.ACTIVATIONS

    def _is_of_head(self, module: str) -> bool:
        return self.head is not None and (module + ".").startswith(self.head + ".")


def _tag(category: Category, op: str, module: str, line: str) -> Tag:
    return Tag(category, op, Origin(module, line))


def signed_rounded(num_bytes: int) -> int:
    """Return an event's size rounded to blocks of 512 bytes, its sign kept."""
    return rounded_bytes(num_bytes) if num_bytes > 0 else -rounded_bytes(-num_bytes)
