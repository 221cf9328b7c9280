"""`wazn trace`: rehearse a fine-tuning run with the real library code, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import click

from wazn.cli.base import NameChoice, common_options, option, require_english
from wazn.cli.run import RunCommand, by_option, given_options, print_answer, run_options

__all__ = ["command"]

_SECONDS_OF_SILENCE = 1.0
_STEPS = 1000


@click.command("trace", cls=RunCommand)
@click.argument("model")
@run_options
@option(
    "--loop",
    type=NameChoice(["trainer", "plain"]),
    default="trainer",
    show_default=True,
    group="Rehearsal",
    help="Who runs the steps: transformers.Trainer, or a plain loop.",
)
@by_option
@common_options
def command(
    model: str,
    gpu: str | None,
    loop: str,
    by: str | None,
    output_format: str,
    lang: str,
    **options: Any,
) -> int:
    """Rehearse a fine-tuning run: two optimizer steps of the real library code on fake tensors.

    It needs neither a GPU nor weights, but the libraries: pip install 'wazn[trace]'. What runs is what is installed, so
    the answer is of those versions. MODEL and the options are those of `wazn estimate`, and so is the answer; each
    allocation also knows its module and its line of code (--by).
    """
    if output_format == "text":
        require_english(lang)
    from wazn.estimation.estimate import estimate
    from wazn.trace.script import Loop, Script

    script = Script(loop=Loop(loop))
    with _progress() as progress:
        answer = estimate(
            model,
            gpu=gpu,
            engine="trace",
            script=script,
            progress=progress,
            **given_options(options),
        )
    return print_answer(answer, output_format, by)


@contextmanager
def _progress() -> Iterator[Callable[[float], None] | None]:
    """Draw a bar on stderr, where that is a terminal, for what takes more than a second."""
    if not sys.stderr.isatty():
        yield None
        return
    started = monotonic()
    bar = click.progressbar(length=_STEPS, label="rehearsing", file=sys.stderr, show_eta=False)

    def advance(fraction: float) -> None:
        if monotonic() - started > _SECONDS_OF_SILENCE:
            bar.update(round(fraction * _STEPS) - bar.pos)

    with bar:
        yield advance
