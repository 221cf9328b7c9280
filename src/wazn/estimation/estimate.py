"""The estimate: a model and a recipe on a card, weighed.

    options -> Recipe -> (engine) -> Timeline -> replay -> Estimate

The replay runs with the card's capacity when one is named: the verdict is PyTorch's own, flush and retry included. What is
printed as the need is the replay without a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from wazn.cluster import Cluster, Gpu, limitations
from wazn.errors import InputError, Unsupported
from wazn.estimation.options import Options, refuse_unsupported, resolve
from wazn.facts.gpus import resolve_gpu
from wazn.facts.models import resolve_model, spec_of
from wazn.facts.notes import Note
from wazn.facts.overheads import blas_workspace, cuda_context
from wazn.facts.stacks import resolve_stack
from wazn.model.lora import adapted_linears
from wazn.model.parameters import count_parameters
from wazn.model.spec import ModelSpec
from wazn.recipe import Attention, Recipe
from wazn.simulate.step import Simulation, simulate
from wazn.timeline.events import Category, Phase, Timeline
from wazn.timeline.replay import OutOfMemory, Replay, replay

__all__ = [
    "Batch",
    "Estimate",
    "Fit",
    "Line",
    "ModelFacts",
    "OutsideLine",
    "Peak",
    "PhasePeak",
    "Resident",
    "Verdict",
    "estimate",
]

TIGHT_FRACTION = 0.04  # of the usable memory; until there is an error band from the evidence


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
    """The highest point: tensors (allocated), what the allocator took for them (reserved), all of the process (device)."""

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
class OutsideLine:
    """Memory outside PyTorch's allocator."""

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
    """What stays between steps, and the gradients of one step."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    adapter_bytes: int
    quantization_state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict. `headroom_bytes`: usable memory less the need; negative where it does not fit."""

    gpu: str | None
    capacity_bytes: int | None
    verdict: Verdict
    headroom_bytes: int | None
    out_of_memory: OutOfMemory | None = None


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
    """The answer. `defaults` says for each option that was not given who chose it: the stack or wazn."""

    engine: str
    model: ModelFacts
    recipe: Recipe
    cluster: Cluster
    peak: Peak
    breakdown: tuple[Line, ...]
    outside: tuple[OutsideLine, ...]
    phases: tuple[PhasePeak, ...]
    resident: Resident
    fit: Fit
    batch: Batch
    notes: tuple[Note, ...]
    defaults: Mapping[str, str]
    timeline: Timeline


_OPTION_NAMES = frozenset(field.name for field in fields(Options))


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    engine: str = "auto",
    **options: Any,
) -> Estimate:
    """Weigh a fine-tuning run.

    Args:
        model: a catalogue name, a Hugging Face id, a folder with config.json, or a config.json file.
        gpu: the card's name, such as `rtx-4090` or `80GB`; None for no card.
        engine: `auto` or `simulate`.
        options: the fields of `Options`, named as on the command line with `_` for `-`.

    Raises: InputError, UnknownFact, Unsupported.
    """
    unknown = sorted(set(options) - _OPTION_NAMES)
    if unknown:
        raise InputError(
            f"unknown option `{unknown[0]}`",
            hint="options: " + ", ".join(sorted(_OPTION_NAMES)),
        )
    if engine not in ("auto", "simulate"):
        raise Unsupported(f"engine `{engine}` is not there yet", hint="`simulate`")
    asked = Options(**options)
    source = resolve_model(model)
    spec = spec_of(source)
    habits = resolve_stack(asked.stack or "hf", family=spec.family)
    resolved = resolve(asked, habits)
    recipe = resolved.recipe
    refuse_unsupported(recipe)
    choice = None if gpu is None else resolve_gpu(gpu)
    card = None if choice is None else choice.gpu
    targets = _targets(spec, recipe)
    simulation = simulate(
        spec,
        recipe,
        habits,
        targets,
        workspace_bytes=blas_workspace(card).num_bytes,
    )
    return _answer(
        spec,
        recipe,
        card,
        simulation,
        notes=(
            *source.notes,
            *(() if choice is None else choice.notes),
            *_notes(spec, recipe, card),
        ),
        defaults=resolved.defaults,
    )


def _targets(spec: ModelSpec, recipe: Recipe) -> frozenset[str]:
    if recipe.adapter is None:
        return frozenset()
    return adapted_linears(spec, recipe.adapter.targets, rank=recipe.adapter.rank)


def _answer(
    spec: ModelSpec,
    recipe: Recipe,
    card: Gpu | None,
    simulation: Simulation,
    *,
    notes: tuple[Note, ...],
    defaults: Mapping[str, str],
) -> Estimate:
    timeline = simulation.timeline
    free = replay(timeline)
    outside = _outside(card, simulation.managed_bytes)
    outside_bytes = sum(line.num_bytes for line in outside)
    device_bytes = free.peak_reserved_bytes + outside_bytes
    moment = free.peak
    resident = _resident(timeline)
    return Estimate(
        engine="simulate",
        model=ModelFacts(
            id=spec.id,
            family=spec.family,
            num_parameters=count_parameters(spec),
            num_trainable_parameters=simulation.num_trainable_parameters,
        ),
        recipe=recipe,
        cluster=Cluster(gpu=card),
        peak=Peak(
            allocated_bytes=free.peak_allocated_bytes,
            reserved_bytes=free.peak_reserved_bytes,
            device_bytes=device_bytes,
            phase="" if moment is None else moment.phase.value,
            step=0 if moment is None else moment.step,
        ),
        breakdown=tuple(
            Line(category=category.value, num_bytes=num_bytes, basis="counted")
            for category, num_bytes in free.by_category().items()
        ),
        outside=outside,
        phases=tuple(
            PhasePeak(
                step=item.step,
                phase=item.phase.value,
                peak_allocated_bytes=item.peak_allocated_bytes,
            )
            for item in free.phases
        ),
        resident=resident,
        fit=_fit(card, timeline, free, outside_bytes),
        batch=Batch(
            micro_batch=recipe.micro_batch,
            grad_accum=recipe.grad_accum,
            data_parallel=1,
            effective_batch=recipe.micro_batch * recipe.grad_accum,
            tokens_per_step=recipe.micro_batch * recipe.grad_accum * recipe.seq_len,
        ),
        notes=notes,
        defaults=defaults,
        timeline=timeline,
    )


def _outside(card: Gpu | None, managed_bytes: int) -> tuple[OutsideLine, ...]:
    lines = []
    context = None if card is None else cuda_context(card)
    if context is not None:
        lines.append(
            OutsideLine(
                category="context",
                num_bytes=context.num_bytes,
                basis=context.basis,
                source=context.source,
            )
        )
    if managed_bytes:
        lines.append(
            OutsideLine(
                category="managed-memory",
                num_bytes=managed_bytes,
                basis="counted",
                source="paged optimizer states: cudaMallocManaged (bitsandbytes, functional.py, get_paged)",
            )
        )
    return tuple(lines)


def _fit(card: Gpu | None, timeline: Timeline, free: Replay, outside_bytes: int) -> Fit:
    if card is None:
        return Fit(gpu=None, capacity_bytes=None, verdict=Verdict.NO_GPU_GIVEN, headroom_bytes=None)
    capacity = max(0, card.usable_bytes - outside_bytes)
    limited = free
    if free.peak_reserved_bytes > capacity:
        limited = replay(timeline, capacity_bytes=capacity, device_total_bytes=card.usable_bytes)
    failed = limited.out_of_memory
    need = free if failed is not None else limited
    headroom = card.usable_bytes - need.peak_reserved_bytes - outside_bytes
    if failed is not None:
        verdict = Verdict.DOES_NOT_FIT
        headroom = min(headroom, -1)
    elif headroom < TIGHT_FRACTION * card.usable_bytes:
        verdict = Verdict.TIGHT
    else:
        verdict = Verdict.FITS
    return Fit(
        gpu=card.id,
        capacity_bytes=card.usable_bytes,
        verdict=verdict,
        headroom_bytes=headroom,
        out_of_memory=failed,
    )


_RESIDENT = {
    Category.WEIGHTS: Phase.LOAD,
    Category.ADAPTER_WEIGHTS: Phase.LOAD,
    Category.QUANTIZATION_STATE: Phase.LOAD,
    Category.GRADIENTS: Phase.BACKWARD,
    Category.OPTIMIZER_STATES: Phase.OPTIMIZER,
}


def _resident(timeline: Timeline) -> Resident:
    """Sum what each kind of resident memory allocates, less what it frees, while the first step makes it."""
    totals = dict.fromkeys(_RESIDENT, 0)
    for part in timeline.parts:
        for segment in part.segments:
            if segment.step > 1:
                continue
            for size, tag in zip(segment.sizes, segment.tags, strict=True):
                if _RESIDENT.get(tag.category) is segment.phase:
                    totals[tag.category] += size * part.times
    return Resident(
        weights_bytes=totals[Category.WEIGHTS],
        gradients_bytes=totals[Category.GRADIENTS],
        optimizer_bytes=totals[Category.OPTIMIZER_STATES],
        adapter_bytes=totals[Category.ADAPTER_WEIGHTS],
        quantization_state_bytes=totals[Category.QUANTIZATION_STATE],
    )


def _notes(spec: ModelSpec, recipe: Recipe, card: Gpu | None) -> tuple[Note, ...]:
    notes: list[Note] = []
    if spec.max_positions is not None and recipe.seq_len > spec.max_positions:
        notes.append(
            Note(
                code="beyond-positions",
                params={"seq_len": recipe.seq_len, "max_positions": spec.max_positions},
            )
        )
    if card is not None:
        precision = recipe.precision
        names = {precision.weight_dtype.name}
        if precision.autocast_dtype is not None:
            names.add(precision.autocast_dtype.name)
        flash = recipe.attention in (Attention.FLASH, Attention.SDPA_FLASH)
        for item in limitations(card, bf16="bfloat16" in names, flash=flash):
            notes.append(
                Note(
                    code=item.code,
                    params={
                        "gpu": item.gpu,
                        "capability": item.compute_capability,
                        "instead": item.instead,
                    },
                )
            )
    return tuple(notes)
