"""4-bit layers have the storages that bitsandbytes makes, and its real code runs on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from wazn.trace.opcheck import Spec, measure_op
from wazn.trace.quantized import (
    give_quant_states,
    quantise_linears,
    quantise_linears_8bit,
    quantised_linears,
)
from wazn.trace.world import World

HIDDEN, INNER = 256, 512


def tiny_llama() -> Any:
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def state_sizes(weight: torch.Tensor, state: Any) -> dict[str, int]:
    tensors = {"weight": weight, "absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors |= {
            "offset": state.offset,
            "absmax of absmax": state.state2.absmax,
            "code of absmax": state.state2.code,
        }
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (33, 70)])
def test_the_storages_are_those_of_a_real_quantisation(
    double_quant: bool, shape: tuple[int, int]
) -> None:
    """`quantize_4bit` of a real matrix gives tensors of the same sizes."""
    packed, state = quantize_4bit(
        torch.zeros(shape, dtype=torch.bfloat16), compress_statistics=double_quant, quant_type="nf4"
    )
    model = tiny_llama()
    quantise_linears(model, double_quant=double_quant)
    linear = quantised_linears(model)[0]
    linear.out_features, linear.in_features = shape
    linear.weight = torch.nn.Parameter(
        torch.empty(packed.shape, dtype=torch.uint8, device="meta"), requires_grad=False
    )
    for name, value in {
        "compress_statistics": double_quant,
        "quant_type": "nf4",
        "original_dtype": torch.bfloat16,
    }.items():
        setattr(linear.weight, name, value)
    with World() as world:
        world.materialise(model)
        give_quant_states(model)
        fake = linear.weight.quant_state
        assert state_sizes(linear.weight, fake) == state_sizes(packed, state)
        assert (fake.blocksize, fake.dtype, fake.shape) == (state.blocksize, state.dtype, shape)


def test_the_head_and_the_embeddings_stay_as_they_are() -> None:
    """transformers leaves the output head alone: seven 4-bit layers in a Llama block, none outside."""
    model = tiny_llama()
    quantise_linears(model, double_quant=True)
    assert len(quantised_linears(model)) == 7
    assert model.lm_head.weight.dtype is torch.bfloat16


def test_what_is_kept_in_fp32_is_not_quantised() -> None:
    """T5 lists `wo`, the second matrix of its feed-forward: `_keep_in_fp32_modules` in modeling_t5.py."""
    config = T5Config(num_layers=1, vocab_size=1000)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    quantise_linears(model, double_quant=False)
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plain == {
        "encoder.block.0.layer.1.DenseReluDense.wo",
        "decoder.block.0.layer.2.DenseReluDense.wo",
        "lm_head",
    }
    assert len(quantised_linears(model)) == 4 + 1 + 8 + 1


def test_double_quantisation_costs_an_eighth_of_a_bit() -> None:
    """8/64 + 32/(64 x 256) = 0.127 bit per value for the constants (QLoRA, section 3), 4 bits for the
    value itself.
    """
    model = tiny_llama()
    quantise_linears(model, double_quant=True)
    with World() as world:
        world.materialise(model)
        give_quant_states(model)
        layer = model.model.layers[0].mlp.up_proj
        sizes = state_sizes(layer.weight, layer.weight.quant_state)
    values = HIDDEN * INNER
    assert sizes["weight"] * 8 == 4 * values
    constants = (sizes["absmax"] + sizes["absmax of absmax"]) * 8
    assert constants == values * 8 // 64 + values * 32 // (64 * 256)


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_4bit_layer_saves_nothing_and_spells_out_its_weight_twice(double_quant: bool) -> None:
    """Forward and backward each dequantise the weight for one product; neither input nor weight is saved.

    2,048 rows are above the 1,536 up to which bitsandbytes may use a fused kernel.
    """
    model = tiny_llama()
    quantise_linears(model, double_quant=double_quant)
    with World() as world:
        world.materialise(model)
        give_quant_states(model)
        layer = model.model.layers[0].mlp.up_proj
        trace = measure_op(layer, Spec((1, 2048, HIDDEN), requires_grad=True), world=world)
    weight, scales = HIDDEN * INNER * 2, HIDDEN * INNER // 64 * 4
    out, grad = 2048 * INNER * 2, 2048 * HIDDEN * 2
    forward = [size for size in trace.changes("forward") if size > 0]
    backward = [size for size in trace.changes("backward") if size > 0]
    assert trace.saved_bytes == 0
    if double_quant:
        assert forward == [scales, scales, weight, out]
        assert backward == [scales, weight, grad]
    else:
        assert forward == [weight, out]
        assert backward == [weight, grad]


def test_an_8bit_layer_keeps_its_input() -> None:
    """MatMul8bitLt saves its input; the weight is one byte per value, and its scales one fp32 per output.

    Forward: the input in fp16, an fp32 scale per row, the input in bytes; its absolute values and which of them are
    outliers, to find the columns (one is assumed: an int64, a zero, 2 bytes per row, 7 per output); the product in
    int32, in fp16 and in the input's type, and with the column added. Backward: the weight in the input's type, its
    scales, the gradient. Source: `MatMul8bitLt` in bitsandbytes/autograd/_functions.py, backends/cuda/ops.py
    (`int8_vectorwise_quant`), backends/default/ops.py (`int8_mixed_scaled_mm`).
    """
    model = tiny_llama()
    quantise_linears_8bit(model)
    with World() as world:
        world.materialise(model)
        give_quant_states(model)
        layer = model.model.layers[0].mlp.up_proj
        assert (layer.weight.numel(), layer.weight.element_size()) == (HIDDEN * INNER, 1)
        assert (layer.state.SCB.numel(), layer.state.SCB.element_size()) == (INNER, 4)
        x = Spec((1, 2048, HIDDEN), requires_grad=True)
        trace = measure_op(lambda y: layer(y * 2), x, world=world)
    rows, values = 2048, 2048 * HIDDEN
    half, product = values * 2, rows * INNER
    assert trace.saved_bytes == half + rows * 2  # y * 2 and the column
    forward = [size for size in trace.changes("forward") if size > 0]
    quantised = [half, rows * 4, values, half, values, HIDDEN, 8, 1]
    column = [rows * 2, INNER, INNER * 4, INNER * 2]
    assert forward == [half, *quantised, *column, product * 4, *[product * 2] * 3]
    backward = [size for size in trace.changes("backward") if size > 0]
    assert backward == [HIDDEN * INNER * 2, INNER * 4, half, half]
