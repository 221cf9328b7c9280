"""The real thing: a model of transformers on `meta`, and what peft makes of it. Shapes only, no memory."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers

Shapes = list[tuple[str, tuple[int, ...]]]


def build(mapping: Mapping[str, Any]) -> Any:
    """Return the causal language model that transformers makes of a config.json, on `meta`."""
    config = transformers.AutoConfig.for_model(**mapping)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(config)


def weights(model: Any) -> Shapes:
    """Return name and shape of every parameter, in the order of `named_parameters()`."""
    return [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]


def trained(mapping: Mapping[str, Any], *, rank: int, **options: Any) -> Shapes:
    """Return what peft trains of a model, named without peft's own prefix."""
    from peft import (
        LoraConfig,
        get_peft_model,
    )  # which an older transformers may not get along with

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(build(mapping), LoraConfig(r=rank, **options))
    return [
        (name.removeprefix("base_model.model."), tuple(weight.shape))
        for name, weight in adapted.named_parameters()
        if weight.requires_grad
    ]


def fingerprint(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return a hash of names and shapes, order included."""
    text = "\n".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def count(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Return the number of elements."""
    return sum(torch.Size(shape).numel() for _, shape in shapes)
