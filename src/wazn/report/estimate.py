"""An estimate for people: one screen of plain text.

The verdict in words, what holds the peak as bars that stack up against the card's capacity, what would help, what was
assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wazn.estimation.answer import Estimate, Verdict
from wazn.estimation.changes import Change
from wazn.estimation.notes import running_attention
from wazn.estimation.options import PRECISIONS, as_option
from wazn.facts.stacks import resolve_stack
from wazn.model.fields import printable
from wazn.recipe import Attention, Checkpointing, Precision, Recipe
from wazn.report.holders import holder_lines
from wazn.report.notes import note_text
from wazn.timeline.events import Phase
from wazn.units import GIB, format_ratio, format_size

__all__ = ["Style", "as_text"]

_WIDEST = 100
_LABEL = 18
_SIZE = 11
_NARROWEST_BAR = 10
_LONGEST_NAME = 500
_EIGHTHS = "▏▎▍▌▋▊▉█"
_WHOLES = "#"
_SMALLEST_PART = 200  # what holds less than a two hundredth has no line of its own


class Style(NamedTuple):
    """What the terminal can show: columns, colours, block characters."""

    width: int = 80
    colour: bool = False
    unicode: bool = True


CATEGORIES = {
    "weights": "weights",
    "quantization-state": "quantization state",
    "adapter-weights": "adapter weights",
    "gradients": "gradients",
    "optimizer-states": "optimizer states",
    "activations": "activations",
    "logits-and-loss": "logits and loss",
    "temporary": "temporary",
    "communication": "communication",
    "workspaces": "workspaces",
    "inputs": "inputs",
    "context": "CUDA context",
    "managed-memory": "paged states",
    "inference-engine": "inference engine",
}
PHASES = {
    "load": "loading",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "gradient-clipping": "gradient clipping",
    "optimizer-step": "optimizer step",
    "zero-grad": "zeroing gradients",
}
VERDICTS = {
    Verdict.FITS: "fits",
    Verdict.TIGHT: "tight",
    Verdict.DOES_NOT_FIT: "does not fit",
}
_COLOURS = {Verdict.FITS: "32", Verdict.TIGHT: "33", Verdict.DOES_NOT_FIT: "31"}


def as_text(
    answer: Estimate, helping: Sequence[Change], style: Style, *, by: str | None = None
) -> str:
    """Return the answer as lines for people.

    helping: from `wazn.estimation.changes`. by: what the holders of the peak are summed by, if they are wanted.
    """
    style = style._replace(width=max(20, min(style.width, _WIDEST)))
    lines = [
        *_headline(answer, style),
        "",
        *_question(answer, style),
        *_how(answer, style),
        "",
        *_peak(answer, style),
        "",
        *(() if by is None else (*holder_lines(answer, by, width=style.width), "")),
        *_helping(answer, helping, style),
        *_defaults(answer, style),
        *_notes(answer, style),
    ]
    return "\n".join(line.rstrip() for line in lines)


# --- the verdict ---------------------------------------------------------------------------------


def _headline(answer: Estimate, style: Style) -> Iterator[str]:
    fit = answer.fit
    colour = _COLOURS.get(fit.verdict, "")
    for line in _wrapped(_verdict(answer), style):
        yield _painted(line, f"1;{colour}".rstrip(";"), style)
    if fit.out_of_memory is not None:
        failed = fit.out_of_memory
        where = f"{PHASES[failed.moment.phase]} of step {failed.moment.step}"
        where = "while loading" if failed.moment.phase is Phase.LOAD else f"in {where}"
        yield from _wrapped(
            f"PyTorch stops {where}: it tries to allocate "
            f"{_small(failed.tried_bytes)} ({CATEGORIES[failed.tag.category]}) and "
            f"{_small(failed.free_bytes)} are free.",
            style,
        )


def _small(num_bytes: int) -> str:
    """Write a size in MiB below 1 GiB, as PyTorch does."""
    return format_size(num_bytes, unit="MiB" if num_bytes < GIB else "GiB")


def _verdict(answer: Estimate) -> str:
    fit, need = answer.fit, format_size(answer.peak.device_bytes)
    if fit.capacity_bytes is None or fit.headroom_bytes is None:
        return f"It needs {need} at its peak. Name a card with --gpu to hear whether it fits."
    of = f"{fit.gpu} has {format_size(fit.capacity_bytes)}"
    margin = format_size(abs(fit.headroom_bytes))
    if fit.verdict is Verdict.DOES_NOT_FIT:
        return f"It does not fit: it needs {need}, {of}, {margin} too little."
    if fit.headroom_bytes < 0:
        return f"Tight: it needs {need}, {of}; {margin} of paged states move to the host."
    word = "It fits" if fit.verdict is Verdict.FITS else "Tight"
    return f"{word}: it needs {need}, {of}, {margin} to spare."


# --- the question --------------------------------------------------------------------------------


def _question(answer: Estimate, style: Style) -> Iterator[str]:
    model, recipe = answer.model, answer.recipe
    share = format_ratio(model.num_trainable_parameters * 100, model.num_parameters, digits=2)
    yield from _wrapped(
        f"{printable(model.id, longest=_LONGEST_NAME)}: {_count(model.num_parameters)} parameters, "
        f"{_count(model.num_trainable_parameters)} trained ({share} %)",
        style,
    )
    method: str = recipe.method.value
    if recipe.adapter is not None:
        adapter = recipe.adapter
        method += f", {'DoRA ' if adapter.dora else ''}rank {adapter.rank} on "
        method += printable(",".join(adapter.targets), longest=_LONGEST_NAME)
        method += f", dropout {adapter.dropout:g}" if adapter.dropout else ""
        saved = ",".join(adapter.modules_to_save)
        method += f", {saved} trained whole" if saved else ""
    for word, patterns in (("training", recipe.trainable), ("freezing", recipe.freeze)):
        names = printable(",".join(patterns), longest=_LONGEST_NAME)
        method += f", {word} {names}" if patterns else ""
    accumulation = f" x {recipe.grad_accum} micro-batches" if recipe.grad_accum > 1 else ""
    yield from _wrapped(
        f"{method}; {recipe.micro_batch} x {recipe.seq_len:,} tokens{accumulation}; "
        f"{_precision(recipe.precision)}, {_optimizer(answer)}, checkpointing {_checkpointing(answer)}, "
        f"{_attention(answer)} attention{_loop(recipe)}; {recipe.stack}",
        style,
    )


def _optimizer(answer: Estimate) -> str:
    """A name of `TrainingArguments.optim` takes the place of the recipe's."""
    own = None if answer.rehearsed is None else answer.rehearsed.script.get("optim")
    return answer.recipe.optimizer.value if own is None else printable(str(own))


def _how(answer: Estimate, style: Style) -> Iterator[str]:
    """Whose code ran, where it was not counted."""
    if answer.rehearsed is None:
        return
    how = answer.rehearsed
    versions = ", ".join(f"{name} {version}" for name, version in how.libraries.items())
    said = "".join(
        f", {name.replace('_', ' ')}"
        + ("" if value is True else f" {printable(str(value), longest=_LONGEST_NAME)}")
        for name, value in how.script.items()
    )
    loop = f"Rehearsed in the {how.loop} loop{said}, on fake {how.tensors} tensors: {versions}."
    yield from _wrapped(loop, style)


def _attention(answer: Estimate) -> Attention:
    """What runs: some classes know eager attention only."""
    recipe = answer.recipe
    if answer.spec is None or answer.engine != "simulate":
        return recipe.attention
    return running_attention(
        answer.spec, recipe, resolve_stack(recipe.stack, family=answer.spec.family)
    )


def _loop(recipe: Recipe) -> str:
    """What the loop does that few loops do."""
    outputs = ", outputs kept" if recipe.keep_outputs else ""
    return outputs + ("" if recipe.zero_grad_set_to_none else ", gradients kept between steps")


def _precision(precision: Precision) -> str:
    """The preset's name where it is one, else its parts."""
    parts = (precision.weight_dtype, precision.autocast_dtype, precision.master_dtype)
    for name, preset in PRECISIONS.items():
        if preset == parts:
            return name
    autocast = precision.autocast_dtype
    under = "" if autocast is None else f" under {autocast.name} autocast"
    return f"{precision.weight_dtype.name} weights{under}"


def _checkpointing(answer: Estimate) -> str:
    recipe = answer.recipe
    if recipe.checkpointing is Checkpointing.EVERY_N:
        return f"every-{recipe.checkpoint_every}"
    return recipe.checkpointing.value


def _count(number: int) -> str:
    """Write a number of parameters as people say it.

    >>> _count(8_030_261_248), _count(41_943_040), _count(0)
    ('8.03 B', '41.94 M', '0')
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{format_ratio(number, size, digits=2)} {unit}"
    return str(number)


# --- the peak ------------------------------------------------------------------------------------


class _Bar(NamedTuple):
    label: str
    start_bytes: int
    num_bytes: int


def _bars(answer: Estimate) -> list[_Bar]:
    """The components, each standing on those before it: tensors, then what is not allocated, then what is outside."""
    peak = answer.peak
    sizes = [(CATEGORIES[line.category], line.num_bytes) for line in answer.breakdown]
    sizes.append(("reserved, unused", peak.reserved_bytes - peak.allocated_bytes))
    sizes += [(CATEGORIES[line.category], line.num_bytes) for line in answer.outside]
    bars, start, rest = [], 0, 0
    for label, num_bytes in sizes:
        if num_bytes * _SMALLEST_PART < peak.device_bytes:
            rest += num_bytes
            continue
        bars.append(_Bar(label, start, num_bytes))
        start += num_bytes
    return [*bars, _Bar("smaller parts", start, rest)] if rest else bars


def _peak(answer: Estimate, style: Style) -> Iterator[str]:
    peak = answer.peak
    bars = _bars(answer)
    capacity = answer.fit.capacity_bytes
    full = max(peak.device_bytes, capacity or 0, 1)
    cells = style.width - 2 - _LABEL - _SIZE - 2
    title = f"The peak, in {PHASES.get(peak.phase, peak.phase)} of step {peak.step}:"
    yield from _wrapped(title, style)
    for bar in [*bars, _Bar("all of it", 0, peak.device_bytes)]:
        row = f"  {bar.label:<{_LABEL}}{_in_column(bar.num_bytes):>{_SIZE}}"
        if cells >= _NARROWEST_BAR:
            row += "  " + _drawn(bar, full, capacity, cells, style)
        yield row
    highest: dict[str, int] = {}
    for phase in answer.phases:
        highest[phase.phase] = max(highest.get(phase.phase, 0), phase.peak_allocated_bytes)
    parts = [
        f"{PHASES.get(name, name)} {format_size(num_bytes).removesuffix(' GiB')}"
        for name, num_bytes in highest.items()
        if name != "zero-grad"
    ]
    yield from _wrapped(f"Allocated by phase: {', '.join(parts)} GiB.", style)


def _in_column(num_bytes: int) -> str:
    """Write a size in GiB, and in TiB where the column is too narrow for that."""
    return format_size(num_bytes, unit="GiB" if num_bytes < 10_000 * GIB else "TiB")


def _drawn(bar: _Bar, full: int, capacity: int | None, cells: int, style: Style) -> str:
    """One bar on a line of `cells`; the card's capacity is a mark on it.

    It begins in the cell in which the one before ends. Its width is rounded, not its end: to eighths of a cell where
    there are such blocks, so that a larger part never looks smaller.
    """
    parts = _EIGHTHS if style.unicode else _WHOLES
    block, mark = parts[-1], "│" if style.unicode else "|"
    steps = len(parts)
    line = [" "] * cells
    first = min(bar.start_bytes * cells // full, cells - 1)
    width = max(1, (2 * bar.num_bytes * cells * steps + full) // (2 * full))
    whole, rest = divmod(width, steps)
    drawn = block * whole + (parts[rest - 1] if rest else "")
    line[first : first + len(drawn)] = drawn
    if capacity is not None:
        at = min(capacity * cells // full, cells - 1)
        if line[at] == " ":
            line[at] = mark
        elif line[at] == block and capacity < full:
            line[at] = "▌" if style.unicode else "!"
    text = "".join(line).rstrip()
    return _painted(text, "36", style)


# --- what would help, what was assumed -----------------------------------------------------------


def _helping(answer: Estimate, helping: Sequence[Change], style: Style) -> Iterator[str]:
    largest = max(answer.breakdown, key=lambda line: line.num_bytes, default=None)
    if largest is None:
        return
    share = format_ratio(largest.num_bytes * 100, answer.peak.allocated_bytes, digits=0)
    what = f"{share} % of what is allocated are {CATEGORIES[largest.category]}."
    missing = answer.fit.verdict is Verdict.DOES_NOT_FIT
    hopeless = missing and all(change.verdict is Verdict.DOES_NOT_FIT for change in helping)
    nothing = " Nothing that wazn can change makes it fit." if hopeless else ""
    if not helping:
        yield from _wrapped(what + nothing, style)
        return
    yield from _wrapped(f"{what}{nothing} What would {'save' if hopeless else 'help'}:", style)
    rows = []
    for change in helping:
        verdict = "" if change.verdict is None else f", {VERDICTS[change.verdict]}"
        rows.append((_as_options(change), f"saves {format_size(change.saved_bytes)}{verdict}"))
    # in columns as far as the lines have room for them
    room = style.width - 4 - max(len(saving) for _, saving in rows)
    width = min(room, max(len(options) for options, _ in rows))
    for options, saving in rows:
        yield from _wrapped(f"  {options:<{max(0, width)}}  {saving}", style, indent="    ")


def _as_options(change: Change) -> str:
    words = []
    for name, value in change.options.items():
        if isinstance(value, bool):
            words.append(as_option(name if value else f"no_{name}"))
        elif value is not None:
            words.append(f"{as_option(name)} {value}")
    return " ".join(words)


# what the line of the question shows: to name it is enough
_SHOWN = (
    "method",
    "rank",
    "targets",
    "micro-batch",
    "seq-len",
    "precision",
    "optimizer",
    "checkpointing",
)


def _defaults(answer: Estimate, style: Style) -> Iterator[str]:
    recipe = answer.recipe
    values: dict[str, object] = {
        **dict.fromkeys((*_SHOWN, "attention"), ""),
        "grad-accum": recipe.grad_accum,
        "adapter-dtype": recipe.precision.adapter_dtype.name,
        "loss": recipe.loss,
        "keep-outputs": _yes(recipe.keep_outputs),
        "zero-grad-to-none": _yes(recipe.zero_grad_set_to_none),
    }
    if recipe.quantization is not None:
        values["quantization"] = recipe.quantization.format
    for who, whom in (("stack", recipe.stack), ("wazn", "wazn")):
        taken = [
            f"{name} {value}".strip()
            for name, value in values.items()
            if answer.defaults.get(name) == who
        ]
        if taken:
            yield from _wrapped(f"Chosen by {whom}: {', '.join(taken)}.", style)


def _yes(switch: bool) -> str:
    return "yes" if switch else "no"


def _notes(answer: Estimate, style: Style) -> Iterator[str]:
    for note in answer.notes:
        yield from _wrapped(f"Note: {note_text(note)}", style)


# --- lines ---------------------------------------------------------------------------------------


def _wrapped(text: str, style: Style, *, indent: str = "  ") -> list[str]:
    if len(text) <= style.width:
        return [text]
    from textwrap import wrap

    return wrap(text, style.width, subsequent_indent=indent, break_on_hyphens=False)


def _painted(text: str, code: str, style: Style) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if style.colour and code else text
