"""The catalogue as tables for people: plain text, no colours, the same on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wazn.cluster import Gpu
from wazn.facts.gpus import LowestPrice
from wazn.facts.models import CatalogueModel
from wazn.units import format_size

__all__ = ["Column", "gpus_table", "models_table", "text_table"]

_GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column; on a terminal that is too narrow the columns with the highest `drop` go first, those with 0 never."""

    heading: str
    right: bool = False
    drop: int = 0


def text_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None
) -> str:
    """Return an aligned table that fits `width`; None (a pipe, a file) keeps every column."""
    shown = list(range(len(columns)))
    widths = [
        max(len(column.heading), *(len(row[i]) for row in rows), 0)
        for i, column in enumerate(columns)
    ]
    while width is not None and sum(widths[i] + len(_GAP) for i in shown) - len(_GAP) > width:
        least = max(shown, key=lambda i: (columns[i].drop, i))
        if columns[least].drop == 0:
            break
        shown.remove(least)

    def line(cells: Sequence[str]) -> str:
        parts = (
            cells[i].rjust(widths[i]) if columns[i].right else cells[i].ljust(widths[i])
            for i in shown
        )
        return _GAP.join(parts).rstrip()

    return "\n".join([line([column.heading for column in columns]), *(line(row) for row in rows)])


def _human_count(number: int) -> str:
    """Write a number of parameters as people say it: three digits and a unit.

    >>> _human_count(8_030_261_248), _human_count(134_515_008)
    ('8.03 B', '135 M')
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            value = number / size
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return str(number)


_MODEL_COLUMNS = (
    Column(heading="model"),
    Column(heading="family", drop=3),
    Column(heading="parameters", right=True),
    Column(heading="counted", drop=1),
    Column(heading="published count", drop=2),
)


def models_table(
    models: Sequence[CatalogueModel], *, families: frozenset[str], width: int | None
) -> str:
    """Return the models with their parameters, whether the tape counts them, and how sure the count is."""
    rows = [
        (
            model.id,
            model.family,
            _human_count(model.parameters),
            "yes" if model.family in families else "no",
            model.status,
        )
        for model in models
    ]
    return text_table(_MODEL_COLUMNS, rows, width=width)


_GPU_COLUMNS = (
    Column(heading="gpu"),
    Column(heading="name", drop=6),
    Column(heading="usable", right=True),
    Column(heading="basis", drop=2),
    Column(heading="GB/s", right=True, drop=4),
    Column(heading="bf16", drop=3),
    Column(heading="fp8", drop=3),
    Column(heading="USD/h from", right=True, drop=1),
    Column(heading="seen", drop=5),
)


def gpus_table(gpus: Sequence[tuple[Gpu, LowestPrice | None]], *, width: int | None) -> str:
    """Return the GPUs with what PyTorch can use of them, their speed, and the lowest dated on-demand price."""
    rows = [
        (
            gpu.id,
            gpu.name,
            format_size(gpu.usable_bytes),
            gpu.usable_basis,
            "?" if gpu.memory_bandwidth_gb_s is None else f"{gpu.memory_bandwidth_gb_s:.0f}",
            "yes" if gpu.supports_bf16 else "no",
            "yes" if gpu.supports_fp8 else "no",
            "" if price is None else f"{price.usd_per_gpu_hour:.2f}",
            "" if price is None else f"{price.date} {price.provider}",
        )
        for gpu, price in gpus
    ]
    return text_table(_GPU_COLUMNS, rows, width=width)
