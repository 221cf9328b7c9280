"""From a model's name, as people write it, to its configuration: the catalogue, a folder, a file, the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.facts.names import fold_model_name, loose_model_name, nearest_names
from wazn.facts.notes import Note
from wazn.facts.store import model_index, model_path

if TYPE_CHECKING:
    from wazn.model.spec import ModelSpec

__all__ = [
    "CatalogueModel",
    "ModelSource",
    "config_notes",
    "list_models",
    "load_model",
    "nearest_models",
    "read_bounded",
    "resolve_model",
    "search_models",
    "spec_of",
]

_LONGEST_NAME = 4096
_HUB_PAGE = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?"
_HUB_ID = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model's `config.json` and where it came from.

    id: the catalogue's id, the folder or file as asked, or the Hub's id.
    path: the file, for error messages; on the Hub `<id>/config.json`.
    published_parameters: the published total of the checkpoint where one is known. It may count what transformers
        does not build (`_published_excluded` in the catalogue's file says what).
    """

    id: str
    mapping: Mapping[str, Any]
    origin: Literal["catalogue", "file", "hub"]
    path: str
    published_parameters: int | None = None
    notes: tuple[Note, ...] = ()


class CatalogueModel(NamedTuple):
    """One line of the catalogue. `parameters` is counted; `status` says how that agrees with the published total."""

    id: str
    family: str
    parameters: int
    published_parameters: int | None
    status: str


def list_models() -> tuple[CatalogueModel, ...]:
    """Return the whole catalogue, by id."""
    return tuple(
        CatalogueModel(model_id, *row) for model_id, row in model_index()["models"].items()
    )


def load_model(text: str) -> ModelSpec:
    """Return the architecture of the model that a person names. Raises: as `resolve_model` and `spec_of`."""
    return spec_of(resolve_model(text))


def spec_of(source: ModelSource) -> ModelSpec:
    """Return the architecture that a configuration describes.

    Raises: InputError; Unsupported, for a model of the catalogue with another one that can be weighed.
    """
    from wazn.model.config import read_config, supported_families

    shown = source.path if source.origin == "file" else source.id
    try:
        return read_config(source.mapping, id=source.id, path=shown)
    except Unsupported as error:
        alike = None
        if (
            source.origin == "catalogue"
            and source.mapping["model_type"] not in supported_families()
        ):
            alike = _alike(source)
        if alike is None:
            raise
        more = f"`{alike.id}` has about its size, {alike.parameters / 10**9:.2g} billion parameters"
        raise Unsupported(error.message, hint=f"{error.hint}; {more}") from None


def _alike(source: ModelSource) -> CatalogueModel | None:
    """The model of the nearest family whose size is the nearest, if it is within a quarter of the size asked."""
    from wazn.model.config import nearest_family

    family = nearest_family(source.mapping["model_type"], source.mapping)
    models = list_models()
    size = next(model.parameters for model in models if model.id == source.id)
    known = [model for model in models if model.family == family]
    alike = min(known, key=lambda model: abs(model.parameters - size), default=None)
    return alike if alike is not None and 4 * abs(alike.parameters - size) <= size else None


def resolve_model(text: str) -> ModelSource:
    """Return the configuration of the model that a person names.

    Tried in this order: a folder with a config.json or such a file; a Hugging Face id or a short name in the
    catalogue (or of a checkpoint with the architecture of one in it); a Hugging Face id on the Hub. Only the last one
    touches the network, and never for a name without a slash.

    Raises: UnknownFact with the nearest names; InputError for an ambiguous name, a bad file, or what the Hub answers.
    """
    asked = text.strip()
    if not asked or len(asked) > _LONGEST_NAME or "\0" in asked:
        raise InputError(
            f"expected a model such as `llama-3.1-8b`, found `{asked[:40]!r}`"
            if asked
            else "expected a model such as `llama-3.1-8b`, found nothing"
        )
    local = _local_config(asked)
    if local is not None:
        return _from_file(asked, local)
    asked = _without_address(asked)
    model_id = _catalogue_id(asked)
    if model_id is not None:
        return _from_catalogue(asked, model_id)
    is_hub_id = re.fullmatch(_HUB_ID, asked, re.ASCII) is not None
    if os.path.lexists(os.path.expanduser(asked)) and "/" in asked:
        raise _no_config_at(asked)  # a path that is there is meant as one
    if is_hub_id and not asked.lower().endswith(".json"):
        from wazn.facts.hub import fetch_config

        return fetch_config(asked)
    if "/" in asked or os.sep in asked or asked.lower().endswith(".json") or os.path.isdir(asked):
        raise _no_config_at(asked)
    nearest = nearest_models(asked)
    hint = (
        None
        if nearest
        else "a Hugging Face id, a folder with config.json, or a name that `wazn models` lists works"
    )
    raise UnknownFact(f"unknown model `{asked[:100]}`", nearest=nearest, hint=hint)


def _without_address(asked: str) -> str:
    """Return the id in the address of a model's page on the Hub, else what was asked."""
    page = re.fullmatch(_HUB_PAGE, asked, re.ASCII)
    return asked if page is None else page[1]


# --- files ---------------------------------------------------------------------------------------


def _local_config(asked: str) -> str | None:
    expanded = os.path.expanduser(asked)
    inside = os.path.join(expanded, "config.json")
    if os.path.isfile(inside):
        return inside
    return expanded if os.path.isfile(expanded) else None


def _no_config_at(asked: str) -> InputError:
    folder = os.path.expanduser(asked)
    if os.path.isfile(os.path.join(folder, "adapter_config.json")):
        return InputError(
            f"{asked} holds an adapter, not a model",
            hint="name its base model (`base_model_name_or_path` in adapter_config.json)",
        )
    if os.path.isdir(folder):
        return InputError(
            f"no config.json in {asked}", hint="name a folder that holds the model's config.json"
        )
    if os.path.islink(folder) and not os.path.exists(folder):
        return InputError(f"{asked} is a link to nothing", hint="name what it should lead to")
    if os.path.exists(folder):
        return InputError(
            f"{asked} is not a regular file",
            hint="name a folder that holds the model's config.json, or that file",
        )
    return InputError(
        f"no such file or folder: {asked}",
        hint="a catalogue name (`wazn models`), a Hugging Face id, a folder or a config.json works",
    )


def _from_file(asked: str, path: str) -> ModelSource:
    from wazn.model.config import parse_config

    mapping = parse_config(read_bounded(path), path=path)
    notes = config_notes(asked, mapping)
    return ModelSource(id=asked, mapping=mapping, origin="file", path=path, notes=notes)


def read_bounded(path: str) -> bytes:
    """Return a configuration file's bytes. Raises: InputError if it cannot be read or is absurdly large."""
    from wazn.model.config import LARGEST_FILE_BYTES

    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise InputError(
            f"{path} is larger than {LARGEST_FILE_BYTES:,} bytes",
            hint="a model's config.json has a few kilobytes; is this another file?",
        )
    return data


def config_notes(model_id: str, mapping: Mapping[str, Any]) -> tuple[Note, ...]:
    """Say what a configuration from elsewhere leaves open.

    A model may bring its own code (`auto_map`), which is never run: what the config describes is counted. Sizes that it
    does not name are those of the family's configuration class, as in transformers.
    """
    from wazn.model.config import sizes_by_default

    notes: list[Note] = []
    if mapping.get("auto_map"):
        notes.append(Note(code="model-code-not-run", params={"model": model_id}))
    missing = sizes_by_default(mapping)
    if missing:
        sizes = ", ".join(f"{key} {value}" for key, value in missing.items())
        params = {"model": model_id, "family": mapping["model_type"], "keys": sizes}
        notes.append(Note(code="config-defaults", params=params))
    return tuple(notes)


# --- the catalogue -------------------------------------------------------------------------------


def _catalogue_id(asked: str) -> str | None:
    """The entry that a name means, or None. Raises: InputError if it means several."""
    index = model_index()
    exact: str | None = index["ids"].get(asked.lower())
    if exact is not None or "/" in asked:
        return exact
    folded = fold_model_name(asked)
    found: list[str] = index["names"].get(folded, [])
    if not found:
        loose = loose_model_name(folded)
        alike = [ids for name, ids in index["names"].items() if loose_model_name(name) == loose]
        found = sorted({model_id for ids in alike for model_id in ids})
    if len(found) > 1:
        listed = ", ".join(f"`{model_id}`" for model_id in found)
        raise InputError(f"`{asked}` can mean several models", hint=f"choose one of {listed}")
    return found[0] if found else None


def _from_catalogue(asked: str, model_id: str) -> ModelSource:
    from wazn.model.config import parse_config

    path = model_path(model_id)
    with open(path, "rb") as file:
        config = parse_config(file.read(), path=path)
    # keys that begin with an underscore are about the file, not of it
    mapping = {key: value for key, value in config.items() if not key.startswith("_")}
    notes: tuple[Note, ...] = ()
    if "/" in asked and asked.lower() != model_id.lower():
        params = {"asked": asked, "model": model_id}
        notes = (Note(code="model-same-architecture", params=params),)
    return ModelSource(
        id=model_id,
        mapping=mapping,
        origin="catalogue",
        path=path,
        published_parameters=config["_published_params"],
        notes=notes,
    )


def nearest_models(asked: str) -> tuple[str, ...]:
    """Return the ids of the catalogue that are spelled most like the question, best first."""
    index = model_index()
    known = [*index["names"], *index["ids"]]
    ids: dict[str, None] = {}
    for name in nearest_names(fold_model_name(asked), known, at_most=8):
        ids |= dict.fromkeys(index["names"].get(name) or [index["ids"][name]])
    return tuple(ids)[:5]


def search_models(query: str) -> tuple[CatalogueModel, ...]:
    """Return the catalogue's models whose id or family holds every word of the query, and those that it names.

    An empty query means all. Raises: UnknownFact with the nearest names if there are none.
    """
    words = query.lower().split()
    folded = fold_model_name(query) if words else ""
    index = model_index()
    named = {*index["names"].get(folded, ()), index["ids"].get(query.strip().lower())}
    found = tuple(
        model
        for model in list_models()
        if model.id in named
        or all(word in f"{model.id.lower()} {model.family}" for word in words)
        or (words and folded in fold_model_name(model.id))
    )
    if not found:
        raise UnknownFact(
            f"no model of the catalogue is like `{query[:100]}`", nearest=nearest_models(query)
        )
    return found
