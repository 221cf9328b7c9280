"""peft sees quantised layers for what they are, though their weights are fake."""

from __future__ import annotations

from typing import Any

import peft.tuners.lora.dora as dora
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, quantize_4bit

from tests.recipes import qlora_recipe
from tests.trace.test_quantized import tiny_llama
from wazn.trace.peft_library import sees_quantised_layers
from wazn.trace.quantized import give_quant_states, quantise_linears, quantise_linears_8bit
from wazn.trace.step import rehearse
from wazn.trace.world import World

NAME = "model.layers.0.mlp.up_proj"


def _seen(model: Any) -> tuple[torch.Size, torch.dtype]:
    whole = dora.dequantize_module_weight(model.get_submodule(NAME))
    return whole.shape, whole.dtype


def _real(bits: int) -> tuple[torch.Size, torch.dtype]:
    matrix = torch.zeros((512, 256), dtype=torch.bfloat16)
    if bits == 4:
        whole = dequantize_4bit(*quantize_4bit(matrix, quant_type="nf4"))
    else:
        whole = int8_vectorwise_dequant(matrix.to(torch.int8), torch.ones(512))
    return whole.shape, whole.dtype


@pytest.mark.parametrize("bits", [4, 8])
def test_dora_measures_the_whole_matrix(bits: int) -> None:
    """On `meta` and in a world it gets what bitsandbytes makes of a real matrix of 512 x 256."""
    model = tiny_llama()
    if bits == 4:
        quantise_linears(model, double_quant=True)
    else:
        quantise_linears_8bit(model)
    with sees_quantised_layers():
        assert _seen(model) == _real(bits)
    with World() as world:
        world.materialise(model)
        give_quant_states(model)
        assert _seen(model) == _real(bits)


def test_dora_on_a_4bit_base_is_rehearsed() -> None:
    """Beside LoRA's own there is a magnitude for each output: 5 matrices have 256 of them, 2 have 512."""
    config = tiny_llama().config.to_dict()
    plain, dora_too = (
        rehearse(config, qlora_recipe(dora=dora)).num_trainable_parameters for dora in (False, True)
    )
    assert dora_too - plain == 5 * 256 + 2 * 512
