"""The table of the page: how far the rehearsals are from what was measured, by source, method and metric.

Rows that differ only in kernels or library versions are not independent of one another: they make one configuration,
which counts once, with the error of its worst row.
"""

from __future__ import annotations

import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence.environments import Environment
from evidence.results import Result
from evidence.rows import Row
from evidence.setups import LeftOut, setup_of
from wazn.units import ceil_div

__all__ = [
    "BEGIN",
    "END",
    "Statistics",
    "configuration_of",
    "errors_by_configuration",
    "explanations",
    "in_page",
    "table",
    "write_into",
]

BEGIN = "<!-- written by scripts/rehearse_evidence: begin -->"
END = "<!-- written by scripts/rehearse_evidence: end -->"
FAR = 0.03  # beyond it a row needs an explanation
_EXPLAINED = Path(__file__).with_name("explained.toml")
_METRICS = {
    "max_memory_allocated": "allocated",
    "max_memory_reserved": "reserved",
    "nvidia-smi": "nvidia-smi",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Of relative errors: of their sizes the median, the 90th percentile (nearest rank) and the largest; their mean."""

    median: float
    p90: float
    worst: float
    bias: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Statistics:
        """Sum up at least one error.

        >>> Statistics.of([0.01, -0.02, 0.03])
        Statistics(median=0.02, p90=0.03, worst=0.03, bias=0.006666666666666666)
        """
        signed = list(errors)
        sizes = sorted(abs(error) for error in signed)
        return cls(
            median=statistics.median(sizes),
            p90=sizes[ceil_div(9 * len(sizes), 10) - 1],
            worst=max(signed, key=abs),
            bias=statistics.fmean(signed),
        )


def explanations(file: Path = _EXPLAINED) -> dict[str, tuple[str, str]]:
    """Return cause and proof by row id, from `explained.toml`."""
    found: dict[str, tuple[str, str]] = {}
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["explained"]:
        found |= dict.fromkeys(entry["rows"], (entry["cause"], entry["proof"]))
    return found


def configuration_of(row: Row) -> tuple[object, ...]:
    """Return what makes rows one configuration: everything but kernels and versions."""
    model = row.model.rpartition("/")[2].removesuffix("-GPTQ")
    adapters = (row.lora_rank, row.lora_targets)
    sizes = (row.micro_batch, row.seq_len)
    return (row.source_repo, model, row.method, row.quant, *adapters, *sizes, row.gpu)


def errors_by_configuration(
    rows: Iterable[Row], results: Mapping[str, Result], metric: str
) -> dict[tuple[object, ...], float]:
    """Return the error of the worst row of each configuration, for rows of one metric that were measured."""
    worst: dict[tuple[object, ...], float] = {}
    for row in rows:
        result = results.get(row.id)
        if row.peak_metric != metric or result is None or result.error is None:
            continue
        key = configuration_of(row)
        worst[key] = max(worst.get(key, 0.0), result.error, key=abs)
    return worst


def table(
    rows: list[Row],
    results: list[Result],
    explained: Mapping[str, tuple[str, str]],
    environments: Mapping[str, Environment],
) -> str:
    """Return everything between the page's marks."""
    by_row = {result.row: result for result in results}
    lines = [
        "| metric | source | method | rows | configurations | median | p90 | worst | bias |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for metric, name in _METRICS.items():
        measured = [row for row in rows if row.peak_metric == metric and _has_error(row, by_row)]
        groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in measured:
            groups[_source(row, by_row[row.id]), _method(row)].append(row)
        for (source, method), members in sorted(groups.items()):
            lines.append(_line(name, source, method, members, by_row, metric))
        if len(groups) > 1:
            lines.append(_line(f"**{name}**", "all", "all", measured, by_row, metric))
    parts = ["\n".join(lines), _verdicts(rows, by_row), _left_out(rows, environments)]
    parts.append(_far(rows, by_row, explained))
    return "\n\n".join(part for part in parts if part) + "\n"


def _has_error(row: Row, results: Mapping[str, Result]) -> bool:
    result = results.get(row.id)
    return result is not None and result.error is not None


def _source(row: Row, result: Result) -> str:
    return f"{row.source_repo.rpartition('/')[2]}, transformers {result.versions['transformers']}"


def _method(row: Row) -> str:
    names = {"qlora": "QLoRA", "lora": "LoRA", "dora": "DoRA"}
    return "QLoRA on GPTQ" if row.quant.startswith("gptq") else names.get(row.method, row.method)


def _line(
    name: str, source: str, method: str, rows: list[Row], results: Mapping[str, Result], metric: str
) -> str:
    errors = errors_by_configuration(rows, results, metric)
    if all(results[row.id].length == "inferred" for row in rows):
        name += ", length inferred"
    found = Statistics.of(errors.values())
    sizes = f"{_percent(found.median)} | {_percent(found.p90)}"
    signed = f"{_signed(found.worst)} | {_signed(found.bias)}"
    return f"| {name} | {source} | {method} | {len(rows)} | {len(errors)} | {sizes} | {signed} |"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3f} %"


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.3f} %"


def _verdicts(rows: list[Row], results: Mapping[str, Result]) -> str:
    failed = [results[row.id] for row in rows if row.outcome == "oom" and row.id in results]
    if not failed:
        return ""
    right = sum(result.verdict == "does-not-fit" for result in failed)
    went_well = [result for result in results.values() if result.measured_bytes is not None]
    wrong = {result.setup for result in went_well if result.verdict == "does-not-fit"}
    return (
        f"Of {len(failed)} runs that ran out of memory, {right} do so in the rehearsal; of the "
        f"{len({result.setup for result in went_well})} setups that ran through, {len(wrong)} do not."
    )


def _left_out(rows: list[Row], environments: Mapping[str, Environment]) -> str:
    reasons = Counter(
        (row.source_repo, found.reason)
        for row in rows
        if isinstance(found := setup_of(row, environments), LeftOut)
    )
    lines = ["| not compared | rows | why |", "|---|---|---|"]
    lines += [f"| {repo} | {number} | {why} |" for (repo, why), number in sorted(reasons.items())]
    return "\n".join(lines)


def _far(
    rows: list[Row], results: Mapping[str, Result], explained: Mapping[str, tuple[str, str]]
) -> str:
    """List the rows beyond 3 % that PyTorch measured, with their causes."""
    by_cause: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        error = results[row.id].error if row.id in results else None
        if row.peak_metric != "nvidia-smi" and error is not None and abs(error) > FAR:
            why = explained.get(row.id, ("Not explained.", ""))
            by_cause[why].append(f"`{row.id}` {_signed(error)}")
    if not by_cause:
        return "No row that PyTorch measured is further off than 3 %."
    lines = ["Further off than 3 %, of what PyTorch measured:", ""]
    for (cause, proof), names in by_cause.items():
        lines.append(f"- {', '.join(names)}: {cause} {proof}")
    return "\n".join(lines)


def in_page(page: str) -> str:
    """Return what stands between the marks of a page."""
    return page.partition(BEGIN + "\n")[2].partition(END)[0]


def write_into(file: Path, text: str) -> None:
    """Put a text between the page's marks."""
    page = file.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file}: the marks `{BEGIN}` and `{END}` are not there")
    file.write_text(before + begin + text + end + after, encoding="utf-8")
