"""What a rehearsal saw: its events, peaks by phase, and the timeline, in which each block knows what it is."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

from wazn.timeline.events import Category, Origin, Part, Phase, Segment, Tag, Timeline
from wazn.trace.places import NOWHERE, Place
from wazn.trace.tracker import StorageEvent, rounded_bytes

__all__ = ["LOSS", "Rehearsal", "signed_rounded"]

LOSS = "loss"  # the place of the loss function, which is no module of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What happened: every allocation and free in order, and what the blocks are that somebody named.

    names: by block, its category and the module it belongs to.
    head: the path of the module that makes the logits, if there is one.
    calls: the first event of each outermost call of a module, and the first after it.
    managed_bytes: what the optimizer keeps in managed memory, outside PyTorch's allocator.
    tensors: on what kind of fake tensors it ran.
    assumes_kernels: whether packages of kernels counted as installed: see `fast_kernels`.
    Peaks are bytes as PyTorch counts them allocated, each block rounded to 512.
    """

    events: tuple[StorageEvent, ...]
    names: dict[int, tuple[Category, str]] = field(default_factory=dict)
    head: str | None = None
    calls: tuple[tuple[int, int], ...] = ()
    num_parameters: int = 0
    num_trainable_parameters: int = 0
    managed_bytes: int = 0
    tensors: str = "cpu"
    assumes_kernels: bool = False

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

        A block without a name of its own is a workspace of cuBLAS; of the logits and the loss when the head, the loss
        function or what is around them made it, in forward or in backward; a temporary when it dies in the pass (or in
        the recomputation of a checkpoint) that made it; and an activation otherwise.
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
        deaths = {e.block_id: index for index, e in enumerate(self.events) if e.num_bytes < 0}
        tags: dict[int, Tag] = {}
        for index, event in enumerate(self.events):
            if event.num_bytes < 0:
                continue
            module, line = event.place
            category, owner = self.names.get(event.block_id, (None, ""))
            if category is None:
                category = self._category(index, deaths.get(event.block_id))
            tags[event.block_id] = make(category, event.op, owner or module, line)
        return tags

    def _category(self, birth: int, death: int | None) -> Category:
        born = self.events[birth]
        if born.op.startswith("cublas"):
            return Category.WORKSPACES
        if born.phase in _PASSES and self._is_of_end(born.place):
            return Category.LOGITS_AND_LOSS
        if death is None:
            return Category.ACTIVATIONS
        died = self.events[death]
        if (born.step, _pass_of(born)) != (died.step, _pass_of(died)):
            return Category.ACTIVATIONS
        end = self._end_of_recomputation(birth) if born.phase == Phase.BACKWARD else None
        return Category.TEMPORARY if end is None or death < end else Category.ACTIVATIONS

    def _is_of_end(self, place: Place) -> bool:
        """Say whether it is of what comes after the decoder: the head, the code around it, the loss, the loop."""
        if place is NOWHERE or self.head is None:
            return place.module == LOSS
        return place.module in ("", LOSS) or (place.module + ".").startswith(self.head + ".")

    def _end_of_recomputation(self, birth: int) -> int | None:
        """Return the event at which what runs again in backward and has made this block is over, if one has.

        What it still held when it was broken off dies right after it.
        """
        index = bisect_right(self.calls, (birth, len(self.events))) - 1
        if index < 0 or self.calls[index][1] <= birth:
            return None
        end = self.calls[index][1]
        while end < len(self.events) and self.events[end].num_bytes < 0:
            end += 1
        return end


# forward and the loss are one pass; every other phase is one for itself
_PASSES = {
    str(Phase.FORWARD): "forward",
    str(Phase.LOSS): "forward",
    str(Phase.BACKWARD): "backward",
}


def _pass_of(event: StorageEvent) -> str:
    return _PASSES.get(event.phase, event.phase)


def _tag(category: Category, op: str, module: str, line: str) -> Tag:
    return Tag(category, op, Origin(module, line))


def signed_rounded(num_bytes: int) -> int:
    """Return an event's size rounded to blocks of 512 bytes, its sign kept."""
    return rounded_bytes(num_bytes) if num_bytes > 0 else -rounded_bytes(-num_bytes)
