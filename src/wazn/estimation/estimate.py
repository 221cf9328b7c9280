"""The estimate: a model and a recipe on a card, weighed.

    options -> Recipe -> (engine) -> Timeline -> replay -> Estimate

The replay runs with the card's capacity when one is named: the verdict is PyTorch's own, flush and retry included.
Where the run does not fit, what is told as the need is the replay without a limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from wazn.cluster import Gpu
from wazn.dtypes import FLOAT32
from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.estimation.answer import (
    Batch,
    Estimate,
    Fit,
    Host,
    Line,
    ModelFacts,
    OutsideLine,
    Peak,
    PhasePeak,
    Resident,
    Verdict,
)
from wazn.estimation.notes import notes_on
from wazn.estimation.options import OPTION_NAMES, Options, Resolved, refuse_unsupported, resolve
from wazn.estimation.targets import adapted_names
from wazn.facts.gpus import resolve_gpu
from wazn.facts.models import resolve_model, spec_of
from wazn.facts.names import nearest_names
from wazn.facts.notes import Note
from wazn.facts.overheads import blas_workspace, cuda_context
from wazn.facts.stacks import Habits, resolve_stack
from wazn.model.parameters import count_parameters
from wazn.model.spec import AttentionSpec, ModelSpec
from wazn.recipe import Attention, Recipe
from wazn.simulate.rotary import ROTARY
from wazn.simulate.step import Simulation, simulate
from wazn.timeline.events import Category, Phase, Timeline
from wazn.timeline.replay import Replay, replay

__all__ = ["ENGINES", "Run", "estimate", "fit_of", "run_through", "verdict_of", "weigh"]

ENGINES = ("auto", "simulate", "trace")
TIGHT_FRACTION = 0.04  # of the usable memory; until there is an error band from the evidence
# From the third micro-batch of an optimizer step on, all do the same in the same memory: more of them change no figure.
MICRO_BATCHES_RUN = 3
LARGEST_TENSOR_BYTES = 10**14  # no machine has it, and the sums beyond are nobody's question
_FLOAT32_BYTES = 4
_WITHOUT_FLASH = (
    "bloom",
    "mpt",
)  # no `_supports_flash_attn` in their modeling files, transformers 5.24


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
        options: the fields of `Options`, named as on the command line with `_` for `-`; where the command line
            takes names with commas between them, a list works as well.

    Raises: InputError, UnknownFact, Unsupported.

    >>> estimate("llama-3.1-8b", method="qlora", gpu="rtx-4090").fit.verdict
    <Verdict.FITS: 'fits'>
    """
    for name, value in (("model", model), ("gpu", "" if gpu is None else gpu)):
        if not isinstance(value, str):
            raise InputError(f"`{name}`: expected a name, found `{str(value)[:40]}`")
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        nearest = nearest_names(unknown[0], OPTION_NAMES, at_most=3)
        raise UnknownFact(
            f"unknown option `{unknown[0][:40]}`",
            nearest=nearest,
            hint=None if nearest else "options: " + ", ".join(OPTION_NAMES),
        )
    asked = Options(**{name: _joined(value) for name, value in options.items()})
    _refuse_engine(engine)
    choice = None if gpu is None else resolve_gpu(gpu)
    source = resolve_model(model)
    return weigh(
        spec_of(source),
        asked,
        gpu=None if choice is None else choice.gpu,
        notes=(*source.notes, *(() if choice is None else choice.notes)),
    )


def _joined(value: Any) -> Any:
    """Write a list of names as the command line does."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return value


def _refuse_engine(engine: object) -> None:
    if engine == "trace":
        raise Unsupported(
            "the rehearsal with the real library code is not reachable from here yet",
            hint="`--engine simulate` answers without torch",
        )
    if engine not in ENGINES:
        raise InputError(
            f"`--engine`: unknown name `{str(engine)[:40]}`",
            hint="one of " + ", ".join(f"`{name}`" for name in ENGINES),
        )


def weigh(
    spec: ModelSpec, options: Options, *, gpu: Gpu | None = None, notes: tuple[Note, ...] = ()
) -> Estimate:
    """Weigh a run of a model that was read already; `notes` are those of the look-ups."""
    run = run_through(spec, options, gpu)
    recipe, cluster, outside = run.resolved.recipe, run.resolved.cluster, run.outside
    timeline = run.simulation.timeline
    need, fit = fit_of(gpu, timeline, outside)
    moment = need.peak
    return Estimate(
        engine="simulate",
        model=ModelFacts(
            id=spec.id,
            family=spec.family,
            num_parameters=count_parameters(spec),
            num_trainable_parameters=run.simulation.num_trainable_parameters,
        ),
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
            Line(category=category.value, num_bytes=num_bytes, basis="counted")
            for category, num_bytes in need.by_category().items()
        ),
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
            effective_batch=recipe.micro_batch * recipe.grad_accum * cluster.data_parallel,
            tokens_per_step=recipe.micro_batch
            * recipe.grad_accum
            * cluster.data_parallel
            * recipe.seq_len,
        ),
        notes=(
            *notes,
            *notes_on(spec, recipe, run.habits, gpu, fit, outside, run.unmatched_targets),
        ),
        defaults=run.resolved.defaults,
        options=options,
        spec=spec,
        timeline=timeline,
    )


def _capability(gpu: Gpu | None) -> tuple[int, int]:
    """The compute capability by which kernels are chosen; an A100's where no NVIDIA card is named."""
    return (gpu.cuda_capability if gpu is not None else None) or (8, 0)


class Run(NamedTuple):
    """A run that was simulated and not yet replayed."""

    habits: Habits
    resolved: Resolved
    simulation: Simulation
    outside: tuple[OutsideLine, ...]
    unmatched_targets: tuple[str, ...]


def run_through(spec: ModelSpec, options: Options, gpu: Gpu | None) -> Run:
    """Resolve the options and run the training step on the tape. Raises: InputError, UnknownFact, Unsupported."""
    habits = resolve_stack("hf" if options.stack is None else options.stack, family=spec.family)
    resolved = resolve(options, habits, gpu)
    recipe = resolved.recipe
    refuse_unsupported(recipe, resolved.cluster)
    _refuse_absurd(spec, recipe)
    _refuse_what_the_class_has_not(spec, recipe)
    targets = adapted_names(spec, recipe)
    simulation = simulate(
        spec,
        replace(recipe, grad_accum=min(recipe.grad_accum, MICRO_BATCHES_RUN)),
        habits,
        targets.names,
        capability=_capability(gpu),
        workspace_bytes=blas_workspace(gpu).num_bytes,
        num_fetched=recipe.grad_accum,
    )
    return Run(
        habits=habits,
        resolved=resolved,
        simulation=simulation,
        outside=_outside(gpu, simulation.managed_bytes),
        unmatched_targets=targets.unmatched,
    )


def _refuse_absurd(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises: InputError where a single tensor would have more than 100 TB."""
    tokens = recipe.micro_batch * recipe.seq_len
    scores = 0
    if recipe.attention is Attention.EAGER:
        scores = recipe.seq_len * tokens
    fetched = 2 * recipe.grad_accum * tokens  # ids of 8 bytes
    largest = max(tokens * spec.head.out_features, scores, fetched) * _FLOAT32_BYTES
    if largest > LARGEST_TENSOR_BYTES:
        raise InputError(
            f"{recipe.micro_batch:,} x {recipe.seq_len:,} tokens, {recipe.grad_accum:,} times, make a "
            f"tensor of {largest // 10**12:,} TB",
            hint="lower `--micro-batch`, `--seq-len` or `--grad-accum`",
        )


def _refuse_what_the_class_has_not(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises: InputError where the class or the flash package refuses; Unsupported where its code was not read."""
    if recipe.attention is Attention.FLASH and spec.family in _WITHOUT_FLASH:
        raise InputError(
            f"`--attention flash`: `{spec.family}` has none in transformers",
            hint="`--attention eager`",
        )
    computed = recipe.precision.autocast_dtype or recipe.precision.weight_dtype
    if recipe.attention is Attention.FLASH and computed is FLOAT32:
        # "FlashAttention only support fp16 and bf16 data type" (flash-attn, csrc/flash_attn/flash_api.cpp)
        raise InputError(
            "`--attention flash`: the flash-attn package takes fp16 and bf16 only, found fp32",
            hint="`--precision bf16-mixed`, or `--attention sdpa`",
        )
    for layer in {id(layer): layer for layer in spec.layers}.values():
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.rotary_code not in ROTARY:
            raise Unsupported(
                f"the rotary embedding of `{spec.family}` is counted, and not run yet",
                hint="a model of another family with about the same sizes gives a near figure",
            )


def _outside(gpu: Gpu | None, managed_bytes: int) -> tuple[OutsideLine, ...]:
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
