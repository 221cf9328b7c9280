"""What holds the peak, summed by module, line of code, operation or category: rows, largest first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from wazn.errors import InputError
from wazn.estimation.answer import Estimate, Holder
from wazn.model.fields import printable
from wazn.units import GIB, format_ratio, format_size

__all__ = ["BY", "Row", "holder_lines", "holder_rows"]

BY = ("module", "line", "op", "category")
MOST_ROWS = 15
_SMALLEST_ROW = 1000  # what holds less than a thousandth goes with the rest
_LONGEST_NAME = 200


class Row(NamedTuple):
    """One name with what it holds; `times` counts the layers that were summed."""

    name: str
    num_bytes: int
    times: int


def holder_rows(answer: Estimate, by: str) -> tuple[Row, ...]:
    """Return the holders of the peak summed by `by`, one of `BY`, largest first; they sum to the allocated peak.

    Layers are summed: `model.layers.*.mlp` stands for that module in all of them.

    Raises: InputError for a counted answer, which knows no modules and lines.
    """
    if by not in BY:
        raise InputError(f"`--by`: expected one of {', '.join(BY)}, found `{by[:40]}`")
    if answer.rehearsed is None and by in ("module", "line"):
        raise InputError(
            f"`--by {by}`: a counted run knows no {by}s", hint="`wazn trace`, or `--by op`"
        )
    sums: dict[str, int] = {}
    members: dict[str, set[str]] = {}
    for holder in answer.holders:
        exact = _name(holder, by)
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", exact) if by == "module" else exact
        sums[name] = sums.get(name, 0) + holder.num_bytes
        members.setdefault(name, set()).add(exact)
    rows = (Row(name, num_bytes, len(members[name])) for name, num_bytes in sums.items())
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def _name(holder: Holder, by: str) -> str:
    if by == "category":
        return holder.category
    if by == "op":
        return holder.op
    return (holder.module if by == "module" else holder.line) or "(elsewhere)"


def holder_lines(answer: Estimate, by: str, *, width: int) -> Iterator[str]:
    """Yield the rows for people: the largest, and the rest in one."""
    rows = holder_rows(answer, by)
    whole = answer.peak.allocated_bytes
    shown = [row for row in rows[:MOST_ROWS] if row.num_bytes * _SMALLEST_ROW >= whole]
    rest = rows[len(shown) :]
    yield f"What holds the peak, by {by}:"
    for name, num_bytes, times in shown:
        layers = f" x {times}" if times > 1 else ""
        yield _line(printable(name, longest=_LONGEST_NAME) + layers, num_bytes, whole, width)
    if rest:
        yield _line(f"{len(rest)} more", sum(row.num_bytes for row in rest), whole, width)


def _line(name: str, num_bytes: int, whole: int, width: int) -> str:
    share = format_ratio(num_bytes * 100, max(1, whole), digits=1)
    size = (
        f"  {format_size(num_bytes, unit='MiB' if num_bytes < GIB else 'GiB'):>11} {share:>5} %  "
    )
    room = max(8, width - len(size))
    return size + (name if len(name) <= room else "…" + name[1 - room :])
