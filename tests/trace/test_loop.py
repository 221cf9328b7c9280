"""The plain loop: what it feeds the model."""

from __future__ import annotations

from tests.recipes import make_recipe
from wazn.trace.script import Script
from wazn.trace.step import rehearse

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
}


def operations(script: Script) -> set[str]:
    recipe = make_recipe(micro_batch=2, seq_len=64)
    return {event.op for event in rehearse(LLAMA, recipe, script).events}


def test_padding_takes_another_attention_kernel() -> None:
    """Samples of unequal length make a mask, which flash attention refuses and the memory-efficient kernel takes.

    Source: `use_flash_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_for_attn_mask`.
    """
    equal, padded = operations(Script()), operations(Script(padding=0.25))
    flash, efficient = "_scaled_dot_product_flash", "_scaled_dot_product_efficient"
    assert any(flash in op for op in equal)
    assert not any(flash in op for op in padded)
    assert any(efficient in op for op in padded)
