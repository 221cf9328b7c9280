"""The answer as frozen nouns: what was weighed, its peak, what holds it, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wazn.cluster import Cluster
from wazn.estimation.options import Options
from wazn.facts.notes import Note
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe
from wazn.timeline.events import Timeline
from wazn.timeline.replay import OutOfMemory

__all__ = [
    "Batch",
    "Estimate",
    "Fit",
    "Holder",
    "Host",
    "Line",
    "ModelFacts",
    "OutsideLine",
    "Peak",
    "PhasePeak",
    "Rehearsed",
    "Resident",
    "Verdict",
]


class Verdict(StrEnum):
    """Whether the run fits the card."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does-not-fit"
    NO_GPU_GIVEN = "no-gpu-given"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What was weighed."""

    id: str
    family: str
    num_parameters: int
    num_trainable_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The highest point: tensors (allocated), what the allocator took for them (reserved), all of it (device)."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    phase: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One component of the peak; the lines sum to the allocated peak. `basis`: counted, traced, measured or assumed."""

    category: str
    num_bytes: int
    basis: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """What holds a part of the peak; all of them sum to the allocated peak.

    op: the operation that allocated it; of a counted run what it is, such as `mlp.down_proj: output`.
    module: its path in the model, such as `model.layers.17.mlp`, empty outside of it; line: of the code that asked for
        it, such as `transformers/loss/loss_utils.py:42`. A counted run knows neither: None.
    """

    category: str
    op: str
    module: str | None
    line: str | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """How a run was rehearsed.

    loop: whose training loop ran; script: what else was said about the training script, by name.
    libraries: their versions; tensors: on what kind of fake tensors.
    micro_batches: how many of an optimizer step were run; the rest do the same in the same memory.
    """

    loop: str
    script: Mapping[str, Any]
    libraries: Mapping[str, str]
    tensors: str
    micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideLine:
    """Memory outside PyTorch's allocator; with the reserved peak, the lines sum to the device's."""

    category: str
    num_bytes: int
    basis: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """The highest allocated level within one phase of one step."""

    step: int
    phase: str
    peak_allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """What stays between steps, and the gradients of one step, as requested (before the allocator rounds)."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    adapter_bytes: int
    quantization_state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict.

    headroom_bytes: usable memory less what the device holds at the peak. Negative where it does not fit, and where
        managed memory has to move to the host to make it fit.
    retries: how often PyTorch had to give its unused segments back to the device to go on.
    out_of_memory: where PyTorch stops on this card, if it does.
    """

    gpu: str | None
    capacity_bytes: int | None
    verdict: Verdict
    headroom_bytes: int | None
    retries: int = 0
    out_of_memory: OutOfMemory | None = field(default=None, repr=False)  # lists all that is alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What the machine around the GPU needs; None where it is not known."""

    ram_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples and tokens of one optimizer step."""

    micro_batch: int
    grad_accum: int
    data_parallel: int
    effective_batch: int
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The answer.

    defaults: for each option that was not given, who chose it: `stack` or `wazn`.
    rehearsed: how, where the real library code was run.
    options, spec: the question, so that it can be asked again with one thing changed; the spec is None for an
        architecture that only the rehearsal knows.
    timeline: every allocation of the run, in order. These three are not printed.
    """

    engine: str
    model: ModelFacts
    recipe: Recipe
    cluster: Cluster
    peak: Peak
    breakdown: tuple[Line, ...]
    holders: tuple[Holder, ...] = field(repr=False)
    outside: tuple[OutsideLine, ...]
    phases: tuple[PhasePeak, ...]
    resident: Resident
    fit: Fit
    host: Host
    batch: Batch
    notes: tuple[Note, ...]
    rehearsed: Rehearsed | None
    defaults: Mapping[str, str]
    options: Options = field(repr=False)
    spec: ModelSpec | None = field(repr=False)
    timeline: Timeline = field(repr=False)
