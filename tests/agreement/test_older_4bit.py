"""4-bit bases on bitsandbytes before 0.47: computed in the type of their inputs, dequantised for every product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.agreement.families import CONFIGS, WITH_EXPERTS
from tests.agreement.matrix import held
from tests.recipes import BF16, make_recipe
from wazn.dtypes import BFLOAT16
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import (
    Adapter,
    Attention,
    Checkpointing,
    KbitPreparation,
    Method,
    Quantization,
    QuantizationFormat,
    Recipe,
)
from wazn.simulate.step import simulate

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**WITH_EXPERTS["mixtral"], **SIZES, "head_dim": 128},
    "qwen2": {**CONFIGS["qwen2"], **SIZES},
}
# Seen: two steps in `wazn.trace` with transformers 4.48.1, peft 0.13.2 and bitsandbytes 0.43.3, its `Linear4bit`
# replaced for every linear of two layers, experts among them. The peak of all, then those of forward with the loss, of
# backward and of the update in the second step; all bytes.
SEEN: dict[tuple[str, str], tuple[int, tuple[int, int, int]]] = {
    ("mixtral", "none"): (861_351_936, (425_164_800, 861_351_936, 106_576_384)),
    ("mixtral", "peft"): (1_363_822_592, (489_138_176, 1_363_822_592, 114_975_232)),
    ("mixtral", "trl"): (1_354_811_392, (458_729_472, 1_354_811_392, 106_586_624)),
    ("qwen2", "none"): (657_057_792, (345_548_800, 657_057_792, 26_960_384)),
    ("qwen2", "peft"): (1_052_387_328, (522_740_224, 1_052_387_328, 35_365_376)),
    ("qwen2", "trl"): (1_043_376_128, (496_525_824, 1_043_376_128, 26_976_768)),
}
SCALARS_BYTES = 8 * 512  # the loop's own numbers


def qlora(preparation: KbitPreparation) -> Recipe:
    """QLoRA on the attention, 4 x 2,048 tokens, reentrant checkpointing, flash-attn, under autocast."""
    return make_recipe(
        method=Method.QLORA,
        adapter=Adapter(rank=16, targets=ATTENTION, dropout=0.1),
        quantization=Quantization(
            format=QuantizationFormat.NF4,
            double_quant=True,
            kbit_preparation=preparation,
            experts=True,
            computes_in_input_dtype=True,
            fused_product=False,
        ),
        checkpointing=Checkpointing.FULL_REENTRANT,
        micro_batch=4,
        seq_len=2048,
        attention=Attention.FLASH,
        inputs_require_grad=True,
        fused_experts=False,
        precision=replace(BF16, autocast_dtype=BFLOAT16),
    )


@pytest.mark.parametrize(("model", "preparation"), SEEN)
def test_older_products(model: str, preparation: str) -> None:
    """Inputs that preparation made fp32 cost an fp32 copy of each weight and one in 16 bits, experts' too."""
    peak_bytes, peaks = SEEN[model, preparation]
    spec = read_config(MODELS[model], id=model, path=model)
    habits = resolve_stack("hf@4.48", family=spec.family)
    targets = frozenset(f"self_attn.{name}" for name in ATTENTION)
    ours = held(simulate(spec, qlora(KbitPreparation(preparation)), habits, targets).timeline)
    assert 0 <= peak_bytes - ours.peak_bytes <= SCALARS_BYTES
    for seen, tape in zip(peaks, ours.peaks, strict=True):
        assert 0 <= seen - tape <= SCALARS_BYTES
