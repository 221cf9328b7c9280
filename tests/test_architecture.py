"""The rules of the house: the front door, what starts up, which room imports which."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import wazn

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "wazn"

# What starting must not load: half a second and hundreds of megabytes for arithmetic on integers.
HEAVY = {
    "accelerate", "asyncio", "bitsandbytes", "fastapi", "huggingface_hub", "mcp", "numpy", "pandas",
    "peft", "pydantic", "rich", "tomllib", "torch", "transformers", "trl", "typer", "unittest",
    "uvicorn", "yaml",
}  # fmt: skip


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def command(arguments: list[str]) -> str:
    """Return a statement that runs the command line in this interpreter."""
    return (
        "import contextlib\nfrom wazn.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({arguments!r})"
    )


def test_the_front_door_is_one_sorted_list() -> None:
    """`wazn.__all__` is sorted, without duplicates, and every name on it exists."""
    assert list(wazn.__all__) == sorted(set(wazn.__all__))
    for name in wazn.__all__:
        assert getattr(wazn, name) is not None


@pytest.mark.parametrize(
    "statement",
    [
        "import wazn",
        command(["--version"]),
        command(["--help"]),
        command(["calc", "training", "--params", "7B", "--optimizer", "adam"]),
        command(["no-such-command"]),
    ],
    ids=["import", "version", "help", "calc", "mistake"],
)
def test_starting_loads_nothing_heavy(statement: str) -> None:
    """Neither `import wazn` nor a command that needs none of them loads a heavy library."""
    assert modules_after(statement) & HEAVY == set()


def test_importing_wazn_does_not_load_the_command_line() -> None:
    """A program that uses the library does not pay for the door of people."""
    assert "click" not in modules_after("import wazn")


def test_a_module_ends_before_one_loses_the_thread() -> None:
    """No source file has more than 700 lines: past that, there is a seam to be found."""
    lengths = {path: path.read_text("utf-8").count("\n") for path in SOURCE.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 700} == {}


def test_every_test_states_the_fact_that_it_proves() -> None:
    """A test without a docstring proves something that nobody wrote down."""
    silent = [
        f"{path.name}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_the_layers_are_checked_in_ci() -> None:
    """The contracts name every room that exists, and `scripts/lint`, which CI runs, checks them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(c for c in contracts if c["type"] == "layers")
    assert layers["exhaustive"] is True
    named = {room.strip(" ()") for layer in layers["layers"] for room in layer.split("|")}
    rooms = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith("__")
    }
    assert rooms - named - set(layers["exhaustive_ignores"]) - {"py.typed"} == set()
    assert "lint-imports" in (ROOT / "scripts" / "lint").read_text()


def test_the_version_is_written_once() -> None:
    """`wazn --version`, the installed metadata and the module agree."""
    from importlib.metadata import version

    from wazn._version import __version__

    assert version("wazn") == __version__


def test_the_base_install_is_small() -> None:
    """Two dependencies, neither of them with a compiled part of its own."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert sorted(d.partition(">")[0] for d in dependencies) == ["click", "huggingface_hub"]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """What a stranger runs is what CI runs."""
    assert "exec scripts/test\n" in (ROOT / ".ci" / "run").read_text()
    assert "scripts/test\n" in (ROOT / "README.md").read_text()
