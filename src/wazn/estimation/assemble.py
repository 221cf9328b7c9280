"""From a timeline to the answer: replayed on the card, summed up, judged."""

from __future__ import annotations

from wazn.cluster import Gpu
from wazn.estimation.answer import (
    Batch,
    Estimate,
    Fit,
    Holder,
    Host,
    Line,
    ModelFacts,
    OutsideLine,
    Peak,
    PhasePeak,
    Rehearsed,
    Resident,
    Verdict,
)
from wazn.estimation.options import Options, Resolved
from wazn.facts.overheads import cuda_context
from wazn.model.spec import ModelSpec
from wazn.timeline.events import Category, Phase, Timeline
from wazn.timeline.replay import Replay, replay

__all__ = ["assemble", "fit_of", "outside_of", "verdict_of"]

TIGHT_FRACTION = 0.04  # of the usable memory; until there is an error band from the evidence
_BASIS = {"simulate": "counted", "trace": "traced"}


def assemble(
    *,
    engine: str,
    model: ModelFacts,
    spec: ModelSpec | None,
    options: Options,
    resolved: Resolved,
    gpu: Gpu | None,
    timeline: Timeline,
    outside: tuple[OutsideLine, ...],
    rehearsed: Rehearsed | None = None,
) -> Estimate:
    """Return the answer that a timeline gives, without notes."""
    recipe, cluster = resolved.recipe, resolved.cluster
    need, fit = fit_of(gpu, timeline, outside)
    moment = need.peak
    samples = recipe.micro_batch * recipe.grad_accum * cluster.data_parallel
    return Estimate(
        engine=engine,
        model=model,
        recipe=recipe,
        cluster=cluster,
        peak=Peak(
            allocated_bytes=need.peak_allocated_bytes,
            reserved_bytes=need.peak_reserved_bytes,
            device_bytes=need.peak_reserved_bytes + sum(line.num_bytes for line in outside),
            phase="" if moment is None else moment.phase.value,
            step=0 if moment is None else moment.step,
        ),
        breakdown=tuple(
            Line(category=category.value, num_bytes=num_bytes, basis=_BASIS[engine])
            for category, num_bytes in need.by_category().items()
        ),
        holders=_holders(need),
        outside=outside,
        phases=tuple(
            PhasePeak(
                step=item.step,
                phase=item.phase.value,
                peak_allocated_bytes=item.peak_allocated_bytes,
            )
            for item in need.phases
        ),
        resident=_resident(timeline),
        fit=fit,
        host=Host(),
        batch=Batch(
            micro_batch=recipe.micro_batch,
            grad_accum=recipe.grad_accum,
            data_parallel=cluster.data_parallel,
            effective_batch=samples,
            tokens_per_step=samples * recipe.seq_len,
        ),
        notes=(),
        rehearsed=rehearsed,
        defaults=resolved.defaults,
        options=options,
        spec=spec,
        timeline=timeline,
    )


def _holders(need: Replay) -> tuple[Holder, ...]:
    held = sorted(need.alive.items(), key=lambda item: -item[1])
    return tuple(
        Holder(
            category=tag.category.value,
            op=tag.label,
            module=None if tag.origin is None else tag.origin.module,
            line=None if tag.origin is None else tag.origin.line,
            num_bytes=num_bytes,
        )
        for tag, num_bytes in held
    )


def outside_of(gpu: Gpu | None, managed_bytes: int) -> tuple[OutsideLine, ...]:
    """What the process holds on the device beside PyTorch's allocator."""
    lines = []
    context = None if gpu is None else cuda_context(gpu)
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


def fit_of(
    gpu: Gpu | None, timeline: Timeline, outside: tuple[OutsideLine, ...]
) -> tuple[Replay, Fit]:
    """Return the replay that tells the need, and the verdict."""
    if gpu is None:
        none = Fit(gpu=None, capacity_bytes=None, verdict=Verdict.NO_GPU_GIVEN, headroom_bytes=None)
        return replay(timeline), none
    limited, verdict = verdict_of(gpu, timeline, outside)
    failed = limited.out_of_memory
    need = limited if failed is None else replay(timeline)
    outside_bytes = sum(line.num_bytes for line in outside)
    return need, Fit(
        gpu=gpu.id,
        capacity_bytes=gpu.usable_bytes,
        verdict=verdict,
        headroom_bytes=gpu.usable_bytes - need.peak_reserved_bytes - outside_bytes,
        retries=need.num_alloc_retries,
        out_of_memory=failed,
    )


def verdict_of(
    gpu: Gpu, timeline: Timeline, outside: tuple[OutsideLine, ...]
) -> tuple[Replay, Verdict]:
    """Replay with the card's capacity; return that with the verdict.

    Managed memory gives way: the driver moves it to the host when PyTorch asks for more, so it does not limit the
    allocator. A run that needs the room is tight, not impossible.
    """
    fixed_bytes = sum(line.num_bytes for line in outside if line.category != "managed-memory")
    limited = replay(
        timeline,
        capacity_bytes=max(0, gpu.usable_bytes - fixed_bytes),
        device_total_bytes=gpu.usable_bytes,
    )
    outside_bytes = sum(line.num_bytes for line in outside)
    headroom_bytes = gpu.usable_bytes - limited.peak_reserved_bytes - outside_bytes
    if limited.out_of_memory is not None:
        return limited, Verdict.DOES_NOT_FIT
    if limited.num_alloc_retries or headroom_bytes < TIGHT_FRACTION * gpu.usable_bytes:
        return limited, Verdict.TIGHT
    return limited, Verdict.FITS


def _resident(timeline: Timeline) -> Resident:
    """Sum what is allocated less what is freed, by category, from loading to the end of the first optimizer step."""
    totals = dict.fromkeys(Category, 0)
    for part in timeline.parts:
        for segment in part.segments:
            if segment.step > 1 or segment.phase is Phase.ZERO_GRAD:
                continue
            for size, tag in zip(segment.sizes, segment.tags, strict=True):
                totals[tag.category] += size * part.times
    return Resident(
        weights_bytes=totals[Category.WEIGHTS],
        gradients_bytes=totals[Category.GRADIENTS],
        optimizer_bytes=totals[Category.OPTIMIZER_STATES],
        adapter_bytes=totals[Category.ADAPTER_WEIGHTS],
        quantization_state_bytes=totals[Category.QUANTIZATION_STATE],
    )
