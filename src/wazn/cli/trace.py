"""`wazn trace`: rehearse a fine-tuning run with the real library code, without a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wazn.cli.base import (
    COUNT,
    DECIMAL,
    SIZE,
    TOKENS,
    NameChoice,
    common_options,
    option,
    require_english,
)
from wazn.cli.run import RunCommand, by_option, given_options, print_answer, run_options
from wazn.errors import InputError

if TYPE_CHECKING:
    from wazn.trace.script import Script

__all__ = ["command"]

_SECONDS_OF_SILENCE = 1.0
_STEPS = 1000
_F = TypeVar("_F", bound=Callable[..., Any])


_SCRIPT = (
    option(
        "--loop",
        type=NameChoice(["trainer", "plain", "sft", "dpo", "reward", "grpo"]),
        default="trainer",
        show_default=True,
        group="Rehearsal",
        help="Whose loop: transformers' Trainer, a plain one, or TRL's SFT, DPO, reward or GRPO trainer (of GRPO what"
        " follows generation).",
    ),
    option(
        "--task",
        type=NameChoice(["causal-lm", "sequence-classification", "seq2seq", "image-text"]),
        group="Rehearsal",
        help="Which of transformers' auto classes makes the model. [default: what the model type has]",
    ),
    option(
        "--optim",
        metavar="NAME",
        group="Rehearsal",
        help="A name of TrainingArguments.optim, in place of --optimizer.",
    ),
    option(
        "--padding",
        type=DECIMAL,
        group="Rehearsal",
        help="How much shorter than the longest the other samples of a batch are: 0.25 is a quarter. [default: 0]",
    ),
    option(
        "--packing",
        type=COUNT,
        group="Rehearsal",
        help="So many sequences end to end in each sample, without padding.",
    ),
    option("--target-len", type=TOKENS, group="Rehearsal", help="Labels of an encoder-decoder."),
    option("--images", "num_images", type=COUNT, group="Rehearsal", help="Images in each sample."),
    option(
        "--image-size",
        metavar="HEIGHTxWIDTH",
        group="Rehearsal",
        help="Pixels, such as 1024x768. [default: the processor's square]",
    ),
    option(
        "--prompt-len",
        type=TOKENS,
        group="Rehearsal",
        help="Of --seq-len, in preference training and GRPO. [default: half]",
    ),
    option(
        "--generations",
        "num_generations",
        type=COUNT,
        group="Rehearsal",
        help="In GRPO. [default: 8]",
    ),
    option(
        "--reference",
        type=NameChoice(["default", "model", "precomputed"]),
        group="Rehearsal",
        help="What DPO and GRPO compare with: TRL's choice, a second model (in GRPO the base without its adapters, if"
        " it has any), or, in DPO, log-probabilities computed before.",
    ),
    option(
        "--reserved",
        "reserved_bytes",
        type=SIZE,
        group="Rehearsal",
        help="What an inference engine on the same card keeps, such as 20GB.",
    ),
    option(
        "--activation-offloading",
        is_flag=True,
        default=None,
        group="Rehearsal",
        help="TRL's: what forward saves goes to the host.",
    ),
    option(
        "--liger",
        is_flag=True,
        default=None,
        group="Rehearsal",
        help="Liger kernels, with the package liger-kernel (pip install --no-deps is enough).",
    ),
    option(
        "--trust-remote-code",
        is_flag=True,
        group="Rehearsal",
        help="Run the model's own code, if MODEL is a local folder that has it.",
    ),
)
_SCRIPT_NAMES = (
    "loop", "task", "optim", "padding", "packing", "target_len", "num_images", "image_size", "prompt_len",
    "num_generations", "reference", "reserved_bytes", "activation_offloading", "liger",
    "trust_remote_code",
)  # fmt: skip


def _script_options(function: _F) -> _F:
    for decorate in reversed(_SCRIPT):
        function = decorate(function)
    return function


@click.command("trace", cls=RunCommand)
@click.argument("model")
@run_options
@_script_options
@by_option
@common_options
def command(
    model: str,
    gpu: str | None,
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

    script = _script(model, {name: options.pop(name) for name in _SCRIPT_NAMES})
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


def _script(model: str, said: dict[str, Any]) -> Script:
    """Return the training script that the options describe. Raises: InputError."""
    from wazn.trace.script import Loop, Reference, Script, Task

    given = {name: value for name, value in said.items() if value is not None}
    given["loop"] = Loop(given["loop"])
    for name, kind in (("task", Task), ("reference", Reference)):
        if name in given:
            given[name] = kind(given[name])
    if "padding" in given:
        given["padding"] = float(given["padding"])
    if "image_size" in given:
        given["image_size"] = _image_size(given["image_size"])
    if given.pop("trust_remote_code"):
        given["code_folder"] = _code_folder(model)
    return Script(**given)


def _image_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if found is None or not (int(found[1]) and int(found[2])):
        raise InputError(
            f"`--image-size`: expected a height and a width such as `1024x768`, found `{text[:40]}`"
        )
    return int(found[1]), int(found[2])


def _code_folder(model: str) -> str:
    folder = Path(model)
    if not folder.is_dir():
        raise InputError(
            f"`--trust-remote-code`: `{model[:100]}` is not a folder",
            hint="download the repository first, look at its code, and name the folder as MODEL",
        )
    return str(folder)
