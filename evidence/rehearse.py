"""Rehearse measured rows with the versions of their sources, store what came of it, and write the table.

Each setup runs in a process of its own, whose PYTHONPATH leads to the pinned packages; rows of one setup share it.
What is stored already is not run again, unless asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evidence.environments import CACHE, Environment, install, python_path, read_environments
from evidence.results import REHEARSED, Result, read_results, write_results
from evidence.rows import Row, read_rows
from evidence.setups import LeftOut, Setup, setup_of
from evidence.table import explanations, table, write_into

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "accuracy.md"


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/rehearse_evidence", description=__doc__)
    parser.add_argument(
        "rows", nargs="*", help="patterns (regular expressions) on the rows' ids; none: all rows"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder of the packages (%(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="run what is stored already, too")
    parser.add_argument(
        "--table",
        action="store_true",
        help="run nothing: print the table and write it into the page",
    )
    given = parser.parse_args(arguments)
    rows = read_rows()
    if not given.table:
        _rehearse_all(rows, given.rows, given.cache, again=given.again)
    text = table(rows, read_results(), explanations(), read_environments())
    write_into(_PAGE, text)
    sys.stdout.write(text)
    return 0


def _rehearse_all(rows: list[Row], patterns: list[str], cache: Path, *, again: bool) -> None:
    environments = read_environments()
    results = {result.row: result for result in read_results()} if REHEARSED.exists() else {}
    answers: dict[str, dict[str, Any]] = {}
    if not again:
        answers = {result.setup: dict(result.answer()) for result in results.values()}
    for row, setup in _asked(rows, patterns, environments):
        if setup.key not in answers:
            sys.stderr.write(f"{row.id}: {setup.config}, {setup.plugins or 'no plugins'} ... ")
            sys.stderr.flush()
            answers[setup.key] = _run(setup, environments[setup.environment], cache)
        answer = answers[setup.key]
        if "error" in answer:
            sys.stderr.write(f"{row.id}: {answer['error']}\n")
            continue
        result = Result.of(row, setup, answer)
        results[row.id] = result
        sys.stderr.write(f"{row.id} {row.peak_metric}: {result.describe()}\n")
        write_results(results[row.id] for row in rows if row.id in results)


def _asked(
    rows: Iterable[Row], patterns: list[str], environments: Mapping[str, Environment]
) -> Iterable[tuple[Row, Setup]]:
    for row in rows:
        if patterns and not any(re.search(pattern, row.id) for pattern in patterns):
            continue
        setup = setup_of(row, environments)
        if not isinstance(setup, LeftOut):
            yield row, setup


def _run(setup: Setup, environment: Environment, cache: Path) -> dict[str, Any]:
    """Run the worker; its last line is the answer."""
    folders = install(environment, cache)
    variables = {
        **os.environ,
        "PYTHONPATH": python_path(folders, _ROOT / "src", _ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    finished = subprocess.run(
        [sys.executable, "-m", "evidence.worker"],
        input=json.dumps(asdict(setup)),
        capture_output=True,
        text=True,
        env=variables,
        cwd=_ROOT,
        check=False,
    )
    lines = finished.stdout.strip().splitlines()
    if finished.returncode or not lines:
        return {"error": f"exit status {finished.returncode}: {finished.stderr[-2000:]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        sys.stderr.write(finished.stderr[-3000:])
    return answer


if __name__ == "__main__":
    raise SystemExit(main())
