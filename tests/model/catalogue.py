"""The catalogue's configurations that wazn reads, and the ways in which each is adapted in the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from wazn.model.config import read_config, supported_families
from wazn.model.lora import attention_targets

GOLDEN = Path(__file__).parent / "golden"
LORA_LAYERS = 4  # adapters repeat from layer to layer: four show every kind of layer but a Gemma 3 that sees everything


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return every catalogue file of a family that wazn reads, remarks included, by the file's name."""
    found = {}
    for file in sorted(files("wazn.facts").joinpath("models").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            entry = json.loads(file.read_text("utf-8"))
            if entry.get("model_type") in supported_families():
                found[file.name.removesuffix(".json")] = entry
    return found


def configurations() -> dict[str, dict[str, Any]]:
    """Return the same without the remarks: what stands in the config.json."""
    return {
        name: {key: value for key, value in entry.items() if not key.startswith("_")}
        for name, entry in entries().items()
    }


def golden(version: str) -> dict[str, Any]:
    """Return what a version of transformers was seen to make."""
    seen: dict[str, Any] = json.loads((GOLDEN / f"transformers-{version}.json").read_text("utf-8"))
    return seen


@dataclass(frozen=True)
class LoraCase:
    """One way to adapt a model: in peft's words, and in wazn's."""

    peft: dict[str, Any]
    targets: str | tuple[str, ...]
    rank: int
    dora: bool = False
    modules_to_save: tuple[str, ...] = field(default=())


def lora_cases(mapping: Mapping[str, Any]) -> dict[str, LoraCase]:
    """Return the cases for one model, by a short name."""
    spec = read_config(mapping, id="model", path="config.json")
    attention = list(attention_targets(spec))
    first_and_last = (attention[0].rpartition(".")[2], attention[-1].rpartition(".")[2])
    saved = (spec.embedding.name.rpartition(".")[2], spec.head.name)
    cases = {}
    for rank in (8, 64):
        cases |= {
            f"attention-{rank}": LoraCase(
                {"rank": rank, "target_modules": attention}, "attention", rank
            ),
            f"all-linear-{rank}": LoraCase(
                {"rank": rank, "target_modules": "all-linear"}, "all-linear", rank
            ),
            f"list-{rank}": LoraCase(
                {"rank": rank, "target_modules": list(first_and_last)}, first_and_last, rank
            ),
        }
    cases["dora-8"] = LoraCase(
        {"rank": 8, "target_modules": attention, "use_dora": True}, "attention", 8, dora=True
    )
    cases["save-8"] = LoraCase(
        {"rank": 8, "target_modules": attention, "modules_to_save": list(saved)},
        "attention",
        8,
        modules_to_save=saved,
    )
    return cases
