"""How far simulate is from trace: the stored matrix as Markdown tables, by family, by term, by whole model.

python -m tests.agreement.table
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from tests.agreement.golden import load
from tests.agreement.matrix import FAMILIES, LEVELS, PEAKS, Held, cases, tape
from tests.agreement.steps import Case
from tests.agreement.whole import WHOLE
from wazn.timeline.events import Category


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One case. `terms`: by name, ours less theirs in bytes and as a fraction: of a level or a peak of itself, of a
    category of the whole peak.
    """

    seen: Held
    terms: Mapping[str, tuple[int, float]]

    @property
    def worst(self) -> float:
        """The largest fraction of all terms."""
        return max(abs(fraction) for _, fraction in self.terms.values())

    @property
    def worst_bytes(self) -> int:
        """The largest difference of all terms."""
        return max(abs(num_bytes) for num_bytes, _ in self.terms.values())


def compare(seen: Held, ours: Held) -> Compared:
    """Lay two runs side by side."""

    def both() -> Iterator[tuple[str, int, int, int]]:
        yield "peak", ours.peak_bytes, seen.peak_bytes, seen.peak_bytes
        for names, mine, theirs in (
            (LEVELS, ours.levels, seen.levels),
            (PEAKS, ours.peaks, seen.peaks),
        ):
            for name, a, b in zip(names, mine, theirs, strict=True):
                yield name, a, b, b
        for category in Category:
            a, b = (held.categories.get(str(category), 0) for held in (ours, seen))
            if a or b:
                yield f"at the peak: {category}", a, b, seen.peak_bytes

    return Compared(seen=seen, terms={name: (a - b, (a - b) / of) for name, a, b, of in both()})


def stored(wanted: Mapping[str, Case], test: str) -> dict[str, Compared]:
    """Compare the stored cases of a test with the tape's."""
    seen = load("test_matrix")["cases"]
    return {
        name: compare(Held.unpacked(seen[f"{test}[{name}]"]), tape(case))
        for name, case in wanted.items()
    }


def percent(fraction: float) -> str:
    """Write a fraction as a percentage."""
    return f"{100 * fraction:.4f} %"


def by_family(matrix: Mapping[str, Compared]) -> Iterator[str]:
    """Yield a line for each family."""
    yield "| family | model, layers | cases | peak, median | peak, worst | any term, worst | in bytes |"
    yield "|---|---|---|---|---|---|---|"
    for family, (model, layers) in FAMILIES.items():
        own = [item for name, item in matrix.items() if name.partition(",")[0] == family]
        yield _line(f"`{family}` | {model}, {layers}", own)
    yield _line("all | ", matrix.values())


def _line(title: str, items: Iterable[Compared]) -> str:
    compared = list(items)
    peaks = [abs(item.terms["peak"][1]) for item in compared]
    columns = (
        len(compared),
        percent(median(peaks)),
        percent(max(peaks)),
        percent(max(item.worst for item in compared)),
        f"{max(item.worst_bytes for item in compared):,}",
    )
    return f"| {title} | {' | '.join(map(str, columns))} |"


def by_term(matrix: Mapping[str, Compared]) -> Iterator[str]:
    """Yield a line for each term."""
    yield "| term | cases | median | worst | in bytes |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(name for item in matrix.values() for name in item.terms):
        own = [item.terms[name] for item in matrix.values() if name in item.terms]
        middle = median(abs(fraction) for _, fraction in own)
        worst = max(abs(fraction) for _, fraction in own)
        most = max(abs(num_bytes) for num_bytes, _ in own)
        yield f"| {name} | {len(own)} | {percent(middle)} | {percent(worst)} | {most:,} |"


def by_model(whole: Mapping[str, Compared]) -> Iterator[str]:
    """Yield a line for each whole model."""
    yield "| run | rehearsed peak, bytes | simulated less rehearsed | any term, worst, bytes |"
    yield "|---|---|---|---|"
    for name, item in whole.items():
        difference_bytes = item.terms["peak"][0]
        yield f"| {name} | {item.seen.peak_bytes:,} | {difference_bytes:+,} | {item.worst_bytes:,} |"


def text() -> str:
    """Return the tables, with the versions that were rehearsed."""
    matrix, whole = stored(cases(), "test_case"), stored(WHOLE, "test_whole")
    versions = load("test_matrix")["versions"].items()
    tables = (by_family(matrix), by_term(matrix), by_model(whole))
    named = ", ".join(f"{name} {number}" for name, number in versions)
    return "\n\n".join([f"Rehearsed with {named}.", *("\n".join(lines) for lines in tables)])


if __name__ == "__main__":
    sys.stdout.write(text() + "\n")
