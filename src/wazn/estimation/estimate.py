"""The estimate: a model and a recipe on a card, weighed.

    options -> Recipe -> (engine) -> Timeline -> replay -> Estimate

The replay runs with the card's capacity when one is named: the verdict is PyTorch's own, flush and retry included.
Where the run does not fit, what is told as the need is the replay without a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wazn.cluster import Gpu
from wazn.errors import InputError, UnknownFact, Unsupported, WaznError
from wazn.estimation.answer import Estimate, ModelFacts, OutsideLine
from wazn.estimation.assemble import assemble, outside_of
from wazn.estimation.notes import notes_on
from wazn.estimation.options import OPTION_NAMES, Options, Resolved, resolve
from wazn.estimation.refusals import refuse_absurd, refuse_flash_in_fp32, refuse_unsupported
from wazn.estimation.targets import adapted_names
from wazn.facts.gpus import resolve_gpu
from wazn.facts.models import ModelSource, resolve_model, spec_of
from wazn.facts.names import nearest_names
from wazn.facts.notes import Note
from wazn.facts.overheads import blas_workspace
from wazn.facts.stacks import Habits, resolve_stack
from wazn.model.parameters import count_parameters
from wazn.model.spec import AttentionSpec, ModelSpec
from wazn.recipe import Attention, Recipe
from wazn.simulate.rotary import ROTARY
from wazn.simulate.step import Simulation, simulate

if TYPE_CHECKING:
    from wazn.trace.script import Script

__all__ = ["ENGINES", "Run", "estimate", "run_through", "weigh"]

ENGINES = ("auto", "simulate", "trace")
# From the third micro-batch of an optimizer step on, all do the same in the same memory: more of them change no figure.
MICRO_BATCHES_RUN = 3
_WITHOUT_FLASH = (
    "bloom",
    "mpt",
)  # no `_supports_flash_attn` in their modeling files, transformers 5.24


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    engine: str = "auto",
    script: Script | None = None,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Estimate:
    """Weigh a fine-tuning run.

    Args:
        model: a catalogue name, a Hugging Face id, a folder with config.json, or a config.json file.
        gpu: the card's name, such as `rtx-4090` or `80GB`; None for no card.
        engine: `simulate` counts on the tape; `trace` rehearses the real library code, which needs torch and takes
            seconds; `auto` counts where the architecture is known and else rehearses, if torch is installed.
        script: of a rehearsal, the training script around the run (`wazn.trace.script.Script`).
        progress: told the fraction of a rehearsal that is done.
        options: the fields of `Options`, named as on the command line with `_` for `-`; where the command line
            takes names with commas between them, a list works as well.

    Raises: InputError, UnknownFact, Unsupported, MissingExtra.

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
    _refuse_engine(engine, script)
    choice = None if gpu is None else resolve_gpu(gpu)
    source = resolve_model(model)
    card = None if choice is None else choice.gpu
    notes = (*source.notes, *(() if choice is None else choice.notes))
    if engine == "trace":
        from wazn.estimation.rehearse import rehearse_run  # only a rehearsal pays for it

        return rehearse_run(source, asked, gpu=card, notes=notes, script=script, progress=progress)
    try:
        return weigh(spec_of(source), asked, gpu=card, notes=notes)
    except Unsupported as error:
        if engine == "simulate":
            raise
        return _rehearsed_instead(error, source, asked, card, notes, progress)


def _rehearsed_instead(
    error: Unsupported,
    source: ModelSource,
    asked: Options,
    gpu: Gpu | None,
    notes: tuple[Note, ...],
    progress: Callable[[float], None] | None,
) -> Estimate:
    """Rehearse what cannot be counted. Raises: the error where that cannot be done either."""
    from wazn.estimation.rehearse import can_rehearse, rehearse_run

    if not can_rehearse():
        more = "with `pip install 'wazn[trace]'` it is rehearsed"
        hint = more if error.hint is None else f"{error.hint}; {more}"
        raise Unsupported(error.message, hint=hint) from None
    said = Note(code="rehearsed-instead", params={"reason": error.message})
    try:
        return rehearse_run(source, asked, gpu=gpu, notes=(*notes, said), progress=progress)
    except WaznError as second:
        if second.message == error.message:  # it is not the architecture
            raise error from None
        more = f"rehearsing it fails too: {second.message}"
        hint = more if error.hint is None else f"{error.hint}; {more}"
        raise Unsupported(error.message, hint=hint) from second


def _joined(value: Any) -> Any:
    """Write a list of names as the command line does."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return value


def _refuse_engine(engine: object, script: Script | None) -> None:
    if engine not in ENGINES:
        raise InputError(
            f"`--engine`: unknown name `{str(engine)[:40]}`",
            hint="one of " + ", ".join(f"`{name}`" for name in ENGINES),
        )
    if script is not None and engine != "trace":
        raise InputError("a `script` is rehearsed: it needs `engine` `trace`")


def weigh(
    spec: ModelSpec, options: Options, *, gpu: Gpu | None = None, notes: tuple[Note, ...] = ()
) -> Estimate:
    """Weigh a run of a model that was read already; `notes` are those of the look-ups."""
    run = run_through(spec, options, gpu)
    answer = assemble(
        engine="simulate",
        model=ModelFacts(
            id=spec.id,
            family=spec.family,
            num_parameters=count_parameters(spec),
            num_trainable_parameters=run.simulation.num_trainable_parameters,
        ),
        spec=spec,
        options=options,
        resolved=run.resolved,
        gpu=gpu,
        timeline=run.simulation.timeline,
        outside=run.outside,
    )
    more = notes_on(
        spec,
        answer.recipe,
        run.habits,
        gpu,
        answer.fit,
        run.outside,
        run.unmatched_targets,
    )
    return replace(answer, notes=(*notes, *more))


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
    refuse_absurd(recipe, num_logits=spec.head.out_features)
    refuse_flash_in_fp32(recipe)
    _refuse_what_was_not_read(spec, recipe)
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
        outside=outside_of(gpu, simulation.managed_bytes),
        unmatched_targets=targets.unmatched,
    )


def _refuse_what_was_not_read(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises: InputError where the class refuses; Unsupported where its code was not read."""
    if recipe.attention is Attention.FLASH and spec.family in _WITHOUT_FLASH:
        raise InputError(
            f"`--attention flash`: `{spec.family}` has none in transformers",
            hint="`--attention eager`",
        )
    for layer in {id(layer): layer for layer in spec.layers}.values():
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.rotary_code not in ROTARY:
            raise Unsupported(
                f"the rotary embedding of `{spec.family}` is counted, and not run yet",
                hint="a model of another family with about the same sizes gives a near figure",
            )
