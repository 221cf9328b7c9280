"""`wazn gpus`: the catalogue of GPUs, all or those that a query means."""

from __future__ import annotations

import click

from wazn.cli.base import Command, common_options, require_english, terminal_width
from wazn.cluster import Gpu
from wazn.facts.gpus import LowestPrice, lowest_price, search_gpus
from wazn.report.tables import gpus_table

__all__ = ["command"]


@click.command(cls=Command)
@click.argument("query", nargs=-1)
@common_options
def command(query: tuple[str, ...], output_format: str, lang: str) -> None:
    """List and search the GPUs of the catalogue.

    QUERY: a name as people write it, such as `4090` or `a100 80gb`; without one, all GPUs. "usable" is what PyTorch can
    have: seen on such a card (measured), or its size less the gap of its kind (assumed). Prices are the lowest on
    demand, per GPU and hour, and as old as their date.
    """
    require_english(lang)
    gpus = [(gpu, lowest_price(gpu.id)) for gpu in search_gpus(" ".join(query))]
    if output_format == "json":
        import json

        answer = {"schema": "wazn.gpus/1", "gpus": [_as_json(gpu, price) for gpu, price in gpus]}
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(gpus_table(gpus, width=terminal_width()))


def _as_json(gpu: Gpu, price: LowestPrice | None) -> dict[str, object]:
    return {
        "id": gpu.id,
        "name": gpu.name,
        "vendor": gpu.vendor,
        "arch": gpu.arch,
        "compute_capability": gpu.compute_capability,
        "memory_gb": gpu.memory_gb,
        "usable_bytes": gpu.usable_bytes,
        "usable_basis": gpu.usable_basis,
        "usable_reference": gpu.usable_reference,
        "memory_bandwidth_gb_s": gpu.memory_bandwidth_gb_s,
        "supports_bf16": gpu.supports_bf16,
        "supports_fp8": gpu.supports_fp8,
        "lowest_price": None if price is None else price._asdict(),
    }
