"""`wazn estimate`: weigh a fine-tuning run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from wazn.cli.base import common_options, option, require_english
from wazn.cli.run import RunCommand, by_option, given_options, print_answer, run_options

__all__ = ["command"]

_SECONDS_OF_SILENCE = 1.0


@click.command("estimate", cls=RunCommand)
@click.argument("model")
@run_options
@option(
    "--engine",
    metavar="NAME",
    default="auto",
    show_default=True,
    group="Output",
    help="simulate counts; trace rehearses the real library code, as `wazn trace` does; auto counts where it knows the"
    " architecture, else rehearses if torch is installed.",
)
@by_option
@common_options
def command(
    model: str,
    gpu: str | None,
    engine: str,
    by: str | None,
    output_format: str,
    lang: str,
    **options: Any,
) -> int:
    """Weigh a fine-tuning run: the peak by component, and whether it fits a GPU.

    MODEL: a catalogue name (llama-3.1-8b; `wazn models` lists them), a Hugging Face id, a folder with config.json, or
    a config.json file.

    The exit status is 0 if it fits, is tight or no GPU was named, and 3 if it does not fit.
    """
    if output_format == "text":
        require_english(lang)
    from wazn.estimation.estimate import estimate

    with _talking(model):
        answer = estimate(model, gpu=gpu, engine=engine, **given_options(options))
    return print_answer(answer, output_format, by)


@contextmanager
def _talking(model: str) -> Iterator[None]:
    """Say what takes so long, where something can: a model's configuration may come from the Hub."""
    if "/" not in model or not sys.stderr.isatty():
        yield
        return
    from threading import Timer  # only what may wait pays for it

    timer = Timer(_SECONDS_OF_SILENCE, click.echo, [f"asking for {model} ..."], {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
