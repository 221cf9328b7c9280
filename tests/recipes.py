"""Recipes and small models for tests: everything plain unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.recipe import (
    Adapter,
    Attention,
    Checkpointing,
    KbitPreparation,
    Loss,
    Method,
    Optimizer,
    Precision,
    Quantization,
    QuantizationFormat,
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
AUTOCAST = replace(BF16, weight_dtype=FLOAT32, autocast_dtype=BFLOAT16)  # fp32 weights


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


def lora_recipe(*, dropout: float = 0.0, dora: bool = False, **choices: Any) -> Recipe:
    """Return the same recipe with adapters of rank 16 in fp32 on every linear layer."""
    adapter = Adapter(rank=16, targets=("all-linear",), dropout=dropout, dora=dora)
    return make_recipe(**{"method": Method.LORA, "adapter": adapter, **choices})


def qlora_recipe(*, double_quant: bool = True, **choices: Any) -> Recipe:
    """Return the same adapters on a base in NF4, prepared as peft prepares it."""
    quantization = Quantization(
        format=QuantizationFormat.NF4,
        double_quant=double_quant,
        kbit_preparation=KbitPreparation.PEFT,
        experts=False,
    )
    return lora_recipe(**{"method": Method.QLORA, "quantization": quantization, **choices})
