"""Prepare `stacks.toml` for reading in a fraction of a millisecond: `python -m wazn.facts._build_stacks`.

What is made of it lies in `prepared/stacks.json` and is never edited. A test holds the two equal. Nothing but
the test and whoever prepares the tables imports this module.
"""

from __future__ import annotations

import json
import os
import tomllib
from typing import Any

from wazn.facts.stacks import PREPARED, RULED_FIELDS
from wazn.facts.store import FOLDER

__all__ = ["build_stacks", "load_stacks", "main", "minor_releases", "versions_of"]

_Row = dict[str, Any]


def load_stacks() -> _Row:
    """Return the readable table."""
    with open(os.path.join(FOLDER, "stacks.toml"), "rb") as file:
        return tomllib.load(file)


def minor_releases(table: _Row) -> list[str]:
    """Return the minor releases, oldest first: `4.40`, ..."""
    return [row[0].rpartition(".")[0] for row in table["stack"]["releases"]]


def versions_of(text: str, minors: list[str]) -> range:
    """Return the positions in `minors` that `4.40..4.45` or `4.49..` names.

    Raises: ValueError when a release is not in the list or the ends are in the wrong order.
    """
    first, _, last = text.partition("..")
    start = minors.index(first)
    stop = minors.index(last) + 1 if last else len(minors)
    if start >= stop:
        raise ValueError(f"`{text}` names no release")
    return range(start, stop)


def _ruled(table: _Row, field: str, minors: list[str]) -> dict[tuple[str, int], Any]:
    """Return the value of one field for each (family, position of a release) at which the family exists.

    Raises: ValueError when two entries name the same place, or none does.
    """
    since = {family: minors.index(minor) for family, minor in table["families"].items()}
    general: dict[int, Any] = {}
    named: dict[tuple[str, int], Any] = {}
    for entry in table[field]:
        for version in versions_of(entry["versions"], minors):
            if "families" not in entry:
                if version in general:
                    raise ValueError(f"`{field}`: two general entries for {minors[version]}")
                general[version] = entry["value"]
            for family in entry.get("families", ()):
                if (family, version) in named:
                    raise ValueError(f"`{field}`: two entries for {family} at {minors[version]}")
                if version < since[family]:
                    raise ValueError(f"`{field}`: {family} is not in {minors[version]}")
                named[family, version] = entry["value"]
    places = [(family, v) for family in since for v in range(since[family], len(minors))]
    for family, version in places:
        if (family, version) not in named and version not in general:
            raise ValueError(f"`{field}`: nothing for {family} at {minors[version]}")
    return {place: named[place] if place in named else general[place[1]] for place in places}


def build_stacks() -> _Row:
    """Return what `facts.stacks` reads: the distinct rows of habits, and which one each family has from which release.

    {"minors": [...], "families": {family: [[position of the first release, row], ...]}, "fields": [...],
    "rows": [[...], ...], "loss_programs": {name: {...}}}

    Raises: ValueError when the table contradicts itself or leaves something open.
    """
    table = load_stacks()
    minors = minor_releases(table)
    ruled = {field: _ruled(table, field, minors) for field in RULED_FIELDS}
    rows: list[list[Any]] = []
    families: dict[str, list[list[int]]] = {}
    for family, since in sorted(table["families"].items()):
        spans: list[list[int]] = []
        for version in range(minors.index(since), len(minors)):
            row = [ruled[field][family, version] for field in RULED_FIELDS]
            if row not in rows:
                rows.append(row)
            index = rows.index(row)
            if not spans or spans[-1][1] != index:
                spans.append([version, index])
        families[family] = spans
    programs = {
        program["name"]: {key: value for key, value in program.items() if key != "name"}
        for program in table["loss_program"]
    }
    return {
        "minors": minors,
        "families": families,
        "fields": list(RULED_FIELDS),
        "rows": rows,
        "loss_programs": programs,
    }


def main() -> None:
    """Write the prepared form."""
    with open(PREPARED, "w", encoding="utf-8") as file:
        json.dump(build_stacks(), file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
