"""Two optimizer steps of a training run on the tape: Model x Recipe -> Timeline.

What happens twice in the same way is run once: equal layers (`repeat`), equal micro-batches, and the forward and
backward passes of the second step. Their events are written again with new identities.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wazn.dtypes import INT64, UINT8
from wazn.facts.stacks import Habits, KvCache
from wazn.model.spec import ModelSpec
from wazn.recipe import Checkpointing, Recipe
from wazn.simulate.build import load
from wazn.simulate.checkpointing import is_checkpointed
from wazn.simulate.context import Context
from wazn.simulate.forward import hidden_states
from wazn.simulate.loss import causal_lm_loss, held_outputs
from wazn.simulate.optimizers import clip_gradients, make_optimizer
from wazn.simulate.repeat import Expansion, LayerPlan, NotRepeatable, plan_layers
from wazn.simulate.tape import Tape, Tensor
from wazn.simulate.trained import Trained
from wazn.simulate.versions import as_written, make_buffers
from wazn.timeline.events import PASS, Category, Part, Phase, Segment, Timeline
from wazn.units import round_up

__all__ = ["Simulation", "simulate"]

NUM_STEPS = 2
BLOCK = 512  # what PyTorch's allocator rounds to
_INPUTS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The timeline, what the optimizer keeps in managed memory outside it, and how many parameters
    are trained.
    """

    timeline: Timeline
    managed_bytes: int
    num_trainable_parameters: int


def simulate(
    spec: ModelSpec,
    recipe: Recipe,
    habits: Habits,
    targets: frozenset[str] = frozenset(),
    *,
    capability: tuple[int, int] = (8, 0),
    workspace_bytes: int = 0,
    num_fetched: int | None = None,
    every_layer: bool = False,
) -> Simulation:
    """Return what loading the model and two optimizer steps allocate.

    Args:
        habits: of the training stack: how the loss, the loop and the family's class are written.
        num_fetched: micro-batches that are on the GPU at once where the stack fetches a whole step;
            by default those of the recipe.
        capability: the card's compute capability, by which kernels are chosen.
        workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices: one for forward, one for backward.
        targets: the linears that carry adapters, by their names within a layer.
        every_layer: run every layer, micro-batch and step for itself; the result is the same, later.
    """
    spec = as_written(spec, habits)
    setup = _Setup(
        spec=spec,
        recipe=recipe,
        habits=habits,
        targets=targets,
        trained=Trained(spec, recipe),
        capability=capability,
        workspace_bytes=workspace_bytes,
        num_fetched=recipe.grad_accum if num_fetched is None else num_fetched,
    )
    whole = LayerPlan(num_layers=spec.num_layers)
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes many objects and no cycles that outlive it
    try:
        for first_apart in () if every_layer else (False, True):
            try:
                return _Run(setup, setup.plan(first_apart=first_apart)).run()
            except NotRepeatable:
                continue
        return _Run(setup, whole).run(every_step=every_layer)
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """All that a run is made of."""

    spec: ModelSpec
    recipe: Recipe
    habits: Habits
    targets: frozenset[str]
    trained: Trained
    capability: tuple[int, int]
    workspace_bytes: int
    num_fetched: int

    def plan(self, *, first_apart: bool) -> LayerPlan:
        """Layers do the same when they have the same spec, the same checkpointing, and the same weights are trained.

        first_apart: the first one is of its own kind, for what comes out of the embedding may be of another type.
        """
        return plan_layers(
            [
                (
                    id(layer),
                    is_checkpointed(self.recipe, index),
                    self.trained.kind(index),
                    first_apart and index == 0,
                )
                for index, layer in enumerate(self.spec.layers)
            ]
        )


class _Run:
    """A model on a tape, and the passes over it."""

    def __init__(self, setup: _Setup, plan: LayerPlan) -> None:
        self.setup = setup
        self.recipe = recipe = setup.recipe
        self.plan = plan
        self.tape = tape = Tape()
        tape.copies = plan.copies
        layers = tuple(setup.spec.layers[index] for index in plan.run)
        self.spec = replace(setup.spec, num_layers=len(layers), layers=layers)
        self.model = load(tape, self.spec, recipe, setup.targets, setup.trained, plan.run)
        self.buffers = make_buffers(tape, self.spec, recipe, setup.habits)
        for layer, index in zip(self.model.layers, plan.run, strict=True):
            layer.checkpointed = is_checkpointed(recipe, index)
        self.optimizer = make_optimizer(
            tape,
            self.model.parameters,
            recipe,
            embeddings_in_32_bits=setup.habits.embeddings_in_32_bits,
        )
        self.workspaces: list[Tensor] = []
        self.batches: list[Tensor] = []

    def run(self, *, every_step: bool = False) -> Simulation:
        parts = self._all_steps() if every_step else self._steps_once()
        return Simulation(
            timeline=Timeline(parts=tuple(parts)),
            managed_bytes=self.optimizer.managed_bytes,
            num_trainable_parameters=sum(
                parameter.numel * self.tape.copies.get(parameter.layer, 1)
                for parameter in self.model.parameters
                if parameter.requires_grad
            ),
        )

    def _all_steps(self) -> list[Part]:
        for step in range(1, NUM_STEPS + 1):
            for number in range(self.recipe.grad_accum):
                self._fetch(step=step, number=number)
                self._micro_batch(step=step)
            self._clip()
            self._update()
            self._zero_grad()
        segments = self.tape.finish()
        return Expansion(segments, self.plan).parts(segments)

    def _steps_once(self) -> list[Part]:
        """Run the first step; write the second one, but for its optimizer step, from it."""
        tape, num_micro_batches = self.tape, self.recipe.grad_accum
        loaded = tape.cut()
        fetched = [self._fetched(step=1, number=0)]
        self._micro_batch(step=1)
        first = tape.cut()
        kept_gradients = not self.recipe.zero_grad_set_to_none
        later: list[Segment] = []
        if num_micro_batches > 1 or kept_gradients:
            self._micro_batch(step=1)
            later = tape.cut()
        self._clip()
        clip = tape.cut()
        self._update()
        first_update = tape.cut()
        # a pass holds no inputs beyond those of the loop, so they can be fetched when all passes have been run
        fetched += [self._fetched(step=1, number=number) for number in range(1, num_micro_batches)]
        fetched += [self._fetched(step=2, number=number) for number in range(num_micro_batches)]
        tape.step = 2
        self._update()
        second_update = tape.cut()
        self._zero_grad()
        zero = tape.cut()
        tape.finish()

        recorded = (loaded, *fetched, first, later, clip, first_update, second_update, zero)
        written = Expansion([segment for group in recorded for segment in group], self.plan).parts
        batches = [written(group) for group in fetched]
        first_parts, later_parts = written(first), written(later)
        clip_parts, zero_parts = written(clip), written(zero)

        copies = _Copies(tape.num_passes)
        parts = [*written(loaded), *batches[0], *first_parts]
        for number in range(1, num_micro_batches):
            parts += batches[number]
            parts += copies.fresh(later_parts, step=1)
        parts += [*clip_parts, *written(first_update), *copies.same(zero_parts, step=1)]
        if kept_gradients:
            for number in range(num_micro_batches):
                parts += batches[num_micro_batches + number]
                parts += copies.fresh(later_parts, step=2)
            clip_again = copies.fresh(clip_parts, step=2)
            return [*parts, *clip_again, *written(second_update), *zero_parts]
        first_parts = without_workspaces(first_parts)
        rest = [*clip_parts, *written(second_update), *zero_parts]
        renamed = copies.fresh(first_parts, step=2, among=[*first_parts, *rest])
        parts += batches[num_micro_batches]
        parts += renamed[: len(first_parts)]
        for number in range(1, num_micro_batches):
            parts += batches[num_micro_batches + number]
            parts += copies.fresh(later_parts, step=2)
        return parts + renamed[len(first_parts) :]

    def _fetched(self, *, step: int, number: int) -> list[Segment]:
        self._fetch(step=step, number=number)
        return self.tape.cut()

    def _fetch(self, *, step: int, number: int) -> None:
        """Put micro-batch `number` of a step on the GPU, or all of them with the first one; the
        loop holds the last ones till then.
        """
        tape, recipe, setup = self.tape, self.recipe, self.setup
        at_once = setup.habits.fetches_step_at_once
        if at_once and number:
            return
        tape.enter(Phase.FORWARD, step=step)
        tokens = recipe.micro_batch * recipe.seq_len
        batches = [
            tape.new_tagged(tokens, INT64, Category.INPUTS, name)
            for _ in range(recipe.grad_accum if at_once else 1)
            for name in _INPUTS
        ]
        beyond = (setup.num_fetched - recipe.grad_accum) * round_up(tokens * INT64.itemsize, BLOCK)
        if at_once and beyond > 0:
            batches += [
                tape.new_tagged(beyond, UINT8, Category.INPUTS, f"more {name}") for name in _INPUTS
            ]
        self.batches = batches

    def _micro_batch(self, *, step: int) -> None:
        tape, recipe = self.tape, self.recipe
        tape.enter(Phase.FORWARD, step=step)
        self._take_workspace(first=not self.workspaces)
        loss, outputs = self._forward(self.batches[0], self.batches[1])
        if not recipe.keep_outputs:
            outputs.clear()
        tape.enter(Phase.BACKWARD)
        self._take_workspace(first=len(self.workspaces) == 1)
        tape.label = "loss"
        tape.backward(loss, tape.new(1, loss.dtype))
        tape.enter_layer(None)

    def _take_workspace(self, *, first: bool) -> None:
        """Each thread that multiplies matrices, forward's and backward's, keeps a cuBLAS workspace
        from its first product on.
        """
        if first and self.setup.workspace_bytes:
            self.workspaces.append(
                self.tape.new_tagged(
                    self.setup.workspace_bytes, UINT8, Category.WORKSPACES, "cublas"
                )
            )

    def _forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, list[object]]:
        """Return the loss, and what the model's outputs hold beside it."""
        tape, recipe, habits = self.tape, self.recipe, self.setup.habits
        keeps_cache = habits.kv_cache is not KvCache.NONE and (
            recipe.checkpointing is Checkpointing.NONE or habits.caches_under_checkpointing
        )
        context = Context(
            tape=tape,
            habits=habits,
            micro_batch=recipe.micro_batch,
            seq_len=recipe.seq_len,
            attention=recipe.attention,
            capability=self.setup.capability,
            cache=[] if keeps_cache else None,
            checkpoint_attention=recipe.checkpointing is Checkpointing.SELECTIVE_ATTENTION,
        )
        with tape.autocast(recipe.precision.autocast_dtype):
            hidden = hidden_states(tape, self.model, recipe, context, input_ids)
            if recipe.checkpointing is Checkpointing.NONE:
                context.masks = {}  # a name of the model's forward; checkpointed calls keep it
            loss, logits = causal_lm_loss(
                tape,
                self.spec,
                self.model.head,
                hidden,
                labels,
                habits=habits,
                micro_batch=recipe.micro_batch,
            )
            del hidden
            cache = context.handed_over()
            return loss, held_outputs(tape, logits, cache, habits)

    def _clip(self) -> None:
        clip_gradients(self.tape, self.model.parameters, self.recipe)

    def _update(self) -> None:
        self.tape.enter(Phase.OPTIMIZER)
        self.optimizer.step()
        self.tape.enter_layer(None)

    def _zero_grad(self) -> None:
        tape = self.tape
        tape.enter(Phase.ZERO_GRAD)
        if self.recipe.zero_grad_set_to_none:
            for parameter in self.model.parameters:
                if parameter.grad is not None:
                    tape.enter_layer(parameter.layer)
                    parameter.grad = None
            tape.enter_layer(None)


def without_workspaces(parts: Sequence[Part]) -> list[Part]:
    """Return the parts of a later pass: its workspaces are there already."""
    return [
        replace(part, segments=(_without_workspaces(part.segments[0]),))
        if part.segments[0].layer is None
        else part
        for part in parts
    ]


def _without_workspaces(segment: Segment) -> Segment:
    if all(tag.category is not Category.WORKSPACES for tag in segment.tags):
        return segment
    rows = [
        row
        for row in zip(segment.block_ids, segment.sizes, segment.tags, strict=True)
        if row[2].category is not Category.WORKSPACES
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    return replace(segment, block_ids=columns[0], sizes=columns[1], tags=columns[2])


class _Copies:
    """Write parts again: with new identities for the blocks that were allocated in them."""

    def __init__(self, num_passes: int) -> None:
        self.next_pass = num_passes + 1

    def fresh(self, source: Sequence[Part], *, step: int, among: Sequence[Part] = ()) -> list[Part]:
        """Return `among` (by default `source`) with new identities for what `source` allocates."""
        # a segment is of one pass; what it allocates is named after it
        passes = [
            next(
                (
                    block_id // PASS
                    for block_id, size in zip(segment.block_ids, segment.sizes, strict=True)
                    if size > 0
                ),
                None,
            )
            for part in source
            for segment in part.segments
        ]
        known = [number for number in passes if number is not None]
        first, end = min(known, default=0), max(known, default=-1) + 1
        moved = range(first * PASS, end * PASS)
        by = (self.next_pass - first) * PASS
        self.next_pass += end - first
        return [self._copy(part, step, moved, by) for part in (among or source)]

    def same(self, source: Sequence[Part], *, step: int) -> list[Part]:
        """Return `source` in another step, about the same blocks."""
        return [self._copy(part, step) for part in source]

    @staticmethod
    def _copy(part: Part, step: int, moved: range = range(0), by: int = 0) -> Part:
        low, high = moved.start, moved.stop
        segments = tuple(
            [
                Segment(
                    phase=segment.phase,
                    step=step,
                    layer=segment.layer,
                    block_ids=[
                        block_id + by if low <= block_id < high else block_id
                        for block_id in segment.block_ids
                    ]
                    if by
                    else segment.block_ids,
                    sizes=segment.sizes,
                    tags=segment.tags,
                )
                for segment in part.segments
            ]
        )
        return Part(segments=segments, times=part.times, shift=part.shift)
