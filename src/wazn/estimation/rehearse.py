"""The other engine: the run is rehearsed with the real library code, in the environment that is installed here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from wazn.cluster import Gpu
from wazn.errors import InputError, MissingExtra, Unsupported, WaznError
from wazn.estimation.answer import Estimate, ModelFacts, OutsideLine, Rehearsed
from wazn.estimation.assemble import assemble, outside_of
from wazn.estimation.estimate import MICRO_BATCHES_RUN
from wazn.estimation.notes import notes_on, notes_on_verdict
from wazn.estimation.options import Options, Resolved, resolve
from wazn.estimation.refusals import (
    refuse_absurd,
    refuse_flash_in_fp32,
    refuse_meaningless,
    refuse_unsupported,
)
from wazn.facts.models import ModelSource, spec_of
from wazn.facts.notes import Note
from wazn.facts.stacks import Habits, resolve_stack, stack_versions
from wazn.model.fields import MOST_LAYERS, printable
from wazn.model.spec import ModelSpec
from wazn.recipe import Recipe
from wazn.trace.starting import uncollected

if TYPE_CHECKING:
    from wazn.trace.rehearsal import Rehearsal
    from wazn.trace.script import Script

__all__ = ["can_rehearse", "rehearse_run"]

LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "bitsandbytes",
    "liger-kernel",
)
# What `pyproject.toml` asks for under `trace`.
OLDEST = {"torch": (2, 6), "transformers": (4, 40)}
LARGEST_BATCH = 1 << 24  # tokens
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_ANY_FAMILY = "llama"  # whose habits that matter here, those of the loop, are everybody's


def can_rehearse() -> bool:
    """Return whether the libraries that a rehearsal needs are installed."""
    return all(_installed(name) is not None for name in OLDEST)


@uncollected()  # nearly all that is made here stays
def rehearse_run(
    source: ModelSource,
    options: Options,
    *,
    gpu: Gpu | None = None,
    notes: tuple[Note, ...] = (),
    script: Script | None = None,
    progress: Callable[[float], None] | None = None,
) -> Estimate:
    """Rehearse a run and return the same answer as `weigh`, with the place of every allocation.

    Args:
        script: the training script around the recipe; None for `transformers.Trainer`.
        progress: told, now and then, the fraction that is done.

    Raises: MissingExtra, InputError, Unsupported.
    """
    libraries = _libraries()
    spec = _spec_or_none(source)
    family = str(source.mapping.get("model_type", "")) if spec is None else spec.family
    habits = _habits(options, family, libraries["transformers"])
    resolved = resolve(replace(options, stack=None), habits, gpu)
    refuse_unsupported(resolved.recipe, resolved.cluster)
    refuse_flash_in_fp32(resolved.recipe)
    _refuse_absurd(resolved.recipe, source, spec)
    if spec is None:  # a spec has passed the same
        _refuse_deep(source.mapping)
    recipe = replace(resolved.recipe, stack=f"hf@{libraries['transformers']}")
    resolved = Resolved(recipe=recipe, cluster=resolved.cluster, defaults=resolved.defaults)
    script = _script(script, recipe, gpu)
    refuse_meaningless(script, names_optimizer=options.optimizer is not None)
    run = _cut(recipe, script)
    rehearsal = _rehearse(source.mapping, run, script, progress)
    outside = outside_of(gpu, rehearsal.managed_bytes)
    if script.reserved_bytes:
        outside = (*outside, _kept_beside(script.reserved_bytes))
    answer = assemble(
        engine="trace",
        model=ModelFacts(
            id=source.id,
            family=family,
            num_parameters=rehearsal.num_parameters,
            num_trainable_parameters=rehearsal.num_trainable_parameters,
        ),
        spec=spec,
        options=replace(options, stack=f"hf@{habits.version}"),
        resolved=resolved,
        gpu=gpu,
        timeline=rehearsal.timeline(),
        outside=outside,
        rehearsed=Rehearsed(
            loop=script.loop.value,
            script=_said(script),
            libraries=libraries,
            tensors=rehearsal.tensors,
            micro_batches=run.grad_accum,
        ),
    )
    if spec is None:
        more = notes_on_verdict(answer.fit, outside)
    else:
        more = notes_on(spec, recipe, habits, gpu, answer.fit, outside, ())
    if rehearsal.assumes_kernels:
        more = (*more, Note(code="kernels-assumed", params={}))
    if run.grad_accum < recipe.grad_accum:
        params = {"run": run.grad_accum, "of": recipe.grad_accum}
        more = (*more, Note(code="micro-batches-alike", params=params))
    return replace(answer, notes=(*notes, *more))


def _rehearse(
    config: Any, recipe: Recipe, script: Script, progress: Callable[[float], None] | None
) -> Rehearsal:
    try:
        from wazn.trace.step import rehearse
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "wazn":
            raise
        raise MissingExtra("a rehearsal", extra="trace") from error
    try:
        return rehearse(config, recipe, script, progress=progress)
    except Unsupported as error:
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and recipe.seq_len > positions:
            raise InputError(
                f"`--seq-len {recipe.seq_len}`: the model has {positions:,} positions, and its code stops beyond",
                hint=f"`--seq-len {positions}`",
            ) from error
        raise


def _script(script: Script | None, recipe: Recipe, gpu: Gpu | None) -> Script:
    from wazn.trace.script import Loop, Script

    if script is None:
        script = Script(loop=Loop.TRAINER)
    if recipe.keep_outputs or not recipe.zero_grad_set_to_none:
        if script.loop not in (Loop.PLAIN, Loop.TRAINER):
            raise InputError(
                f"`--keep-outputs` and `--no-zero-grad-to-none` are of an own loop, found `--loop {script.loop}`"
            )
        script = replace(script, loop=Loop.PLAIN)
    is_nvidia = gpu is not None and gpu.cuda_capability is not None
    return replace(script, gpu=gpu) if is_nvidia else script


def _cut(recipe: Recipe, script: Script) -> Recipe:
    """Leave as many micro-batches as differ; none is left out in GRPO, which holds the completions of a whole step."""
    from wazn.trace.script import Loop

    if script.loop is Loop.GRPO:
        return recipe
    return replace(recipe, grad_accum=min(recipe.grad_accum, MICRO_BATCHES_RUN))


def _kept_beside(num_bytes: int) -> OutsideLine:
    """What an inference engine on the same card has, as it was said."""
    return OutsideLine(
        category="inference-engine",
        num_bytes=num_bytes,
        basis="assumed",
        source="what was said with `--reserved`",
    )


def _said(script: Script) -> dict[str, Any]:
    """Return what is not as it is by default; the card is the cluster's."""
    plain = type(script)(loop=script.loop, gpu=script.gpu, capability=script.capability)
    values = ((name, getattr(script, name)) for name in script.__dataclass_fields__)
    return {name: value for name, value in values if value != getattr(plain, name)}


def _refuse_absurd(recipe: Recipe, source: ModelSource, spec: ModelSpec | None) -> None:
    """Raises: InputError for batches that are nobody's: they are real lists of numbers here."""
    vocabulary = source.mapping.get("vocab_size") if spec is None else spec.head.out_features
    refuse_absurd(recipe, num_logits=vocabulary if isinstance(vocabulary, int) else 1)
    tokens = recipe.micro_batch * recipe.seq_len
    if tokens > LARGEST_BATCH:
        raise InputError(
            f"a micro-batch of {tokens:,} tokens is not rehearsed: at most {LARGEST_BATCH:,}",
            hint="lower `--micro-batch` or `--seq-len`, or take `--engine simulate`",
        )


def _refuse_deep(config: Mapping[str, Any]) -> None:
    """Raises: InputError for no layers, and for more than any model has: each is built, one by one."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _refuse_deep(value)
        elif key in _DEPTHS and isinstance(value, int) and value < 1:
            raise InputError(f"`{printable(key)}`: expected 1 or more layers, found `{value}`")
        elif re.search("(layers?|depth)$", key) and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"`{printable(key)}`: at most {MOST_LAYERS:,}, found `{value}`")


def _spec_or_none(source: ModelSource) -> ModelSpec | None:
    try:
        return spec_of(source)
    except WaznError:
        return None


# --- the environment -----------------------------------------------------------------------------


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _libraries() -> dict[str, str]:
    """Return the versions of the libraries that are installed.

    Raises: MissingExtra where one is absent that a rehearsal needs; Unsupported for one that is too old.
    """
    found = {name: _installed(name) for name in LIBRARIES}
    for name, oldest in OLDEST.items():
        installed = found[name]
        if installed is None:
            raise MissingExtra("a rehearsal", extra="trace")
        if _minor(installed) < oldest:
            least = ".".join(str(part) for part in oldest)
            raise Unsupported(
                f"a rehearsal needs {name} {least} or newer, found {installed}",
                hint=f"pip install '{name}>={least}'; `--engine simulate` needs no torch",
            )
    return {name: text for name, text in found.items() if text is not None}


def _minor(text: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))


def _habits(options: Options, family: str, installed: str) -> Habits:
    """Return the habits of the installed version: those that a recipe takes its defaults from.

    Raises: InputError where the options ask for another version; UnknownFact for another stack.
    """
    minors = [_minor(text) for text in stack_versions()]
    here = _minor(installed)
    if options.stack is not None:
        asked = resolve_stack(options.stack, family=_ANY_FAMILY).minor
        if "@" in options.stack and asked != here:
            raise InputError(
                f"`--stack {options.stack}`: a rehearsal runs what is installed, transformers {installed}",
                hint=f"pip install 'transformers=={asked[0]}.{asked[1]}.*', or `--engine simulate`",
            )
    nearest = max((minor for minor in minors if minor <= here), default=minors[0])
    name = f"hf@{nearest[0]}.{nearest[1]}"
    try:
        return resolve_stack(name, family=family)
    except WaznError:
        return resolve_stack(name, family=_ANY_FAMILY)
