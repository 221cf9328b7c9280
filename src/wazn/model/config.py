"""Read a Hugging Face config.json into a `ModelSpec`.

`parse_config` turns bytes into a mapping and bounds what it is willing to read; `read_config` turns a mapping into a
spec. Nothing of the file is ever run. Every fault found is reported at once, with the path of the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from wazn.errors import InputError, Unsupported
from wazn.model.families import MODULES, NEAREST
from wazn.model.fields import Fields, printable
from wazn.model.parameters import count_parameters
from wazn.model.spec import ModelSpec

__all__ = [
    "LARGEST_FILE_BYTES",
    "nearest_family",
    "parse_config",
    "read_config",
    "sizes_by_default",
    "supported_families",
]

LARGEST_FILE_BYTES = 2 * 2**20  # the largest config.json in the catalogue has 40 KiB
MOST_PARAMETERS = 10**15
_LONGEST_NAME = 60
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def supported_families() -> tuple[str, ...]:
    """Return every `model_type` that `read_config` reads, sorted."""
    return tuple(sorted(MODULES))


def parse_config(data: bytes, *, path: str) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Raises: InputError when it is too large, not UTF-8, not JSON, no object, nested too deeply, or names a key twice.
    """
    if len(data) > LARGEST_FILE_BYTES:
        raise InputError(
            f"{path}: a config.json of {len(data)} bytes is too large; the limit is "
            f"{LARGEST_FILE_BYTES} bytes",
            hint="is this the right file? The weights and the tokenizer are other files",
        )
    if not data.strip():
        raise InputError(f"{path}: the file is empty; expected a JSON object")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except _TwiceError as error:
        raise InputError(
            f"{path}: the key `{printable(error.key)}` stands twice in one object"
        ) from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a config.json") from None
    except ValueError:  # json refuses integers of more than 4,300 digits with int()'s own words
        raise InputError(f"{path}: holds a number that is too long to read") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {_kind(value)}")
    return value


def read_config(mapping: Mapping[str, Any], *, id: str, path: str) -> ModelSpec:
    """Return the spec that a config.json describes.

    Args:
        mapping: the parsed file; keys that the family does not read are ignored, as transformers does.
        id: the name under which the model was asked for.
        path: where the mapping comes from; stands before every fault.
    Raises: InputError with all faults of the file; Unsupported for a family that wazn does not know.
    """
    model_type = mapping.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InputError(
            f"{path}: `model_type` must name the family, for example `llama`",
            hint="a config.json written by transformers always has it",
        )
    module = MODULES.get(model_type)
    if module is None:
        raise _unsupported(model_type, mapping, path=path)
    family = import_module(f"wazn.model.families.{module}")
    c = Fields(
        mapping,
        id=id,
        path=path,
        model_type=model_type,
        defaults=family.DEFAULTS[model_type],
        aliases=getattr(family, "ALIASES", {}).get(model_type, {}),
    )
    spec: ModelSpec = family.READERS[model_type](c)
    c.raise_faults()
    if count_parameters(spec) > MOST_PARAMETERS:
        raise InputError(
            f"{path}: these sizes make {count_parameters(spec)} parameters; "
            f"the limit is {MOST_PARAMETERS}"
        )
    return spec


def sizes_by_default(mapping: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that a config.json does not name, as the family spells them, with its class's values."""
    model_type = mapping.get("model_type")
    module = MODULES.get(model_type) if isinstance(model_type, str) else None
    if module is None or not isinstance(model_type, str):
        return {}
    family = import_module(f"wazn.model.families.{module}")
    defaults = family.DEFAULTS[model_type]
    aliases = getattr(family, "ALIASES", {}).get(model_type, {})
    return {
        aliases.get(key, key): defaults[key]
        for key in _SIZES
        if key not in mapping
        and aliases.get(key) not in mapping
        and isinstance(defaults.get(key), int)
    }


class _TwiceError(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return mapping


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _unsupported(model_type: str, mapping: Mapping[str, Any], *, path: str) -> Unsupported:
    name = printable(model_type, longest=_LONGEST_NAME)
    sees = " (images and text)" if "vision_config" in mapping else ""
    nearest = nearest_family(model_type, mapping)
    hint = f"text decoders are weighed; the nearest family that can be: `{nearest}`"
    text = mapping.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") == nearest:
        hint += ", this model's `text_config`, which a config.json of its own can hold"
    return Unsupported(f"{path}: the family `{name}`{sees} cannot be weighed", hint=hint)


def nearest_family(model_type: str, mapping: Mapping[str, Any]) -> str:
    """Return the known family that is most alike: from the table, the text model inside, the name, or the shape."""
    if model_type in NEAREST:
        return NEAREST[model_type]
    text = mapping.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    if isinstance(inner, str) and inner in MODULES:
        return inner
    from difflib import get_close_matches  # 2 ms, and only for an error

    close = get_close_matches(model_type[:_LONGEST_NAME], MODULES, n=1, cutoff=0.7)
    if close:
        return close[0]
    if "kv_lora_rank" in mapping:
        return "deepseek_v3"
    experts = {"num_experts", "num_local_experts", "n_routed_experts"}
    return "qwen3_moe" if experts & mapping.keys() else "llama"
