"""The documentation cannot lag behind the code: what exists is documented, and what is written is true."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

from wazn.cli.main import COMMANDS, cli
from wazn.estimation.answer import Estimate
from wazn.estimation.options import OPTION_NAMES, PRECISIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def script(name: str) -> ModuleType:
    """Return a script of `scripts/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_what_help_says() -> None:
    """docs/cli.md is made by `scripts/docs` and equals the help of this very code."""
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == script("cli_reference").page(), "run scripts/docs"


def options(command: click.Command, context: click.Context) -> list[tuple[str, click.Option]]:
    """Return every option below a command, with the path of its command."""
    found = [(context.command_path, p) for p in command.params if isinstance(p, click.Option)]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found += options(inner, click.Context(inner, info_name=name, parent=context))
    return found


def test_every_option_has_a_help_text() -> None:
    """An option without a sentence is an option that nobody can use."""
    silent = [(path, o.opts[0]) for path, o in options(cli, click.Context(cli)) if not o.help]
    assert silent == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_format_and_lang(name: str) -> None:
    """`--format` and `--lang` are promised for all commands."""
    context = click.Context(cli, info_name="wazn")
    command = cli.get_command(context, name)
    assert command is not None
    leaves: dict[str, set[str]] = {}
    for path, option in options(command, click.Context(command, info_name=name, parent=context)):
        leaves.setdefault(path, set()).update(option.opts)
    assert leaves
    for path, names in leaves.items():
        assert {"--format", "--lang"} <= names, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Every relative link of a page points at a file that exists, with a heading where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_the_index_names_every_page() -> None:
    """docs/index.md is where one starts: each page is linked from it."""
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert f"({page.name})" in index, page.name


def test_the_examples_of_the_python_page_are_true() -> None:
    """docs/python.md is a session with the interpreter: each output is what this version prints."""
    failed, tried = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert tried > 0
    assert failed == 0


def test_the_python_page_names_every_option_field_and_preset() -> None:
    """What `wazn.estimate` takes and gives back is documented by name."""
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    fields = Estimate.__dataclass_fields__
    missing = [name for name in (*OPTION_NAMES, *fields) if f"`{name}`" not in page]
    presets = [name for name in PRECISIONS if f'`"{name}"`' not in page]
    assert (missing, presets) == ([], [])


def test_the_readme_begins_with_the_two_commands() -> None:
    """On the first screen: one command that answers about a real model, one that runs all tests."""
    first_screen = (ROOT / "README.md").read_text("utf-8").splitlines()[:40]
    assert any(line.startswith("scripts/wazn estimate ") for line in first_screen)
    assert "scripts/test" in first_screen
