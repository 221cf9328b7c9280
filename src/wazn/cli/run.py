"""The options of a run, which every command that weighs one takes, and how its answer is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wazn.cli.base import COUNT, DECIMAL, TOKENS, Command, NameChoice, option, terminal_width

if TYPE_CHECKING:
    from wazn.estimation.answer import Estimate
    from wazn.report.estimate import Style

__all__ = [
    "DOES_NOT_FIT",
    "RunCommand",
    "by_option",
    "given_options",
    "print_answer",
    "run_options",
]

DOES_NOT_FIT = 3
_F = TypeVar("_F", bound=Callable[..., Any])


class RunCommand(Command):
    """The core names these options as people write them already, and some share their name with a value."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it returns is the exit status."""
        return click.Command.invoke(self, ctx)


def run_options(function: _F) -> _F:
    """Add the options of a run, under their headings."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


def by_option(function: _F) -> _F:
    """Add `--by`."""
    return option(
        "--by",
        type=NameChoice(["module", "line", "op", "category"]),
        group="Output",
        help="Print what holds most of the peak, summed by module, line of code, op or category.",
    )(function)


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was said of the run, as `wazn.estimate` takes it."""
    given = {name: value for name, value in options.items() if value is not None}
    if "lora_dropout" in given:
        given["lora_dropout"] = float(given["lora_dropout"])  # read as an exact fraction
    return given


def print_answer(answer: Estimate, output_format: str, by: str | None) -> int:
    """Print an answer as JSON or text; return the exit status."""
    from wazn.estimation.answer import Verdict

    if output_format == "json":
        from wazn.report.json import to_json

        click.echo(_as_json(to_json(answer)))
    else:
        from wazn.estimation.changes import changes
        from wazn.report.estimate import as_text

        click.echo(as_text(answer, changes(answer), _style(), by=by))
    return DOES_NOT_FIT if answer.fit.verdict is Verdict.DOES_NOT_FIT else 0


def _as_json(document: object) -> str:
    """Write what stdout cannot encode as JSON's own escapes: a name must come through whole."""
    import json

    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(document, indent=2)
    return text


def _style() -> Style:
    """What stdout can show: its width, colours unless NO_COLOR forbids them, blocks where it can encode them."""
    from wazn.report.estimate import Style

    width = terminal_width()
    plain = width is None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    try:
        "█▏│▌".encode(sys.stdout.encoding or "ascii")
        blocks = True
    except UnicodeEncodeError:
        blocks = False
    return Style(width=width or 80, colour=not plain, unicode=blocks)


_OPTIONS = (
    option(
        "--method",
        metavar="NAME",
        group="Method",
        help="full, lora, qlora or freeze. [default: lora]",
    ),
    option("--rank", type=COUNT, group="Method", help="Rank of the adapters. [default: 16]"),
    option(
        "--targets",
        metavar="NAMES",
        group="Method",
        help="What is adapted: attention, all-linear, names such as q_proj,v_proj, or a regular expression."
        " [default: all-linear]",
    ),
    option(
        "--dora", is_flag=True, default=None, group="Method", help="DoRA: LoRA with magnitudes."
    ),
    option(
        "--lora-dropout", type=DECIMAL, group="Method", help="Dropout of the adapters. [default: 0]"
    ),
    option(
        "--modules-to-save",
        metavar="NAMES",
        group="Method",
        help="Modules that are trained whole beside the adapters, such as embed_tokens,lm_head.",
    ),
    option(
        "--quantization",
        metavar="NAME",
        group="Method",
        help="Of the frozen base: nf4, fp4, int8 or none. [default: nf4 with qlora]",
    ),
    option(
        "--double-quant/--no-double-quant",
        default=None,
        group="Method",
        help="Quantise the constants of the 4-bit blocks as well. [default: yes]",
    ),
    option(
        "--kbit-preparation",
        metavar="HELPER",
        group="Method",
        help="What turns the 16-bit rest of a quantised base into fp32: peft (all of it), trl (not embeddings and"
        " head), none. [default: peft]",
    ),
    option(
        "--trainable",
        metavar="PATTERN",
        group="Method",
        help="With --method freeze: what is trained.",
    ),
    option(
        "--freeze",
        metavar="PATTERN",
        group="Method",
        help="With --method freeze: what is not trained.",
    ),
    option(
        "--precision",
        metavar="PRESET",
        group="Precision",
        help="bf16, bf16-autocast (bf16 weights under autocast), bf16-mixed (fp32 weights under autocast),"
        " bf16-master (bf16 with an fp32 master copy), fp16-autocast, fp16-mixed or fp32. [default: bf16-autocast]",
    ),
    option(
        "--weight-dtype",
        metavar="TYPE",
        group="Precision",
        help="Instead of the preset's: bf16, fp16 or fp32.",
    ),
    option("--autocast-dtype", metavar="TYPE", group="Precision", help="bf16, fp16 or none."),
    option(
        "--adapter-dtype",
        metavar="TYPE",
        group="Precision",
        help="Of the adapters. [default: the stack's]",
    ),
    option(
        "--master-dtype",
        metavar="TYPE",
        group="Precision",
        help="Of a second copy that the optimizer updates.",
    ),
    option(
        "--gradient-dtype", metavar="TYPE", group="Precision", help="[default: as what is trained]"
    ),
    option(
        "--state-dtype", metavar="TYPE", group="Precision", help="[default: as what is trained]"
    ),
    option(
        "--optimizer",
        metavar="NAME",
        group="Precision",
        help="adamw (foreach), adamw-fused, adamw-8bit, paged-adamw-8bit, paged-adamw, adafactor, lion, lion-8bit,"
        " sgd, sgd-momentum or muon. [default: the stack's]",
    ),
    option(
        "--micro-batch",
        type=COUNT,
        group="Batch",
        help="Samples per forward pass and GPU. [default: 1]",
    ),
    option("--seq-len", type=TOKENS, group="Batch", help="Tokens per sample. [default: 2048]"),
    option(
        "--grad-accum",
        type=COUNT,
        group="Batch",
        help="Micro-batches per optimizer step. [default: 1]",
    ),
    option(
        "--checkpointing",
        metavar="NAME",
        group="Memory",
        help="none, full, full-reentrant, every-N, selective-op or selective-attention. [default: the stack's]",
    ),
    option(
        "--attention", metavar="NAME", group="Memory", help="sdpa, flash or eager. [default: sdpa]"
    ),
    option(
        "--loss",
        metavar="NAME",
        group="Memory",
        help="standard; chunked and fused (not yet). [default: standard]",
    ),
    option(
        "--keep-outputs/--no-keep-outputs",
        default=None,
        group="Memory",
        help="The loop keeps what the model returned, its logits, until backward is done. [default: no, as Trainer]",
    ),
    option(
        "--zero-grad-to-none/--no-zero-grad-to-none",
        default=None,
        group="Memory",
        help="zero_grad lets go of the gradients; else it fills them with zeros. [default: yes, as Trainer]",
    ),
    option(
        "--stack",
        metavar="NAME",
        group="Memory",
        help="The training stack whose habits are modelled: hf, or hf@4.48 as that version of transformers does it."
        " [default: hf]",
    ),
    option(
        "--gpu",
        metavar="NAME",
        group="Hardware",
        help="The card, such as rtx-4090, a100-80gb, or a size such as 24GB; `wazn gpus` lists them.",
    ),
    option(
        "--gpus",
        type=COUNT,
        group="Hardware",
        help="GPUs per node; more than 1 (not yet). [default: 1]",
    ),
    option("--nodes", type=COUNT, group="Hardware", help="More than 1 (not yet). [default: 1]"),
    option(
        "--parallel",
        metavar="NAME",
        group="Hardware",
        help="ddp; zero1, zero2, zero3 and fsdp (not yet). [default: ddp]",
    ),
    option("--tp", type=COUNT, group="Hardware", help="Tensor parallelism (not yet). [default: 1]"),
    option(
        "--pp", type=COUNT, group="Hardware", help="Pipeline parallelism (not yet). [default: 1]"
    ),
    option(
        "--cp", type=COUNT, group="Hardware", help="Context parallelism (not yet). [default: 1]"
    ),
    option("--ep", type=COUNT, group="Hardware", help="Expert parallelism (not yet). [default: 1]"),
    option(
        "--offload",
        metavar="NAME",
        group="Hardware",
        help="none; optimizer and all (not yet). [default: none]",
    ),
)
