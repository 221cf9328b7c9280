"""The key-value cache that GPT-BigCode's outputs hold under checkpointing, up to transformers 4.52."""

from __future__ import annotations

from tests.agreement.matrix import held
from tests.recipes import make_recipe
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
)
from wazn.simulate.step import simulate

SANTACODER = {
    "model_type": "gpt_bigcode",
    "n_embd": 2048,
    "n_layer": 3,
    "n_head": 16,
    "n_inner": 8192,
    "vocab_size": 49280,
    "n_positions": 4096,
    "activation_function": "gelu_pytorch_tanh",
}
QLORA = make_recipe(
    method=Method.QLORA,
    adapter=Adapter(rank=16, targets=("c_attn",), dropout=0.1),
    quantization=Quantization(
        format=QuantizationFormat.NF4,
        double_quant=True,
        kbit_preparation=KbitPreparation.NONE,
        experts=True,
    ),
    checkpointing=Checkpointing.FULL_REENTRANT,
    attention=Attention.FLASH,
    micro_batch=2,
    seq_len=1024,
    inputs_require_grad=True,
)
# Seen: two steps of `GPTBigCodeForCausalLM` of transformers 4.48.1 with peft 0.13.2 and bitsandbytes 0.43.3 in
# `wazn.trace`, `use_cache` on as its configuration has it. That patch release still computes the loss as 4.47 does.
SEEN_PEAK_BYTES = 991_885_824
SEEN_LEVELS_BYTES = (550_008_832, 303_020_032, 551_681_024, 304_691_712)
SCALARS_BYTES = 8 * 512  # the loop's own numbers


def test_santacoder() -> None:
    """Three layers of santacoder enter backward with the projections of all layers, 2,304 wide, and so peak."""
    spec = read_config(SANTACODER, id="santacoder", path="santacoder")
    habits = resolve_stack("hf@4.47", family="gpt_bigcode")
    seen = held(simulate(spec, QLORA, habits, frozenset({"attn.c_attn"})).timeline)
    assert 0 <= SEEN_PEAK_BYTES - seen.peak_bytes <= SCALARS_BYTES
    for ours, theirs in zip(seen.levels, SEEN_LEVELS_BYTES, strict=True):
        assert 0 <= theirs - ours <= SCALARS_BYTES
