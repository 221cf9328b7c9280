"""Environments with the library versions of a source: one folder per package and version, joined by PYTHONPATH.

Packages come from the index that pip is set up for, without their dependencies; torch and everything that is not
pinned are those of the running interpreter. A folder that exists is not fetched again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHE", "Environment", "install", "python_path", "read_environments"]

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "wazn" / "environments"
_FILE = Path(__file__).with_name("environments.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Pinned versions, by package, for the rows of the `sources` (paths within their repository).

    torch: of the runs; the rehearsal runs on the installed one, and imitates what is known to differ (`old_torch`).
    """

    name: str
    sources: tuple[str, ...]
    torch: str
    pins: Mapping[str, str]


def read_environments(file: Path = _FILE) -> dict[str, Environment]:
    """Return the environments of `environments.toml` by name."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))["environment"]
    return {
        table["name"]: Environment(
            name=table["name"],
            sources=tuple(table["sources"]),
            torch=table["torch"],
            pins=table["pins"],
        )
        for table in tables
    }


def install(environment: Environment, cache: Path) -> list[Path]:
    """Fetch what is missing in `cache`; return the folders of all pinned packages.

    Raises: subprocess.CalledProcessError where pip fails.
    """
    folders = []
    for package, version in environment.pins.items():
        folder = cache / f"{package}-{version}"
        if not folder.exists():
            _fetch(package, version, folder)
        folders.append(folder)
    return folders


def _fetch(package: str, version: str, folder: Path) -> None:
    """Install into a folder beside the wanted one first, so that what exists is whole."""
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run(
        [
            *command,
            "--disable-pip-version-check",
            "--target",
            str(unfinished),
            f"{package}=={version}",
        ],
        check=True,
        stdout=sys.stderr,
    )
    unfinished.rename(folder)


def python_path(folders: list[Path], *more: Path) -> str:
    """Return the value of PYTHONPATH: the pinned packages, then `more`."""
    return os.pathsep.join(str(folder) for folder in [*folders, *more])
