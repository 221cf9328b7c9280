"""Two optimizer steps of a training run on the tape: Model x Recipe -> Timeline.

What happens twice in the same way is run once: equal layers (`repeat`), equal micro-batches, and the forward and backward
passes of the second step. Their events are written again with new identities.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

from wazn.dtypes import INT64
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe
from wazn.simulate.build import LoadedModel, load
from wazn.simulate.checkpointing import is_checkpointed
from wazn.simulate.context import Context
from wazn.simulate.forward import hidden_states
from wazn.simulate.loss import causal_lm_loss
from wazn.simulate.optimizers import OPTIMIZERS, clip_gradients
from wazn.simulate.repeat import LayerPlan, NotRepeatable, expand, plan_layers
from wazn.simulate.tape import Tape, Tensor
from wazn.timeline.events import PASS, Category, Phase, Segment, Timeline

__all__ = ["simulate"]

NUM_STEPS = 2


def simulate(
    spec: ModelSpec,
    recipe: Recipe,
    targets: frozenset[str] = frozenset(),
    *,
    every_layer: bool = False,
) -> Timeline:
    """Return the timeline of loading the model and two optimizer steps.

    Args:
        targets: the linears that carry adapters, by their names within a layer.
        every_layer: run every layer, micro-batch and step for itself; the result is the same, later.
    """
    plan = plan_layers(_kinds(spec, recipe))
    whole = LayerPlan(num_layers=spec.num_layers)
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes many objects and no cycles that outlive it
    try:
        if not every_layer:
            try:
                return _timeline(_run(spec, recipe, targets, plan), plan)
            except NotRepeatable:
                pass
        return _timeline(_run(spec, recipe, targets, whole, every_step=every_layer), whole)
    finally:
        if was_enabled:
            gc.enable()


def _timeline(segments: list[Segment], plan: LayerPlan) -> Timeline:
    return Timeline(parts=tuple(expand(segments, plan)))


def _kinds(spec: ModelSpec, recipe: Recipe) -> list[tuple[int, bool]]:
    """What makes two layers do the same: the same spec, and both checkpointed or not."""
    return [(id(layer), is_checkpointed(recipe, index)) for index, layer in enumerate(spec.layers)]


def _run(
    spec: ModelSpec,
    recipe: Recipe,
    targets: frozenset[str],
    plan: LayerPlan,
    *,
    every_step: bool = False,
) -> list[Segment]:
    tape = Tape()
    tape.copies = plan.copies
    short = replace(
        spec, num_layers=len(plan.run), layers=tuple(spec.layers[index] for index in plan.run)
    )
    model = load(tape, short, recipe, targets)
    for layer, index in zip(model.layers, plan.run, strict=True):
        layer.checkpointed = is_checkpointed(recipe, index)
    if every_step:
        return _all_steps(tape, model, recipe)
    return _steps_once(tape, model, recipe)


def _all_steps(tape: Tape, model: LoadedModel, recipe: Recipe) -> list[Segment]:
    optimizer = OPTIMIZERS[recipe.optimizer](tape, model.parameters, recipe)
    for step in range(1, NUM_STEPS + 1):
        for _ in range(recipe.grad_accum):
            _micro_batch(tape, model, recipe, step=step)
        clip_gradients(tape, model.parameters, recipe)
        tape.enter(Phase.OPTIMIZER)
        optimizer.step()
        _zero_grad(tape, model, recipe)
    return tape.finish()


def _steps_once(tape: Tape, model: LoadedModel, recipe: Recipe) -> list[Segment]:
    """Run the first step; write the second one, but for its optimizer step, from it."""
    optimizer = OPTIMIZERS[recipe.optimizer](tape, model.parameters, recipe)
    loaded = tape.cut()
    _micro_batch(tape, model, recipe, step=1)
    first = tape.cut()
    kept_gradients = not recipe.zero_grad_set_to_none
    later: list[Segment] = []
    if recipe.grad_accum > 1 or kept_gradients:
        _micro_batch(tape, model, recipe, step=1)
        later = tape.cut()
    clip_gradients(tape, model.parameters, recipe)
    clip = tape.cut()
    tape.enter(Phase.OPTIMIZER)
    optimizer.step()
    first_update = tape.cut()
    tape.enter(Phase.OPTIMIZER, step=2)
    optimizer.step()
    second_update = tape.cut()
    _zero_grad(tape, model, recipe)
    zero = tape.cut()
    tape.finish()

    copy = _Copies(tape.num_passes)
    segments = [*loaded, *first]
    for _ in range(recipe.grad_accum - 1):
        segments += copy.fresh(later, step=1)
    segments += [*clip, *first_update, *copy.same(zero, step=1)]
    if kept_gradients:
        for _ in range(recipe.grad_accum):
            segments += copy.fresh(later, step=2)
        return segments + [*copy.fresh(clip, step=2), *second_update, *zero]
    with_new_gradients = [*first, *clip, *second_update, *zero]
    renamed = copy.fresh(first, step=2, among=with_new_gradients)
    segments += renamed[: len(first)]
    for _ in range(recipe.grad_accum - 1):
        segments += copy.fresh(later, step=2)
    return segments + renamed[len(first) :]


class _Copies:
    """Write segments again: with new identities for the blocks that were allocated in them."""

    def __init__(self, num_passes: int) -> None:
        self.next_pass = num_passes + 1

    def fresh(
        self, source: Sequence[Segment], *, step: int, among: Sequence[Segment] = ()
    ) -> list[Segment]:
        """Return `among` (by default `source`) with new identities for what `source` allocates."""
        passes = {
            block_id // PASS
            for segment in source
            for block_id, size in zip(segment.block_ids, segment.sizes, strict=True)
            if size > 0
        }
        renamed = {number: self.next_pass + place for place, number in enumerate(sorted(passes))}
        self.next_pass += len(renamed)
        moves = {number: (new - number) * PASS for number, new in renamed.items()}
        return [self._copy(segment, step, moves) for segment in (among or source)]

    def same(self, source: Sequence[Segment], *, step: int) -> list[Segment]:
        """Return `source` in another step, about the same blocks."""
        return [self._copy(segment, step, {}) for segment in source]

    @staticmethod
    def _copy(segment: Segment, step: int, moves: dict[int, int]) -> Segment:
        return Segment(
            phase=segment.phase,
            step=step,
            layer=segment.layer,
            block_ids=[block_id + moves.get(block_id // PASS, 0) for block_id in segment.block_ids]
            if moves
            else segment.block_ids,
            sizes=segment.sizes,
            tags=segment.tags,
        )


def _micro_batch(tape: Tape, model: LoadedModel, recipe: Recipe, *, step: int) -> None:
    tape.enter(Phase.FORWARD, step=step)
    tokens = recipe.micro_batch * recipe.seq_len
    inputs = [
        tape.new_tagged(tokens, INT64, Category.INPUTS, name)
        for name in ("input_ids", "labels", "attention_mask")
    ]
    with tape.autocast(recipe.precision.autocast_dtype):
        loss = _forward(tape, model, recipe, inputs[0], inputs[1])
    del inputs
    if recipe.grad_accum > 1:
        tape.label = "loss"
    tape.enter(Phase.BACKWARD)
    tape.backward(loss, tape.new(1, loss.dtype))
    tape.enter_layer(None)


def _forward(
    tape: Tape, model: LoadedModel, recipe: Recipe, input_ids: Tensor, labels: Tensor
) -> Tensor:
    context = Context(
        tape=tape,
        micro_batch=recipe.micro_batch,
        seq_len=recipe.seq_len,
        attention=recipe.attention,
        capability=(8, 0),
        masks={},
    )
    hidden = hidden_states(tape, model, recipe, context, input_ids)
    loss, _logits = causal_lm_loss(tape, model.head, hidden, labels, micro_batch=recipe.micro_batch)
    return loss


def _zero_grad(tape: Tape, model: LoadedModel, recipe: Recipe) -> None:
    tape.enter(Phase.ZERO_GRAD)
    if recipe.zero_grad_set_to_none:
        for parameter in model.parameters:
            if parameter.grad is not None:
                tape.enter_layer(parameter.layer)
                parameter.grad = None
        tape.enter_layer(None)
