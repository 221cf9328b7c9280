"""The command line: a table of commands, each imported only when it is called, and the errors.

Exit status: 0 answered (and it fits, or no card was named); 3 answered and it does not fit;
2 the question was wrong or cannot be answered; 1 wazn itself failed. stdout is data, stderr is talk.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from wazn._version import __version__
from wazn.cli.base import NamedGroup, did_you_mean, nearest_names
from wazn.errors import WaznError

__all__ = ["COMMANDS", "cli", "main"]

# name -> what `wazn --help` says of it. The command is `command` in the module `wazn.cli.<name>`.
COMMANDS = {
    "estimate": "Weigh a fine-tuning run: the peak by component, and whether it fits a GPU.",
    "trace": "Rehearse a run with the real library code, without a GPU.",
    "calc": "The textbook formulas, with the numbers put in.",
    "models": "List and search the models of the catalogue.",
    "gpus": "List and search the GPUs of the catalogue.",
}

_NEW_REPORT = "please report this, with the command that you ran"
_INTERRUPTED = 128 + 2  # SIGINT, as shells write it
_READER_LEFT = 128 + 13  # SIGPIPE
_CONTROL = re.compile(
    r"[\0-\x09\x0b-\x1f\x7f-\x9f]"
)  # what would move a terminal's cursor or colour it


class LazyGroup(NamedGroup):
    """The commands of `COMMANDS`; `--help` shows the table without importing any of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"wazn.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`wazn COMMAND --help` shows the options of a command.",
)
@click.version_option(__version__, prog_name="wazn", message="%(prog)s %(version)s")
def cli() -> None:
    """How much GPU memory a fine-tuning run of a language model will need, before you rent the GPU."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    if sys.stdout is None:  # closed by who started us (`>&-`): only the status is wanted
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # it lives as long as the process
    _never_fail_on_encoding()
    if "_WAZN_COMPLETE" in os.environ:
        cli.main(prog_name="wazn")  # the shell asks for completions; Click answers and leaves
    status = _status_of(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        status = _write_failure(error)
    # A rehearsal leaves a million objects, among which Python would look for garbage before it ends.
    atexit.register(gc.freeze)
    sys.exit(status)


def _status_of(arguments: list[str]) -> int:
    # `cli.main` would do the same, but turns a broken pipe into a plain failure
    try:
        with cli.make_context("wazn", list(arguments)) as context:
            status = cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except WaznError as error:
        return _say(error.message, error.hint, status=2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # the help itself, on stderr
        return 2
    except click.ClickException as error:
        return _say(*_message_and_hint(error), status=2)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", None, status=_INTERRUPTED)
    except OSError as error:
        return _write_failure(error)
    except Exception as error:
        return _internal_failure(error)
    return status if isinstance(status, int) else 0


def _message_and_hint(error: click.ClickException) -> tuple[str, str | None]:
    """Say a usage error of Click in wazn's two lines."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "wazn COMMAND"  # Click does not always know
    hint = f"`{path} --help` shows what can be written"
    if isinstance(error, click.NoSuchOption):
        known = _options_of(context)
        return (
            f"unknown option `{error.option_name}`",
            did_you_mean(nearest_names(error.option_name, known)) or hint,
        )
    if isinstance(error, click.MissingParameter) and error.param is not None:
        what = "argument" if isinstance(error.param, click.Argument) else "option"
        name = error.param.human_readable_name if what == "argument" else error.param.opts[0]
        return f"the {what} `{name}` is missing", hint
    message = error.format_message().rstrip(".").replace("'", "`")
    return message[:1].lower() + message[1:], hint


def _options_of(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    params: list[click.Parameter] = context.command.get_params(context)
    return [name for param in params for name in (*param.opts, *param.secondary_opts)]


def _say(message: str, hint: str | None, *, status: int) -> int:
    """Write `error:` and `hint:` to stderr and return the exit status."""
    lines = [f"error: {message}"] + ([f"hint: {hint}"] if hint else [])
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], "\n".join(lines))
    with suppress(OSError):  # nobody listens; the status still tells
        click.echo(text, err=True)
    return status


def _internal_failure(error: Exception) -> int:
    """Our own mistake: one line and where to take it; the traceback only for who asks for it."""
    if os.environ.get("WAZN_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    first_line = (str(error).splitlines() or [""])[0][:200]
    return _say(
        f"wazn itself failed: {type(error).__name__}: {first_line}",
        f"{_NEW_REPORT}; WAZN_DEBUG=1 shows the traceback",
        status=1,
    )


def _write_failure(error: OSError) -> int:
    """What remains is that the answer could not be written: inputs are read with errors of their own."""
    # whatever is still buffered goes nowhere, or Python would complain again at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _READER_LEFT  # `wazn ... | head`: stop quietly, as other tools do
    return _say(f"the answer could not be written: {error}", None, status=1)


def _never_fail_on_encoding() -> None:
    """Print `?` for a sign that the terminal cannot show, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
