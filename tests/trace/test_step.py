"""Whole training steps of real model classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.recipes import AUTOCAST, BF16, lora_recipe, make_recipe, qlora_recipe
from wazn.dtypes import BFLOAT16, FLOAT32
from wazn.recipe import Attention, Checkpointing, Optimizer, Recipe
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Category
from wazn.trace.rehearsal import Rehearsal, signed_rounded
from wazn.trace.script import Script
from wazn.trace.step import rehearse

# mistralai/Mistral-7B-v0.1, config.json
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
CUBLAS_BYTES = 2 * 8_519_680


def level_after(rehearsal: Rehearsal, step: int) -> int:
    """Return what is allocated once the step is over."""
    return sum(signed_rounded(event.num_bytes) for event in rehearsal.events if event.step <= step)


def test_full_fine_tuning_of_mistral_7b_as_it_was_measured() -> None:
    """fms-acceleration measured 72,434,837,504 bytes on an A100 (bf16, micro-batch 4 x 4096, AdamW): within 1 MiB.

    The peak is the optimizer's step: weights, gradients and two states of 7,241,732,096 parameters, foreach's temporary
    of those with weight decay (all but 65 norms of 4,096), 2 bytes each, and cuBLAS's workspaces.
    """
    recipe = make_recipe(
        micro_batch=4,
        seq_len=4096,
        checkpointing=Checkpointing.FULL,
        attention=Attention.FLASH,
    )
    rehearsal = rehearse(MISTRAL_7B, recipe)
    assert abs(rehearsal.peak_bytes - 72_434_837_504) < 2**20
    peak_phase = max(rehearsal.peaks().items(), key=lambda item: item[1])[0]
    assert peak_phase[1] == "optimizer-step"
    copies = 2 * (5 * 7_241_732_096 - 65 * 4096)
    assert 0 <= rehearsal.peak_bytes - copies - CUBLAS_BYTES < 2**20
    sums = peak(rehearsal.timeline()).by_category()
    assert sums[Category.OPTIMIZER_STATES] == 2 * 7_241_732_096 * 2
    assert sum(sums.values()) == rehearsal.peak_bytes


UNDER_AUTOCAST = replace(BF16, autocast_dtype=BFLOAT16)


def one_sample(**choices: Any) -> dict[str, Any]:
    """One sample of 2,048 tokens."""
    return {"micro_batch": 1, "seq_len": 2048, **choices}


RECIPES: dict[str, Recipe] = {
    "full, bf16": make_recipe(**one_sample()),
    "full, fused AdamW": make_recipe(**one_sample(optimizer=Optimizer.ADAMW_FUSED)),
    "full, SGD with momentum": make_recipe(**one_sample(optimizer=Optimizer.SGD_MOMENTUM)),
    "full, fp32": make_recipe(**one_sample(precision=replace(BF16, weight_dtype=FLOAT32))),
    "full, bf16 mixed": make_recipe(**one_sample(precision=AUTOCAST)),
    "full, checkpointing": make_recipe(**one_sample(checkpointing=Checkpointing.FULL)),
    "full, reentrant checkpointing": make_recipe(
        **one_sample(checkpointing=Checkpointing.FULL_REENTRANT)
    ),
    "full, eager attention": make_recipe(**one_sample(attention=Attention.EAGER)),
    "full, flash-attn": make_recipe(**one_sample(attention=Attention.FLASH)),
    "full, accumulation": make_recipe(**one_sample(grad_accum=2)),
    "lora": lora_recipe(dropout=0.1, **one_sample()),
    "lora, bf16 autocast": lora_recipe(**one_sample(precision=UNDER_AUTOCAST)),
    "lora, checkpointing": lora_recipe(**one_sample(checkpointing=Checkpointing.FULL)),
    "lora, reentrant checkpointing": lora_recipe(
        **one_sample(checkpointing=Checkpointing.FULL_REENTRANT, inputs_require_grad=True)
    ),
    "dora": lora_recipe(dora=True, **one_sample()),
    "qlora": qlora_recipe(**one_sample(precision=UNDER_AUTOCAST)),
    "qlora, checkpointing": qlora_recipe(
        double_quant=False, **one_sample(checkpointing=Checkpointing.FULL)
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_leaks_nothing(name: str) -> None:
    """After the second step exactly as much is allocated as after the first: weights, states and workspaces."""
    rehearsal = rehearse(TINY, RECIPES[name])
    assert level_after(rehearsal, 2) == level_after(rehearsal, 1)
    assert rehearsal.peak_bytes > level_after(rehearsal, 2)


def test_bf16_weights_keep_their_gradients_and_states_in_bf16() -> None:
    """2 + 2 + 2 + 2 bytes per parameter, as transformers trains bf16 weights without a master copy."""
    rehearsal = rehearse(TINY, make_recipe(), Script(matmul_workspaces=False))
    sums: dict[Category, int] = dict.fromkeys(Category, 0)
    for event in rehearsal.events:
        if event.num_bytes > 0 and event.step <= 1 and event.block_id in rehearsal.names:
            sums[rehearsal.names[event.block_id][0]] += event.num_bytes
    parameters = 2 * 1000 * 256 + 256 + 2 * (256 * (256 + 128 + 128 + 256 + 3 * 512) + 2 * 256)
    rotary = 2 * 32 * 4  # inv_freq and its original, fp32
    assert sums[Category.WEIGHTS] == 2 * parameters + rotary
    assert sums[Category.GRADIENTS] == 2 * parameters
    assert sums[Category.OPTIMIZER_STATES] == 4 * parameters


def test_accumulation_keeps_a_gradient_buffer() -> None:
    """With two micro-batches the gradients of the first are alive in the forward of the second."""
    one, two = (rehearse(TINY, make_recipe(grad_accum=number)) for number in (1, 2))
    gradients = (
        sum(
            event.num_bytes
            for event in one.events
            if event.num_bytes > 0
            and one.names.get(event.block_id, (None,))[0] is Category.GRADIENTS
        )
        // 2
    )
    difference = two.peaks()[1, "forward"] - one.peaks()[1, "forward"]
    assert gradients <= difference < gradients + 2**17 + CUBLAS_BYTES


def test_flash_attn_and_sdpa_differ_by_the_random_state_only() -> None:
    """Without padding both run FlashAttention-2; PyTorch's keeps one more scalar per layer."""
    sdpa, flash = (
        rehearse(TINY, make_recipe(attention=name)).peaks()[1, "forward"]
        for name in (Attention.SDPA, Attention.FLASH)
    )
    assert 0 <= sdpa - flash <= 2 * 512 + 3 * 512


def test_the_rehearsal_is_a_timeline() -> None:
    """The timeline has the same events and the same peak, and the lines of its breakdown sum to it."""
    rehearsal = rehearse(TINY, lora_recipe(checkpointing=Checkpointing.FULL))
    timeline = rehearsal.timeline()
    assert timeline.num_events == len(rehearsal.events)
    highest = peak(timeline)
    assert highest.peak_bytes == rehearsal.peak_bytes
    assert {event.tag.category for event in timeline.events()} == {
        Category.WEIGHTS,
        Category.ADAPTER_WEIGHTS,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATES,
        Category.ACTIVATIONS,
        Category.LOGITS_AND_LOSS,
        Category.TEMPORARY,
        Category.WORKSPACES,
        Category.INPUTS,
    }


def level_before_the_loss(rehearsal: Rehearsal) -> int:
    """Return what is allocated when the first step comes to its loss."""
    level = 0
    for event in rehearsal.events:
        if event.phase == "loss":
            break
        level += signed_rounded(event.num_bytes)
    return level


def test_checkpointing_by_operation_keeps_every_other_product_and_attention() -> None:
    """torchtitan's policy: of q, k, v, o, gate, up and down the odd ones, and what attention returned.

    512 tokens; heads of 64, 4 of queries and 2 of keys; two layers.
    """
    whole, selective = (
        level_before_the_loss(rehearse(TINY, make_recipe(micro_batch=1, checkpointing=name)))
        for name in (Checkpointing.FULL, Checkpointing.SELECTIVE_OP)
    )
    products = 512 * (256 + 128 + 512 + 256) * 2  # q, v, gate, down
    attention = 512 * 256 * 2 + 4 * 512 * 4 + 512 + 512
    assert selective - whole == 2 * (products + attention)


def test_every_second_layer_is_checkpointed() -> None:
    """With two layers and every second checkpointed, one of them keeps its activations.

    The first checkpoint also holds on to the position ids, 512 of 8 bytes, which are let go of without one.
    """
    none, every, whole = (
        level_before_the_loss(
            rehearse(TINY, make_recipe(micro_batch=1, checkpointing=name, checkpoint_every=2))
        )
        for name in (Checkpointing.NONE, Checkpointing.EVERY_N, Checkpointing.FULL)
    )
    assert none - every + 512 * 8 == every - whole
