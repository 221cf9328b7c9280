"""What all commands share: value types, option groups, nearest names, the common options.

A command file holds one `command` object, built from the pieces here:

    @click.command(cls=Command)
    @click.argument("model")
    @option("--seq-len", type=COUNT, default=2048, group="Batch", help="Tokens per sequence.")
    @common_options
    def command(model: str, seq_len: int, output_format: str, lang: str) -> int: ...

The integer that a command returns is the exit status; None is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wazn.errors import InputError, Unsupported, WaznError
from wazn.units import MB, parse_count, parse_decimal, parse_size

if TYPE_CHECKING:
    from fractions import Fraction  # costs 4 ms at start

__all__ = [
    "COUNT",
    "DECIMAL",
    "SIZE",
    "TOKENS",
    "Command",
    "NameChoice",
    "NamedGroup",
    "OptionInGroup",
    "common_options",
    "nearest_names",
    "option",
    "require_english",
    "terminal_width",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def nearest_names(name: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return the known names that look most like `name`, best first; possibly none."""
    from wazn.facts import names  # only a mistyped name pays for it

    return names.nearest_names(name, known, at_most=limit)


def did_you_mean(nearest: Sequence[str]) -> str | None:
    """Return the hint that offers the nearest names, or None when nothing is near."""
    return f"did you mean {', '.join(f'`{name}`' for name in nearest)}?" if nearest else None


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # not generic before Click 8.5
    """A value written as people write it, read by one of the parsers of `wazn.units`."""

    def __init__(self, name: str, parse: Callable[[str], int | Fraction]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Fraction:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # a default, already a number
        try:
            return self._parse(value)
        except InputError as error:
            where = f"`{param.opts[0]}`: " if param is not None else ""
            raise InputError(f"{where}{error.message}", hint=error.hint) from None


def _parse_tokens(text: str) -> int:
    return parse_count(text, examples="`2048` or `4k` (4,000)")


def _parse_memory(text: str) -> int:
    """Return bytes. Raises: InputError for a few of them without a unit: `20` was meant to be `20GB`."""
    num_bytes = parse_size(text)
    if 0 < num_bytes < MB and not any(sign.isalpha() for sign in text):
        number = text.strip()
        raise InputError(
            f"expected a size with its unit, found `{number}`, which is bytes", hint=f"`{number}GB`"
        )
    return num_bytes


COUNT = _Parsed("count", parse_count)
TOKENS = _Parsed("count", _parse_tokens)
SIZE = _Parsed("size", _parse_memory)
DECIMAL = _Parsed("number", parse_decimal)


class NameChoice(click.Choice):  # type: ignore[type-arg]  # not generic before Click 8.2
    """A closed list of names; a name that is not on it is answered with the nearest ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name itself. Raises: InputError with the nearest names."""
        names = [str(choice) for choice in self.choices]
        if value in names:
            return str(value)
        where = param.opts[0] if param is not None else "value"
        hint = did_you_mean(nearest_names(str(value), names)) or "choose one of " + ", ".join(
            f"`{name}`" for name in names
        )
        raise InputError(f"`{where}`: unknown name `{str(value)[:100]}`", hint=hint)


class OptionInGroup(click.Option):
    """An option that `--help` shows under a heading of its own."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def option(*names: str, group: str = "Options", **kwargs: Any) -> Callable[[_F], _F]:
    """Declare an option under a heading; otherwise as `click.option`."""
    return click.option(*names, cls=OptionInGroup, group=group, **kwargs)


def common_options(function: _F) -> _F:
    """Add `--format` and `--lang`, which every command takes, under the last heading."""
    function = option(
        "--lang",
        type=NameChoice(["en", "ar", "fa"]),
        default="en",
        show_default=True,
        group="Output",
        help="Language of the text; ar and fa (not yet).",
    )(function)
    return option(
        "--format",
        "output_format",
        type=NameChoice(["text", "json"]),
        default="text",
        show_default=True,
        group="Output",
        help="Text for people or JSON for programs.",
    )(function)


def terminal_width() -> int | None:
    """Return the width of the terminal that stdout is, or None where it is a pipe or a file."""
    import shutil
    import sys

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def require_english(lang: str) -> None:
    """Refuse a language whose words are not written yet.

    Raises: Unsupported for anything but `en`.
    """
    if lang != "en":
        names = {"ar": "Arabic", "fa": "Persian"}
        raise Unsupported(
            f"`--lang {lang}`: the answers are not translated into {names.get(lang, lang)} yet",
            hint="`--lang en`, or `--format json`, whose keys and numbers need no language",
        )


class _GroupedHelp:
    """Help whose options stand under their headings, in the order of declaration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if isinstance(param, click.Argument):  # the text says what it is
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                group = param.group if isinstance(param, OptionInGroup) else "Other options"
                headings.setdefault(group, []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Command(_GroupedHelp, click.Command):
    """A command whose errors name the option as the person wrote it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it returns is the exit status."""
        try:
            return super().invoke(ctx)
        except WaznError as error:
            error.message = _as_options(error.message, self.params)
            if error.hint is not None:
                error.hint = _as_options(error.hint, self.params)
            raise


def _as_options(text: str, params: Iterable[click.Parameter]) -> str:
    """Write `num_parameters`, the name inside the code, as `--params`, the name at the door."""
    for param in params:
        if isinstance(param, click.Option) and param.name is not None:
            long = next((name for name in param.opts if name.startswith("--")), param.opts[0])
            text = text.replace(f"`{param.name}`", f"`{long}`")
    return text


class NamedGroup(_GroupedHelp, click.Group):
    """A group that keeps its subcommands' order and answers a mistyped one with the nearest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which the commands were added."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand. Raises: InputError with the nearest names."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            hint = did_you_mean(nearest_names(name, known))
            raise InputError(
                f"unknown command `{name[:100]}`",
                hint=hint or f"`{ctx.command_path} --help` lists the commands",
            )
        return super().resolve_command(ctx, args)
