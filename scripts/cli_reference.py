"""Write docs/cli.md: the help of every command, as `wazn COMMAND --help` prints it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from wazn.cli.main import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRODUCTION = """\
# The command line

Made from the commands' own `--help` by `scripts/docs`; a test compares the two.

All commands take `--format text|json` and `--lang`. stdout is data and stderr is talk, so that
`wazn ... --format json | jq` works. The exit status says how it went:

| status | meaning |
|---|---|
| 0 | answered; the run fits or is tight, or no GPU was named |
| 3 | answered; the run does not fit |
| 2 | the question was wrong or cannot be answered; stderr says what to write instead |
| 1 | wazn itself failed; `WAZN_DEBUG=1` shows the traceback, and a report is welcome |

Counts are written as `7B`, `350M`, `8k` or `65_536`; sizes as `0.5GB` (10^9 bytes) or `512 MiB` (2^20).
"""


def page() -> str:
    """Return the whole page."""
    with cli.make_context("wazn", [], resilient_parsing=True) as context:
        sections = [INTRODUCTION, *_sections(cli, context)]
    return "\n".join(sections)


def _sections(command: click.Command, context: click.Context) -> list[str]:
    context.terminal_width = 100
    found = [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                inner_context = click.Context(inner, info_name=name, parent=context)
                found += _sections(inner, inner_context)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE}", file=sys.stderr)
