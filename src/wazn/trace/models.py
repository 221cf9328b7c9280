"""A config.json, made a model of `transformers` on the `meta` device: sizes and types, no storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wazn.recipe import Attention, Recipe
from wazn.trace.script import Script

__all__ = ["build_model"]

# None is the choice of transformers: sdpa where the model has it, else eager
_ATTENTION = {
    Attention.SDPA: None,
    Attention.EAGER: "eager",
    Attention.FLASH: "flash_attention_2",
}


def build_model(config: Mapping[str, Any], recipe: Recipe, script: Script) -> Any:
    """Build the model that `config` (a config.json) describes, in the recipe's weight dtype, on `meta`."""
    from transformers import AutoModelForCausalLM

    hf_config = _text_config(config, script.num_layers)
    hf_config.use_cache = script.use_cache
    dtype = getattr(torch, recipe.precision.weight_dtype.name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            hf_config,
            attn_implementation=_ATTENTION[recipe.attention],
            **{_dtype_option(): dtype},
        )


def _dtype_option() -> str:
    """Return the name under which this version of transformers takes the weights' type; `dtype` since 4.56."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if version >= (4, 56) else "torch_dtype"


def _text_config(config: Mapping[str, Any], num_layers: int | None) -> Any:
    """Read a config.json (keys that begin with `_` are remarks); of a model with towers take the
    language model.
    """
    from transformers import AutoConfig

    wanted = {name: value for name, value in config.items() if not name.startswith("_")}
    wanted.pop("auto_map", None)
    hf_config = AutoConfig.for_model(wanted.pop("model_type"), **wanted)
    if hasattr(hf_config, "get_text_config"):  # since 4.45
        hf_config = hf_config.get_text_config()
    if num_layers is None:
        return hf_config
    before = hf_config.num_hidden_layers
    for name, value in vars(hf_config).copy().items():
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(hf_config, name, value[:num_layers])
    hf_config.num_hidden_layers = num_layers
    return hf_config
