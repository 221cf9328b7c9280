"""Recipes and small models for tests: everything plain unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.recipe import (
    Attention,
    Checkpointing,
    Loss,
    Method,
    Optimizer,
    Precision,
    Recipe,
)

BF16 = Precision(
    weight_dtype=BFLOAT16,
    autocast_dtype=None,
    adapter_dtype=FLOAT32,
    master_dtype=None,
    gradient_dtype=None,
    state_dtype=None,
)


def make_recipe(**choices: Any) -> Recipe:
    """Return a recipe: full fine-tuning in bf16 without autocast, 2 x 512 tokens, no checkpointing."""
    plain: dict[str, Any] = {
        "method": Method.FULL,
        "adapter": None,
        "quantization": None,
        "precision": BF16,
        "optimizer": Optimizer.ADAMW,
        "micro_batch": 2,
        "seq_len": 512,
        "grad_accum": 1,
        "checkpointing": Checkpointing.NONE,
        "attention": Attention.SDPA,
        "loss": Loss.STANDARD,
        "stack": "hf@5.24",
    }
    return Recipe(**{**plain, **choices})
