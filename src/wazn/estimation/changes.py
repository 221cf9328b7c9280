"""What would help: the same run with one thing changed, weighed again.

Which changes are tried follows from what holds the peak; what they save is not guessed but weighed. Where no single
one makes the run fit, the best are chained: the one that saves most, then the one that saves most of what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wazn.cluster import Gpu
from wazn.dtypes import BFLOAT16
from wazn.errors import WaznError
from wazn.estimation.answer import Estimate, OutsideLine, Rehearsed, Verdict
from wazn.estimation.assemble import verdict_of
from wazn.estimation.estimate import Run, run_through, weigh
from wazn.estimation.notes import groups_heads
from wazn.facts.stacks import resolve_stack, stack_versions
from wazn.model.spec import ModelSpec, MoeSpec
from wazn.recipe import (
    Attention,
    Checkpointing,
    KbitPreparation,
    Method,
    Optimizer,
    QuantizationFormat,
    Recipe,
)
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Category

__all__ = ["Change", "changes"]

MOST_TRIED = 3
MOST_CHAINED = 3  # options that change together
_LONGEST_SEARCH = (
    5  # links that are tried for them: a sequence may be shortened again after another change
)
_GO_ALONG = {"grad_accum", "stack"}  # with a smaller micro-batch, with quantised experts
_MOST_TRIED_IN_CHAIN = 2  # of what is left: every one costs some 10 ms
SHORTEST_SEQ_LEN = 256  # nobody is told to train on less
MOST_EVENTS_REPLAYED = 500_000  # a replay of more takes longer than the answer may
_LEAST_SAVING = 50  # a change that saves less than a fiftieth of the need is not worth a line
_OF_QUANTIZATION = ("quantization", "double_quant", "kbit_preparation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change, or several together. options: as on the command line, `_` for `-`; None takes one away.

    saved_bytes: how much lower the allocated peak is.
    verdict: whether the changed run fits. None where the run as it is fits already, and where only a long replay could
        tell: hundreds of experts, each a module of its own, make millions of events.
    """

    options: Mapping[str, Any]
    saved_bytes: int
    verdict: Verdict | None


class _Weighed(NamedTuple):
    """What a run holds at its peak: enough to choose what to change next."""

    spec: ModelSpec
    recipe: Recipe
    held: Mapping[str, int]
    managed_bytes: int
    allocated_bytes: int
    gpu: Gpu | None

    @property
    def excess_bytes(self) -> int:
        """What is too much on the card, a tenth of it left for all that is not a tensor; 0 where all fits."""
        if self.gpu is None:
            return 0
        return max(0, self.allocated_bytes - self.gpu.usable_bytes * 9 // 10)


class _Tried(NamedTuple):
    """A changed run, without its verdict: to know the peak is cheap, a replay is not."""

    options: dict[str, Any]
    run: Run
    allocated_bytes: int


def changes(answer: Estimate) -> tuple[Change, ...]:
    """Return the most effective changes of a run, the one that saves most first.

    Where the run does not fit, and no change alone makes it fit, one that chains two or three comes with them.
    A rehearsed run is counted for this, where it can be: Trainer's loop around a known architecture; else there are
    none.
    """
    spec, rehearsed = answer.spec, answer.rehearsed
    if spec is None or (rehearsed is not None and not _is_counted(rehearsed)):
        return ()
    if answer.engine != "simulate":
        try:
            answer = weigh(spec, answer.options, gpu=answer.cluster.gpu)
        except WaznError:
            return ()
        return changes(answer)
    weighed = _Weighed(
        spec=spec,
        recipe=answer.recipe,
        held={line.category: line.num_bytes for line in answer.breakdown},
        managed_bytes=_managed_bytes(answer.outside),
        allocated_bytes=answer.peak.allocated_bytes,
        gpu=answer.cluster.gpu,
    )
    tried = _best(answer, weighed, {}, MOST_TRIED)
    found = [_judged(answer, item) for item in tried]
    adapters = next((change for change in found if change.options.get("method") == "lora"), None)
    full = answer.recipe.method in (Method.FULL, Method.FREEZE)
    if full and adapters is not None and not _fits(adapters):
        options = {**adapters.options, **_in_four_bits(weighed)}
        in_four_bits = _tried(answer, options, weighed)
        if in_four_bits is not None:
            tried = [in_four_bits, *tried]
            found = [_judged(answer, in_four_bits), *found]
    if tried and answer.fit.verdict is Verdict.DOES_NOT_FIT and not any(map(_fits, found)):
        chained = _chained(answer, weighed, min(tried, key=_by_peak))
        if chained is not None:
            found = [chained, *found]
    return tuple(sorted(found, key=lambda change: -change.saved_bytes)[:MOST_TRIED])


def _is_counted(rehearsed: Rehearsed) -> bool:
    return rehearsed.loop in ("trainer", "plain") and not rehearsed.script


def _fits(change: Change) -> bool:
    return change.verdict is not Verdict.DOES_NOT_FIT


def _by_peak(item: _Tried) -> int:
    return item.allocated_bytes


def _best(answer: Estimate, weighed: _Weighed, before: dict[str, Any], most: int) -> list[_Tried]:
    """Weigh the most promising changes of a run that has the options `before` changed already; the best first."""
    worth_it = (
        item for item in _candidates(weighed) if item[0] * _LEAST_SAVING >= weighed.allocated_bytes
    )
    ranked = sorted(worth_it, key=lambda item: -item[0])
    tried = (_tried(answer, {**before, **options}, weighed) for _, options in ranked[:most])
    return sorted((item for item in tried if item is not None), key=_by_peak)


def _chained(answer: Estimate, whole: _Weighed, first: _Tried) -> Change | None:
    """Go on from the best change; None where `MOST_CHAINED` together do not make it fit."""
    best = first
    for _ in range(_LONGEST_SEARCH - 1):
        at_peak = peak(best.run.simulation.timeline)
        weighed = _Weighed(
            spec=whole.spec,
            recipe=best.run.resolved.recipe,
            held={category.value: size for category, size in at_peak.by_category().items()},
            managed_bytes=_managed_bytes(best.run.outside),
            allocated_bytes=best.allocated_bytes,
            gpu=answer.cluster.gpu,
        )
        found = _best(answer, weighed, best.options, _MOST_TRIED_IN_CHAIN)
        found = [item for item in found if len(item.options.keys() - _GO_ALONG) <= MOST_CHAINED]
        if not found:
            return None
        best = found[0]
        change = _judged(answer, best)
        if _fits(change):
            return change
    return None


def _tried(answer: Estimate, options: dict[str, Any], before: _Weighed) -> _Tried | None:
    """Weigh the changed run; None where it cannot be weighed or saves next to nothing of what was held before."""
    gpu = answer.cluster.gpu
    try:
        run = run_through(before.spec, replace(answer.options, **options), gpu)
    except WaznError:
        return None
    highest_bytes = peak(run.simulation.timeline).peak_bytes
    if (before.allocated_bytes - highest_bytes) * _LEAST_SAVING < before.allocated_bytes:
        return None
    return _Tried(options, run, highest_bytes)


def _judged(answer: Estimate, item: _Tried) -> Change:
    """Ask whether the changed run fits, where the run as it is does not."""
    gpu, verdict = answer.cluster.gpu, None
    if answer.fit.verdict is Verdict.DOES_NOT_FIT and gpu is not None:
        if item.allocated_bytes > gpu.usable_bytes:
            verdict = Verdict.DOES_NOT_FIT  # no allocator can help
        elif _num_events(item.run) <= MOST_EVENTS_REPLAYED:
            _, verdict = verdict_of(gpu, item.run.simulation.timeline, item.run.outside)
    return Change(
        options=item.options,
        saved_bytes=answer.peak.allocated_bytes - item.allocated_bytes,
        verdict=verdict,
    )


def _num_events(run: Run) -> int:
    return sum(
        part.times * sum(len(segment.sizes) for segment in part.segments)
        for part in run.simulation.timeline.parts
    )


def _managed_bytes(outside: tuple[OutsideLine, ...]) -> int:
    return sum(line.num_bytes for line in outside if line.category == "managed-memory")


def _candidates(weighed: _Weighed) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what each change could save at most, roughly, with its options: only to choose which to weigh."""
    recipe, held = weighed.recipe, weighed.held
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
        yield trained + weighed.managed_bytes, lora
        if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
            states = held.get(Category.OPTIMIZER_STATES, 0)
            yield states * 3 // 4 + held.get(Category.TEMPORARY, 0), {"optimizer": "adamw-8bit"}
        if recipe.grad_accum > 1:
            yield held.get(Category.GRADIENTS, 0), {"grad_accum": 1}
    if recipe.method is Method.LORA:
        yield weights * 2 // 3, _in_four_bits(weighed)
    yield from _of_quantization(weighed, weights, activations)
    if recipe.precision.weight_dtype.itemsize == 4:
        yield (weights + trained) // 2, {"precision": "bf16-autocast"}
    if recipe.checkpointing is Checkpointing.NONE:
        yield activations, {"checkpointing": "full"}
    if recipe.attention is Attention.EAGER:
        yield activations // 2, {"attention": "sdpa"}
    if _fp16_attends_in_less(weighed) and recipe.method in (Method.LORA, Method.QLORA):
        # the memory-efficient kernel of a card without bfloat16 takes fp16
        yield held.get(Category.TEMPORARY, 0), {"precision": "fp16-autocast"}
    if recipe.micro_batch > 1:
        divisors = [n for n in range(2, recipe.micro_batch + 1) if recipe.micro_batch % n == 0]
        times = _times_less(weighed, moving, divisors)
        yield (
            moving - moving // times,
            {"micro_batch": recipe.micro_batch // times, "grad_accum": recipe.grad_accum * times},
        )
    elif recipe.seq_len >= 2 * SHORTEST_SEQ_LEN:
        halvings = range(1, (recipe.seq_len // SHORTEST_SEQ_LEN).bit_length())
        times = _times_less(weighed, moving, [2**n for n in halvings])
        yield moving - moving // times, {"seq_len": recipe.seq_len // times}


def _times_less(weighed: _Weighed, moving: int, choices: list[int]) -> int:
    """Return how many times smaller to make what grows with the tokens: roughly as little as makes it fit.

    Where no choice does, because other things are too large: so small that it takes a quarter of the card.
    """
    needed, gpu = weighed.excess_bytes, weighed.gpu
    if not needed or gpu is None:
        return choices[0]
    for n in choices:
        if moving - moving // n >= needed:
            return n
    return next((n for n in choices if moving // n <= gpu.usable_bytes // 4), choices[-1])


def _fp16_attends_in_less(weighed: _Weighed) -> bool:
    """Whether bf16 is what keeps attention from a kernel that writes no scores out."""
    gpu, precision = weighed.gpu, weighed.recipe.precision
    if gpu is None or gpu.supports_bf16 or weighed.recipe.attention is not Attention.SDPA:
        return False
    if groups_heads(weighed.spec, resolve_stack(weighed.recipe.stack, family=weighed.spec.family)):
        return False
    return BFLOAT16 in (precision.weight_dtype, precision.autocast_dtype)


def _of_quantization(
    weighed: _Weighed, weights: int, activations: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The changes of a quantised base: how it is prepared, a stack that quantises more of it, none at all."""
    recipe, quantization = weighed.recipe, weighed.recipe.quantization
    if quantization is None:
        return
    prepared = quantization.kbit_preparation is not KbitPreparation.NONE
    fused = _has_experts(weighed.spec) and not quantization.experts
    if fused:
        stack = _stack_with_lists(weighed.spec)
        if stack is not None:
            yield weights, {"stack": stack}
        if prepared:  # fp32 experts: twice what 16 bits hold
            yield weights // 2, {"method": "lora", **dict.fromkeys(_OF_QUANTIZATION)}
    if prepared:
        yield weights // (2 if fused else 3) + activations // 4, {"kbit_preparation": "none"}
    int8 = quantization.format is QuantizationFormat.INT8
    if int8 and recipe.checkpointing is Checkpointing.FULL:
        yield activations, {"checkpointing": "full-reentrant"}


def _in_four_bits(weighed: _Weighed) -> dict[str, Any]:
    """QLoRA, with a stack that quantises the experts where the run's own does not."""
    stack = _stack_with_lists(weighed.spec) if weighed.recipe.fused_experts else None
    return {"method": "qlora"} if stack is None else {"method": "qlora", "stack": stack}


def _has_experts(spec: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)


def _stack_with_lists(spec: ModelSpec) -> str | None:
    """Return the newest stack whose class keeps each expert as a module of its own, so that it is quantised."""
    if not any(isinstance(layer.mlp, MoeSpec) and layer.mlp.v4.listed for layer in spec.layers):
        return None
    for version in reversed(stack_versions()):
        stack = f"hf@{version}"
        try:
            if not resolve_stack(stack, family=spec.family).fused_experts:
                return stack
        except WaznError:
            return None  # older than the family, as are all before
    return None
