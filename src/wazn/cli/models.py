"""`wazn models`: the catalogue of models, all or those that a query means."""

from __future__ import annotations

import click

from wazn.cli.base import Command, common_options, require_english, terminal_width
from wazn.facts.models import CatalogueModel, search_models
from wazn.model.config import supported_families
from wazn.report.tables import models_table

__all__ = ["command"]


@click.command(cls=Command)
@click.argument("query", nargs=-1)
@common_options
def command(query: tuple[str, ...], output_format: str, lang: str) -> None:
    """List and search the models of the catalogue.

    QUERY: words of a name or a family, such as `llama 8b`; without one, all models. Other models work too: by their
    Hugging Face id, or from a folder with a config.json.

    "parameters" come from the configuration. "counted" says whether a run is counted in milliseconds; the others are
    rehearsed with the real library code, in seconds, where torch is installed (`wazn trace`). "published count"
    says how the number agrees with the published total of the checkpoint: exact; exact after exclusions (of what
    transformers does not build); within 0.2%; label-only (none is published, only a name such as 7B); same count as its
    base (the base's total is published); fitted field (a size of the configuration was inferred from the total).
    """
    require_english(lang)
    models = search_models(" ".join(query))
    families = frozenset(supported_families())
    if output_format == "json":
        import json

        answer = {
            "schema": "wazn.models/1",
            "models": [_as_json(model, families) for model in models],
        }
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        click.echo(models_table(models, families=families, width=terminal_width()))


def _as_json(model: CatalogueModel, families: frozenset[str]) -> dict[str, object]:
    return {
        "id": model.id,
        "family": model.family,
        "num_parameters": model.parameters,
        "published_parameters": model.published_parameters,
        "status": model.status,
        "supported": model.family in families,
    }
