"""Where the facts lie on disk, and how the prepared ones are read: plain JSON, a millisecond or less.

`importlib.resources` and `pathlib` cost more at start than everything that is read here, so paths are strings.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

__all__ = ["FOLDER", "gpu_index", "model_index", "model_path", "price_index"]

FOLDER = os.path.dirname(os.path.abspath(__file__))


def _read(name: str) -> Any:
    with open(os.path.join(FOLDER, "prepared", name), "rb") as file:
        return json.loads(file.read())


@cache
def gpu_index() -> Any:
    """Return the prepared GPUs; `wazn.facts.build.gpu_index` says what is in it."""
    return _read("gpus.json")


@cache
def model_index() -> Any:
    """Return the prepared model names; `wazn.facts.build.model_index` says what is in it."""
    return _read("models.json")


@cache
def price_index() -> Any:
    """Return the lowest price of each GPU; `wazn.facts.build.price_index` says what is in it."""
    return _read("prices.json")


def model_path(model_id: str) -> str:
    """Return where the configuration of a catalogue model lies."""
    return os.path.join(FOLDER, "models", model_id.replace("/", "--") + ".json")
