"""What the real libraries were seen to do, stored: one file of cases for each file of tests.

    def test_sdpa(name: str, golden: Golden) -> None:
        assert_agree(golden.op(lambda: real_layer(CONFIGS[name])), tape_layer(CONFIGS[name]))

The tape is compared with the stored numbers, for which no torch is needed; when it is the case's turn (see
`tests.sampling`) and the versions that were seen are installed, the real thing runs too, and must give what is stored.
`WAZN_GOLDEN=write` (`scripts/golden`) runs everything for real and stores it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sampling import is_due

if TYPE_CHECKING:
    from wazn.trace.specs import OpTrace

FOLDER = Path(__file__).parent / "golden"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
WRITING = os.environ.get("WAZN_GOLDEN") == "write"

Peaks = dict[tuple[int, str], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The numbers of an `OpTrace` that are compared: its levels and peaks, and what was allocated, in order."""

    kept_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int
    allocated: dict[str, list[int]]

    def changes(self, phase: str) -> list[int]:
        """Return what was allocated in a phase; frees are not stored."""
        return self.allocated[phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """The stored result of one test."""

    file: str
    case: str
    record: Callable[[Any], None]  # of what was seen now

    def op(self, measure: Callable[[], OpTrace]) -> Seen:
        """Return what an operation or a layer held when it was seen."""
        return _unpack(self.value(lambda: _pack(measure())))

    def peaks(self, measure: Callable[[], Peaks]) -> Peaks:
        """Return the peaks of a run, by step and phase, when it was seen."""
        stored = self.value(
            lambda: {f"{step} {phase}": n for (step, phase), n in measure().items()}
        )
        split = {tuple(key.split(" ", 1)): num_bytes for key, num_bytes in stored.items()}
        return {(int(step), phase): num_bytes for (step, phase), num_bytes in split.items()}

    def value(self, measure: Callable[[], Any]) -> Any:
        """Return what was stored of `measure()`, which gives plain JSON, and make sure of it when it is its turn."""
        if WRITING:
            seen = measure()
            self.record(seen)
            return seen
        stored = load(self.file)["cases"]
        assert self.case in stored, f"{self.case} is not stored yet: scripts/golden {self.file}"
        if is_due(f"{self.file} {self.case}") and load(self.file)["versions"] == installed():
            assert measure() == stored[self.case], "the libraries no longer do what is stored"
        return stored[self.case]


@cache
def load(file: str) -> dict[str, Any]:
    """Return the versions and the cases of a file; none if there is no such file."""
    path = FOLDER / f"{file}.json"
    if not path.exists():
        return {"versions": installed(), "cases": {}}
    return dict(json.loads(path.read_text("utf-8")))


def store(file: str, seen: dict[str, Any]) -> None:
    """Add cases to a file, one line each.

    Raises: RuntimeError if the file's other cases were seen with other versions.
    """
    old = load(file)
    if old["versions"] != installed():
        raise RuntimeError(f"{file}.json was seen with {old['versions']}; delete it first")
    cases = {**old["cases"], **seen}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(cases[key])}" for key in sorted(cases))
    FOLDER.mkdir(exist_ok=True)
    head = json.dumps(installed())
    (FOLDER / f"{file}.json").write_text(f'{{"versions": {head}, "cases": {{\n{lines}\n}}}}\n')


@cache
def installed() -> dict[str, str | None]:
    """Return the versions that the numbers depend on, None for what is not there; CPU and CUDA builds are one."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = None
    return found


def _pack(trace: OpTrace) -> dict[str, Any]:
    levels = (
        trace.kept_bytes,
        trace.saved_bytes,
        trace.forward_peak_bytes,
        trace.backward_peak_bytes,
        trace.gradient_bytes,
    )
    packed: dict[str, Any] = {"levels": " ".join(map(str, levels))}
    for phase in ("forward", "backward"):
        packed[phase] = runs(size for size in trace.changes(phase) if size > 0)
    return packed


def _unpack(packed: dict[str, Any]) -> Seen:
    kept, saved, forward_peak, backward_peak, gradient = map(int, packed["levels"].split())
    return Seen(
        kept_bytes=kept,
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        gradient_bytes=gradient,
        allocated={phase: sizes_of(packed[phase]) for phase in ("forward", "backward")},
    )


def runs(sizes: Iterable[int]) -> str:
    """Write sizes in order, equal neighbours once.

    >>> runs([512, 2048, 2048, 2048])
    '512 2048*3'
    """
    counted = ((size, len(list(same))) for size, same in groupby(sizes))
    return " ".join(f"{size}*{count}" if count > 1 else str(size) for size, count in counted)


def sizes_of(text: str) -> list[int]:
    """Read what `runs` wrote."""
    sizes = []
    for part in text.split():
        size, _, count = part.partition("*")
        sizes += [int(size)] * int(count or 1)
    return sizes
