"""Switch activation checkpointing on in a model of `transformers`: whole layers, every N-th, or by operation.

By operation, as torchtitan does it (`torchtitan/distributed/activation_checkpoint.py`): the results of
attention and of every other matrix product are kept, the rest of a layer is computed again.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from wazn.errors import InputError, Unsupported

__all__ = ["CHECKPOINTING", "checkpointing_options", "keep_every", "switch_on_checkpointing"]

CHECKPOINTING = ("none", "full", "full-reentrant", "every-n", "selective-op")

_PRODUCT = torch.ops.aten.mm.default
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def switch_on_checkpointing(model: Any, name: str, *, every: int = 1) -> None:
    """Checkpoint the layers of a model as `name`, one of `CHECKPOINTING`, says.

    Raises: InputError for another name.
    """
    if name not in CHECKPOINTING:
        raise InputError(f"checkpointing `{name}` is not one of {', '.join(CHECKPOINTING)}")
    if name == "none":
        return
    newest = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.20
    (newest or model.gradient_checkpointing_enable)(checkpointing_options(name))
    if name == "every-n":
        keep_every(model, every)


def checkpointing_options(name: str) -> dict[str, Any]:
    """Return the keyword arguments for `torch.utils.checkpoint.checkpoint`."""
    options: dict[str, Any] = {"use_reentrant": name == "full-reentrant"}
    if name == "selective-op":
        options["context_fn"] = _selective_contexts
    return options


def keep_every(model: Any, every: int) -> None:
    """Of a model whose layers are all checkpointed leave one of `every` so, from the first on.

    Raises: Unsupported before transformers 4.52.
    """
    for index, layer in enumerate(_checkpointed_layers(model)):
        layer.gradient_checkpointing = index % every == 0


def _checkpointed_layers(model: Any) -> list[Any]:
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError as error:
        raise Unsupported(
            "every n-th layer can be checkpointed since transformers 4.52, where layers do it themselves",
            hint="take `full`",
        ) from error
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, Counter()))


def _policy(
    counts: Counter[bool], context: Any, func: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if func is _PRODUCT:
        counts[context.is_recompute] += 1
        keeps = counts[context.is_recompute] % 2 == 1
    else:
        keeps = func in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
