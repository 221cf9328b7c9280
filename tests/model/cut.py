"""Configurations of shortened models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Lists with one entry per layer, which must follow a cut.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def cut(mapping: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the configuration of the same model with its first `layers` layers."""
    short = dict(mapping)
    for key in _LAYER_KEYS:
        if key in short:
            short[key] = min(short[key], layers)
            count = short[key]
    for key in _PER_LAYER:
        if short.get(key) is not None:
            short[key] = short[key][:count]
    if short.get("attention_types") is not None:  # GPT-Neo: [[["global", "local"], 12]]
        pattern, _ = short["attention_types"][0]
        short["attention_types"] = [[pattern, count // len(pattern)]]
    return short
