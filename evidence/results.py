"""What rehearsals came to, beside what was measured: one line a row in `rehearsed.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from evidence.rows import Row
from evidence.setups import Setup

__all__ = ["REHEARSED", "Result", "read_results", "write_results"]

REHEARSED = Path(__file__).with_name("rehearsed.jsonl")

_OF_METRIC = {
    "max_memory_allocated": "allocated_bytes",
    "max_memory_reserved": "reserved_bytes",
    "nvidia-smi": "device_bytes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A rehearsed row.

    setup: the key of what was run; rows of one setup share all but the measurement.
    length: of the batches: `fixed`, or `inferred` from another row.
    metric, measured_bytes: of the row; None where the run ran out of memory.
    device_bytes: reserved and the CUDA context, as nvidia-smi would show it.
    left_bytes: allocated when training has ended; measured_left_bytes where the source says it.
    verdict: whether the card holds it: `fits`, `tight`, `does-not-fit`.
    seconds: of the whole rehearsal, imports left out.
    """

    row: str
    setup: str
    environment: str
    length: str
    versions: Mapping[str, str]
    metric: str
    measured_bytes: int | None
    measured_left_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    left_bytes: int
    phase: str
    step: int
    verdict: str
    seconds: float

    @classmethod
    def of(cls, row: Row, setup: Setup, answer: Mapping[str, Any]) -> Self:
        """Put a row and the answer of its setup's rehearsal together."""
        return cls(
            row=row.id,
            setup=setup.key,
            environment=setup.environment,
            length=setup.length,
            metric=row.peak_metric,
            measured_bytes=row.peak_bytes if row.outcome == "ok" else None,
            measured_left_bytes=row.left_bytes if row.outcome == "ok" else None,
            **answer,
        )

    def answer(self) -> Mapping[str, Any]:
        """What the rehearsal said, without the row."""
        of_row = (
            "row",
            "setup",
            "environment",
            "length",
            "metric",
            "measured_bytes",
            "measured_left_bytes",
        )
        return {name: value for name, value in asdict(self).items() if name not in of_row}

    @property
    def rehearsed_bytes(self) -> int:
        """The rehearsed figure of the row's own metric."""
        figure: int = getattr(self, _OF_METRIC[self.metric])
        return figure

    @property
    def error(self) -> float | None:
        """Rehearsed over measured, less one; None where nothing was measured."""
        return (
            None if self.measured_bytes is None else self.rehearsed_bytes / self.measured_bytes - 1
        )

    def describe(self) -> str:
        """One line for the desk."""
        if self.error is None:
            return f"ran out of memory; rehearsed: {self.verdict}"
        return (
            f"{self.rehearsed_bytes:,} for {self.measured_bytes:,} bytes, {100 * self.error:+.4f} %, "
            f"{self.phase}, {self.seconds} s"
        )


def read_results(file: Path = REHEARSED) -> list[Result]:
    """Return what is stored, in the order of the rows."""
    names = {field.name for field in fields(Result)}
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        found.append(
            Result(**{key: value for key, value in json.loads(line).items() if key in names})
        )
    return found


def write_results(results: Iterable[Result], file: Path = REHEARSED) -> None:
    """Store results, each with its error for readers."""
    with file.open("w", encoding="utf-8") as stream:
        for result in results:
            error = None if result.error is None else round(result.error, 7)
            stream.write(json.dumps({**asdict(result), "error": error}) + "\n")
