"""What would help: the same run with one thing changed, weighed again.

Which changes are tried follows from what holds the peak; what they save is not guessed but weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wazn.errors import WaznError
from wazn.estimation.answer import Estimate, Verdict
from wazn.estimation.estimate import run_through, verdict_of
from wazn.recipe import Attention, Checkpointing, KbitPreparation, Method, Optimizer
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Category

__all__ = ["Change", "changes"]

MOST_TRIED = 3
_LEAST_SAVING = 50  # a change that saves less than a fiftieth of the need is not worth a line


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change. options: as on the command line, `_` for `-`; None takes one away.

    saved_bytes: how much lower the allocated peak is.
    verdict: whether the changed run fits; asked only where the run as it is does not.
    """

    options: Mapping[str, Any]
    saved_bytes: int
    verdict: Verdict | None


def changes(answer: Estimate) -> tuple[Change, ...]:
    """Return the most effective changes of a run, the one that saves most first."""
    ranked = sorted(_candidates(answer), key=lambda item: -item[0])
    tried = (_tried(answer, options) for _, options in ranked[:MOST_TRIED])
    found = (change for change in tried if change is not None)
    return tuple(sorted(found, key=lambda change: -change.saved_bytes))


def _tried(answer: Estimate, options: dict[str, Any]) -> Change | None:
    """Weigh the changed run; None where it cannot be weighed or saves next to nothing."""
    gpu = answer.cluster.gpu
    try:
        run = run_through(answer.spec, replace(answer.options, **options), gpu)
    except WaznError:
        return None
    highest_bytes = peak(run.simulation.timeline).peak_bytes
    saved_bytes = answer.peak.allocated_bytes - highest_bytes
    if saved_bytes * _LEAST_SAVING < answer.peak.allocated_bytes:
        return None
    verdict = None
    if answer.fit.verdict is Verdict.DOES_NOT_FIT and gpu is not None:
        if highest_bytes > gpu.usable_bytes:
            verdict = Verdict.DOES_NOT_FIT  # no allocator can help
        else:
            _, verdict = verdict_of(gpu, run.simulation.timeline, run.outside)
    return Change(options=options, saved_bytes=saved_bytes, verdict=verdict)


def _candidates(answer: Estimate) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what each change could save at most, roughly, with its options: only to choose which to weigh."""
    recipe = answer.recipe
    held = {line.category: line.num_bytes for line in answer.breakdown}
    managed = sum(line.num_bytes for line in answer.outside if line.category == "managed-memory")
    weights = held.get(Category.WEIGHTS, 0)
    trained = sum(
        held.get(category, 0)
        for category in (Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.TEMPORARY)
    )
    moving = sum(
        held.get(category, 0)
        for category in (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS, Category.TEMPORARY)
    )
    activations = held.get(Category.ACTIVATIONS, 0) + held.get(Category.TEMPORARY, 0)
    if recipe.method in (Method.FULL, Method.FREEZE):
        lora: dict[str, Any] = {"method": "lora"}
        if recipe.method is Method.FREEZE:
            lora |= {"trainable": None, "freeze": None}
        yield trained + managed, lora
        if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
            states = held.get(Category.OPTIMIZER_STATES, 0)
            yield states * 3 // 4 + held.get(Category.TEMPORARY, 0), {"optimizer": "adamw-8bit"}
    if recipe.method is Method.LORA:
        yield weights * 2 // 3, {"method": "qlora"}
    prepared = (
        KbitPreparation.NONE
        if recipe.quantization is None
        else recipe.quantization.kbit_preparation
    )
    if prepared is not KbitPreparation.NONE:
        yield weights // 3, {"kbit_preparation": "none"}
    if recipe.precision.weight_dtype.itemsize == 4:
        yield (weights + trained) // 2, {"precision": "bf16-autocast"}
    if recipe.checkpointing is Checkpointing.NONE:
        yield activations, {"checkpointing": "full"}
    if recipe.attention is Attention.EAGER:
        yield activations // 2, {"attention": "sdpa"}
    if recipe.micro_batch > 1:
        smaller = _largest_divisor(recipe.micro_batch)
        times = recipe.micro_batch // smaller
        yield (
            moving - moving // times,
            {"micro_batch": smaller, "grad_accum": recipe.grad_accum * times},
        )
    elif recipe.seq_len > 1:
        yield moving // 2, {"seq_len": recipe.seq_len // 2}


def _largest_divisor(number: int) -> int:
    """Return the largest divisor below the number itself: the batch of a step stays the same."""
    return next(divisor for divisor in range(number // 2, 0, -1) if number % divisor == 0)
