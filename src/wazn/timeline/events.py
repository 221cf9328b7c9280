"""The currency: a timeline of allocations. Knows no model and no torch.

A timeline is a list of parts; a part is a short list of segments that happens `times` times in a row. A model of 126
equal layers is then a few hundred events and a multiplication, which is why a peak takes milliseconds; whoever needs
every event (the allocator's replay) asks for them one by one with `Timeline.events()`.

Block identities are integers with three fields, so that a repetition is an addition:

    pass (any number of bits) | layer + 1 (20 bits; 0 = outside the layers) | slot (20 bits)

The `slot` counts the allocations of one pass in one layer. Repetition `t` of a part adds `t * shift` to every identity
in it, where `shift` is a whole number of layers: +LAYER in a pass that walks up the layers, -LAYER in one that walks
down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "LAYER",
    "PASS",
    "Category",
    "Event",
    "Origin",
    "Part",
    "Phase",
    "Segment",
    "Tag",
    "Timeline",
]

LAYER = 1 << 20
PASS = 1 << 40


class Category(StrEnum):
    """What a block of memory is for."""

    WEIGHTS = "weights"
    QUANTIZATION_STATE = "quantization-state"
    ADAPTER_WEIGHTS = "adapter-weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer-states"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits-and-loss"
    TEMPORARY = "temporary"
    COMMUNICATION = "communication"
    WORKSPACES = "workspaces"
    INPUTS = "inputs"


class Phase(StrEnum):
    """The part of a run in which something happens."""

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "gradient-clipping"
    OPTIMIZER = "optimizer-step"
    ZERO_GRAD = "zero-grad"


class Origin(NamedTuple):
    """Where a block was made: a module's path, such as `model.layers.17.mlp`, and a line of code."""

    module: str
    line: str


class Tag(NamedTuple):
    """What a block is, for attribution: its category and a label such as `mlp.down_proj: output`.

    Of real code the label is the operation, and `origin` says where it stands.
    """

    category: Category
    label: str
    origin: Origin | None = None


class Event(NamedTuple):
    """One allocation (`num_bytes` > 0) or one free (`num_bytes` < 0, the same size) of the block `block_id`."""

    block_id: int
    num_bytes: int
    tag: Tag
    phase: Phase
    step: int
    layer: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What one phase of one step does, outside the layers or in one of them: three columns of equal length.

    `sizes` are requested bytes before the allocator rounds: positive allocates, negative frees. A free carries the size
    and the tag of its allocation.
    """

    phase: Phase
    step: int
    layer: int | None
    block_ids: list[int]
    sizes: list[int]
    tags: list[Tag]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Segments that happen one after another, `times` times; repetition t adds `t * shift` to every block identity."""

    segments: tuple[Segment, ...]
    times: int = 1
    shift: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A run's allocations in order."""

    parts: tuple[Part, ...]

    def events(self) -> Iterator[Event]:
        """Yield every event, repetitions written out."""
        for part in self.parts:
            layers_per_repetition = part.shift // LAYER
            for repetition in range(part.times):
                shift = repetition * part.shift
                for segment in part.segments:
                    layer = segment.layer
                    if layer is not None:
                        layer += repetition * layers_per_repetition
                    for block_id, num_bytes, tag in zip(
                        segment.block_ids, segment.sizes, segment.tags, strict=True
                    ):
                        yield Event(
                            block_id + shift, num_bytes, tag, segment.phase, segment.step, layer
                        )

    @property
    def num_events(self) -> int:
        """Allocations and frees, repetitions counted."""
        return sum(
            part.times * sum(len(segment.sizes) for segment in part.segments) for part in self.parts
        )
