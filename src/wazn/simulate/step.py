"""Two optimizer steps of a training run on the tape: Model x Recipe -> Timeline."""

from __future__ import annotations

from wazn.dtypes import INT64
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe
from wazn.simulate.build import LoadedModel, load
from wazn.simulate.context import Context
from wazn.simulate.forward import hidden_states
from wazn.simulate.loss import causal_lm_loss
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.events import Category, Part, Phase, Timeline

__all__ = ["simulate"]


def simulate(
    spec: ModelSpec,
    recipe: Recipe,
    targets: frozenset[str] = frozenset(),
    *,
    accumulate_in_place: bool = True,
) -> Timeline:
    """Return the timeline of loading the model and two optimizer steps."""
    tape = Tape(accumulate_in_place=accumulate_in_place)
    model = load(tape, spec, recipe, targets)
    states: list[Tensor] = []
    for step in (1, 2):
        for micro in range(recipe.grad_accum):
            _micro_batch(tape, model, recipe, step=step)
        _optimizer_step(tape, model, states)
        tape.enter(Phase.ZERO_GRAD)
        for parameter in model.parameters:
            if parameter.grad is not None:
                tape.enter_layer(parameter.layer)
                parameter.grad = None
        tape.enter_layer(None)
    return Timeline(parts=tuple(Part(segments=(segment,)) for segment in tape.finish()))


def _micro_batch(tape: Tape, model: LoadedModel, recipe: Recipe, *, step: int) -> None:
    tape.enter(Phase.FORWARD, step=step)
    tokens = recipe.micro_batch * recipe.seq_len
    input_ids = tape.new_tagged(tokens, INT64, Category.INPUTS, "input_ids")
    labels = tape.new_tagged(tokens, INT64, Category.INPUTS, "labels")
    with tape.autocast(recipe.precision.autocast_dtype):
        loss = _forward(tape, model, recipe, input_ids, labels)
    del input_ids, labels
    tape.enter(Phase.BACKWARD)
    tape.label = "loss"
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
    loss, _logits = causal_lm_loss(
        tape, model.head, hidden, labels, micro_batch=recipe.micro_batch
    )
    return loss


def _optimizer_step(tape: Tape, model: LoadedModel, states: list[Tensor]) -> None:
    tape.enter(Phase.OPTIMIZER)
    trained = [parameter for parameter in model.parameters if parameter.grad is not None]
    if not states:
        for parameter in trained:
            tape.enter_layer(parameter.layer)
            for name in ("exp_avg", "exp_avg_sq"):
                states.append(_like(tape, parameter, Category.OPTIMIZER_STATES, name))
    temporaries = []
    for parameter in trained:
        tape.enter_layer(parameter.layer)
        temporaries.append(_like(tape, parameter, Category.TEMPORARY, "exp_avg_sq_sqrt"))
    while temporaries:
        temporaries.pop()
    tape.enter_layer(None)


def _like(tape: Tape, parameter: Parameter, category: Category, label: str) -> Tensor:
    return tape.new_tagged(parameter.numel, parameter.dtype, category, label)
