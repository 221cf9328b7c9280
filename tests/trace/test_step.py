"""Whole training steps of real model classes."""

from __future__ import annotations

from typing import Any

import pytest

from wazn.timeline.breakdown import peak
from wazn.timeline.events import Category
from wazn.trace.rehearsal import Rehearsal, signed_rounded
from wazn.trace.step import Recipe, main, rehearse

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
    recipe = Recipe(micro_batch=4, seq_len=4096, checkpointing="full", attention="flash")
    rehearsal = rehearse(MISTRAL_7B, recipe)
    assert abs(rehearsal.peak_bytes - 72_434_837_504) < 2**20
    peak_phase = max(rehearsal.peaks().items(), key=lambda item: item[1])[0]
    assert peak_phase[1] == "optimizer-step"
    copies = 2 * (5 * 7_241_732_096 - 65 * 4096)
    assert 0 <= rehearsal.peak_bytes - copies - CUBLAS_BYTES < 2**20
    breakdown = rehearsal.breakdown_at_peak()
    assert breakdown[Category.OPTIMIZER_STATES] == 2 * 7_241_732_096 * 2
    assert sum(breakdown.values()) == rehearsal.peak_bytes


RECIPES: dict[str, Recipe] = {
    "full, bf16": Recipe(),
    "full, fused AdamW": Recipe(optimizer="adamw-fused"),
    "full, SGD with momentum": Recipe(optimizer="sgd-momentum"),
    "full, fp32": Recipe(weight_dtype="float32"),
    "full, bf16 mixed": Recipe(weight_dtype="float32", autocast_dtype="bfloat16"),
    "full, checkpointing": Recipe(checkpointing="full"),
    "full, reentrant checkpointing": Recipe(checkpointing="full-reentrant"),
    "full, eager attention": Recipe(attention="eager"),
    "full, flash-attn": Recipe(attention="flash"),
    "full, accumulation": Recipe(grad_accum=2),
    "lora": Recipe(method="lora", lora_dropout=0.1),
    "lora, bf16 autocast": Recipe(method="lora", autocast_dtype="bfloat16"),
    "lora, checkpointing": Recipe(method="lora", checkpointing="full"),
    "lora, reentrant checkpointing": Recipe(method="lora", checkpointing="full-reentrant"),
    "dora": Recipe(method="lora", dora=True),
    "qlora": Recipe(method="qlora", autocast_dtype="bfloat16"),
    "qlora, checkpointing": Recipe(method="qlora", checkpointing="full", double_quant=False),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_leaks_nothing(name: str) -> None:
    """After the second step exactly as much is allocated as after the first: weights, states and workspaces."""
    rehearsal = rehearse(TINY, RECIPES[name])
    assert level_after(rehearsal, 2) == level_after(rehearsal, 1)
    assert rehearsal.peak_bytes > level_after(rehearsal, 2)


def test_bf16_weights_keep_their_gradients_and_states_in_bf16() -> None:
    """2 + 2 + 2 + 2 bytes per parameter, as transformers trains bf16 weights without a master copy."""
    rehearsal = rehearse(TINY, Recipe(matmul_workspaces=False))
    sums: dict[Category, int] = dict.fromkeys(Category, 0)
    for event in rehearsal.events:
        if event.num_bytes > 0 and event.step <= 1 and event.block_id in rehearsal.categories:
            sums[rehearsal.categories[event.block_id]] += event.num_bytes
    parameters = 2 * 1000 * 256 + 256 + 2 * (256 * (256 + 128 + 128 + 256 + 3 * 512) + 2 * 256)
    rotary = 2 * 32 * 4  # inv_freq and its original, fp32
    assert sums[Category.WEIGHTS] == 2 * parameters + rotary
    assert sums[Category.GRADIENTS] == 2 * parameters
    assert sums[Category.OPTIMIZER_STATES] == 4 * parameters


def test_accumulation_keeps_a_gradient_buffer() -> None:
    """With two micro-batches the gradients of the first are alive in the forward of the second."""
    one, two = (rehearse(TINY, Recipe(grad_accum=number)) for number in (1, 2))
    gradients = (
        sum(
            event.num_bytes
            for event in one.events
            if event.num_bytes > 0 and one.categories.get(event.block_id) is Category.GRADIENTS
        )
        // 2
    )
    difference = two.peaks()[1, "forward"] - one.peaks()[1, "forward"]
    assert gradients <= difference < gradients + 2**17 + CUBLAS_BYTES


def test_flash_attn_and_sdpa_differ_by_the_random_state_only() -> None:
    """Without padding both run FlashAttention-2; PyTorch's keeps one more scalar per layer."""
    sdpa, flash = (
        rehearse(TINY, Recipe(attention=name)).peaks()[1, "forward"] for name in ("sdpa", "flash")
    )
    assert 0 <= sdpa - flash <= 2 * 512 + 3 * 512


def test_the_command_prints_peaks_and_events(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m wazn.trace.step config.json --events` writes one line per event, then the peaks by phase."""
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    main([str(path), "--layers", "1", "--seq-len", "64", "--num-steps", "1", "--events"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 1 optimizer-step") for line in lines)
    assert any("aten.embedding.default [1, 64, 256] bfloat16" in line for line in lines)


def test_the_rehearsal_is_a_timeline() -> None:
    """The timeline has the same events and the same peak, and the lines of its breakdown sum to it."""
    rehearsal = rehearse(TINY, Recipe(method="lora", checkpointing="full"))
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
        level_before_the_loss(rehearse(TINY, Recipe(seq_len=512, checkpointing=name)))
        for name in ("full", "selective-op")
    )
    products = 512 * (256 + 128 + 512 + 256) * 2  # q, v, gate, down
    attention = 512 * 256 * 2 + 4 * 512 * 4 + 512 + 512
    assert selective - whole == 2 * (products + attention)


def test_every_second_layer_is_checkpointed() -> None:
    """With two layers and every second checkpointed, one of them keeps its activations.

    The first checkpoint also holds on to the position ids, 512 of 8 bytes, which are let go of without one.
    """
    none, every, whole = (
        level_before_the_loss(rehearse(TINY, Recipe(seq_len=512, checkpointing=name)))
        for name in ("none", "every-n", "full")
    )
    assert none - every + 512 * 8 == every - whole
