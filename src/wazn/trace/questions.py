"""What can be said to be wrong of a question before the model is built, asking the installed transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wazn.errors import InputError, UnknownFact
from wazn.facts.names import nearest_names
from wazn.model.fields import printable
from wazn.recipe import Recipe
from wazn.trace.configs import resolve_task
from wazn.trace.script import Script

__all__ = ["refuse_for_library"]


def refuse_for_library(config: Mapping[str, Any], recipe: Recipe, script: Script) -> None:
    """Raises: InputError for what was said and the installed transformers does not know, or not of this model."""
    _refuse_long(config, recipe)
    if script.optim is not None:
        from transformers.training_args import OptimizerNames

        names = [name.value for name in OptimizerNames]
        if script.optim not in names:
            nearest = nearest_names(script.optim, names)
            raise UnknownFact(
                f"`--optim`: `TrainingArguments` knows no `{printable(script.optim)}`",
                nearest=nearest,
                hint=None if nearest else "for example `adamw_torch`",
            )
    if script.num_images:
        from transformers.models.auto import modeling_auto

        known = getattr(modeling_auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", None)
        model_type = str(config.get("model_type"))
        if known is not None and model_type not in known and "auto_map" not in config:
            raise InputError(
                f"`{printable(model_type)}` takes no images", hint="leave `--images` out"
            )
    if script.target_len is not None:
        task = resolve_task(config, script)
        if task != "seq2seq":
            raise InputError(
                f"`--target-len` is of an encoder-decoder, and this is a model for {task}",
                hint="leave `--target-len` out",
            )


def _refuse_long(config: Mapping[str, Any], recipe: Recipe) -> None:
    """Raises: InputError for more tokens than a kernel is compiled for.

    Source: `RwkvLinearAttention` in transformers/models/rwkv/modeling_rwkv.py; the others' code runs and says it.
    """
    if config.get("model_type") != "rwkv":
        return
    from transformers import RwkvConfig

    length = config.get("context_length", RwkvConfig().context_length)
    if isinstance(length, int) and recipe.seq_len > length:
        raise InputError(
            f"`--seq-len {recipe.seq_len}`: the kernel of `rwkv` is made for {length:,} tokens (`context_length`)",
            hint=f"`--seq-len {length}`",
        )
