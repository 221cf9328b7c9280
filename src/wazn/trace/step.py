"""Rehearse whole training steps of a real model class from `transformers`, with the real `peft` and optimizers.

The model is built on `meta`, then given fake storages; two optimizer steps follow, in a loop of our own or in the
real `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wazn.errors import Unsupported
from wazn.recipe import Checkpointing, Loss, Recipe
from wazn.timeline.events import Phase
from wazn.trace import fast_kernels
from wazn.trace.adapters import make_base, make_trainable
from wazn.trace.batches import PAD, task_of_model
from wazn.trace.card import Card
from wazn.trace.checkpointing import switch_on_checkpointing
from wazn.trace.flash_attn import flash_attn_stand_in
from wazn.trace.liger import apply_liger, require_liger
from wazn.trace.loop import PlainLoop
from wazn.trace.marks import head_of, mark_loss, name_gradients, name_model
from wazn.trace.models import build_model
from wazn.trace.optimizers import make_optimizer
from wazn.trace.peft_library import sees_quantised_layers
from wazn.trace.places import Places
from wazn.trace.quantized import give_quant_states
from wazn.trace.questions import refuse_for_library
from wazn.trace.refusals import refusals
from wazn.trace.rehearsal import Rehearsal
from wazn.trace.sandbox import sandbox
from wazn.trace.script import Loop, Script, Task, needs_reference
from wazn.trace.starting import nothing_compiled, objects_frozen, uncollected
from wazn.trace.tracker import StorageTracker, tensors_in
from wazn.trace.world import World

__all__ = ["rehearse"]

_CALLS_BETWEEN = 50  # of modules, between two words on the progress


def rehearse(
    config: Mapping[str, Any],
    recipe: Recipe,
    script: Script = Script(),  # noqa: B008  # frozen
    *,
    adapt: Callable[[Any, Recipe], Any] = make_trainable,
    progress: Callable[[float], None] | None = None,
) -> Rehearsal:
    """Run `script.num_steps` optimizer steps of the model that `config` (a config.json) describes.

    adapt: makes the model on `meta` what is trained: quantises, adapts, freezes; a training tool with plugins of its
        own has another one.
    progress: told, now and then, the fraction that is done.

    Raises: InputError, Unsupported.
    """
    _refuse(recipe)
    with sandbox(), refusals():
        refuse_for_library(config, recipe, script)
        return _rehearse(config, recipe, script, adapt, progress)


def _rehearse(
    config: Mapping[str, Any],
    recipe: Recipe,
    script: Script,
    adapt: Callable[[Any, Recipe], Any],
    progress: Callable[[float], None] | None,
) -> Rehearsal:
    if script.loop is Loop.REWARD:  # one number for a sequence
        config = {**config, "num_labels": 1}
        script = replace(script, task=Task.SEQUENCE_CLASSIFICATION)
    if script.loop not in (Loop.PLAIN, Loop.TRAINER) and adapt is make_trainable:
        adapt = make_base  # TRL adds adapters itself
    if script.liger:
        require_liger()
    with uncollected(), nothing_compiled(), flash_attn_stand_in(), sees_quantised_layers():
        model = build_model(config, recipe, script)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model = adapt(model, recipe)
        _switch_on_training(model, recipe, script)
        reference = None
        if needs_reference(recipe, script):
            reference = make_base(build_model(config, recipe, script), recipe).requires_grad_(False)
    card = Card.of_capability(script.capability) if script.gpu is None else Card.of_gpu(script.gpu)
    world = World(card=card, matmul_workspaces=script.matmul_workspaces)
    events = world.tracker.events
    places = Places(clock=lambda: len(events))
    places.of_model(model)
    if progress is not None:
        places.on_call = _progress_of(places, recipe, script, progress)
    with objects_frozen(), flash_attn_stand_in(), places.watching(), world:
        tracker = world.tracker
        tracker.phase = Phase.LOAD
        world.materialise(model)
        quantised = recipe.quantization is not None
        name_model(tracker, model, give_quant_states(model) if quantised else [])
        tracker.places = places  # the line that loads weights is whoever called
        mark_loss(tracker, model)
        if script.loop is Loop.PLAIN:
            if script.liger:
                apply_liger(model)
            name_gradients(tracker, model)
            optimizer = make_optimizer(recipe.optimizer.value, model, tracker)
            loop = PlainLoop(tracker, model, optimizer, recipe, script)
            loop.run()  # and it holds the last batches and norms on to the end, as Trainer does
        else:
            if reference is not None:
                world.materialise(reference)
            model, optimizer = _train(tracker, model, recipe, script, reference)
        states = [tensor for tensor in tensors_in(list(optimizer.state.values())) if tensor.dim()]
        return Rehearsal(
            events=tuple(tracker.events),
            names=tracker.names,
            head=head_of(model),
            calls=tuple(places.calls),
            managed_bytes=sum(tensor.nbytes for tensor in states if tracker.is_on_host(tensor)),
            assumes_kernels=fast_kernels.are_in(model),
            num_parameters=num_parameters,
            num_trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        )


def _train(
    tracker: StorageTracker, model: Any, recipe: Recipe, script: Script, reference: Any
) -> tuple[Any, Any]:
    """Run a library's loop; return what it trained, with adapters where it adds them, and its optimizer."""
    if script.loop is Loop.TRAINER:
        from wazn.trace.trainer import train

        trainer = train(tracker, model, recipe, script)
    else:
        from wazn.trace.preference import train_with_trl

        trainer = train_with_trl(tracker, model, recipe, script, reference)
    return trainer.model, trainer.optimizer


def _switch_on_training(model: Any, recipe: Recipe, script: Script) -> None:
    """Switch on what a script switches on by itself; the Trainers have arguments for checkpointing."""
    model.train()
    if task_of_model(model) is Task.SEQUENCE_CLASSIFICATION and model.config.pad_token_id is None:
        model.config.pad_token_id = PAD  # it looks for the last token before the padding
    if script.loop is Loop.PLAIN:
        switch_on_checkpointing(model, recipe.checkpointing, every=recipe.checkpoint_every)
    if recipe.inputs_require_grad and hasattr(model, "get_base_model"):
        model.enable_input_require_grads()


def _progress_of(
    places: Places, recipe: Recipe, script: Script, progress: Callable[[float], None]
) -> Callable[[], None]:
    """Measure progress in calls of modules: as many as there are in each forward, recomputed or not."""
    passes = 1 if recipe.checkpointing is Checkpointing.NONE else 2
    expected = max(1, places.num_modules * passes * recipe.grad_accum * script.num_steps)
    calls = 0

    def on_call() -> None:
        nonlocal calls
        calls += 1
        if calls % _CALLS_BETWEEN == 0:
            progress(min(1.0, calls / expected))

    return on_call


def _refuse(recipe: Recipe) -> None:
    """Raises: Unsupported for what no library does that is rehearsed."""
    if recipe.checkpointing is Checkpointing.SELECTIVE_ATTENTION:
        raise Unsupported(
            "`--checkpointing selective-attention` is Megatron's; it cannot be rehearsed",
            hint="`--engine simulate` counts it",
        )
    if recipe.loss is not Loss.STANDARD:
        raise Unsupported(f"`--loss {recipe.loss}` cannot be rehearsed yet")
    precision = recipe.precision
    for option in ("master_dtype", "gradient_dtype", "state_dtype"):
        if getattr(precision, option) is not None:
            raise Unsupported(
                f"`--{option.replace('_', '-')}` cannot be rehearsed: PyTorch's optimizers take the weights' own",
                hint="`--engine simulate` counts it",
            )
