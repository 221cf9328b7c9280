"""What would help: the changes that are tried, and that what they promise is kept."""

from __future__ import annotations

from typing import Any

import pytest

import wazn
from wazn.estimation.changes import Change, changes
from wazn.timeline.breakdown import peak


@pytest.mark.parametrize(
    "question",
    [
        {"method": "full"},
        {"micro_batch": 8, "checkpointing": "none"},
        {"micro_batch": 6, "attention": "eager", "checkpointing": "none"},
        {"precision": "bf16-mixed", "method": "full"},
        {"quantization": "int8"},
        {"method": "full", "grad_accum": 8},
        {},
    ],
    ids=str,
)
def test_a_change_saves_what_it_says(question: dict[str, Any]) -> None:
    """Asked again with the options of a change, the peak is lower by what was promised; the best comes first."""
    answer = wazn.estimate("llama-3.2-1b", **question)
    found = changes(answer)
    assert found
    assert len(found) <= 3
    assert [c.saved_bytes for c in found] == sorted((c.saved_bytes for c in found), reverse=True)
    for change in found:
        again = wazn.estimate("llama-3.2-1b", **{**question, **change.options})
        promised = answer.peak.allocated_bytes - change.saved_bytes
        assert promised == peak(again.timeline).peak_bytes


def test_the_batch_of_a_step_stays_the_same() -> None:
    """15 samples at once become 5 at a time in 3 micro-batches: the same step with less memory."""
    found = changes(wazn.estimate("llama-3.2-1b", micro_batch=15))
    options = next(change.options for change in found if "micro_batch" in change.options)
    assert options == {"micro_batch": 5, "grad_accum": 3}


def test_a_change_tells_whether_it_makes_it_fit() -> None:
    """Fine-tuning all of 8.03 B parameters is far from fitting 24 GB; 15 GiB of frozen weights and adapters do."""
    answer = wazn.estimate("llama-3.1-8b", method="full", gpu="rtx-4090")
    verdicts = {tuple(c.options.items()): c.verdict for c in changes(answer)}
    assert verdicts[(("method", "lora"),)] == "fits"
    assert verdicts[(("optimizer", "adamw-8bit"),)] == "does-not-fit"


def _by_options(answer: Any) -> dict[str, Change]:
    found = {}
    for change in changes(answer):
        words = (f"{name} {value}" for name, value in change.options.items() if value is not None)
        found[", ".join(words)] = change
    return found


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-70b", "h100"), ("qwen2.5-7b", "t4")])
def test_where_lora_is_too_large_qlora_is_offered(model: str, gpu: str) -> None:
    """70.55 B parameters take 141 GB in 16 bits and some 40 GB in four; 7.62 B take 15.2 GB of a T4's 15.6."""
    found = _by_options(wazn.estimate(model, method="full", gpu=gpu))
    assert found["method lora"].verdict == "does-not-fit"
    assert found["method qlora"].verdict in ("fits", "tight")
    assert next(iter(found)) == "method qlora"


def test_qlora_is_not_offered_where_lora_fits() -> None:
    """8.03 B parameters in 16 bits fit into 24 GB: there is no need to quantise them."""
    found = _by_options(wazn.estimate("llama-3.1-8b", method="full", gpu="rtx-4090"))
    assert "method lora" in found
    assert not any("qlora" in options for options in found)


def test_a_stack_that_quantises_the_experts() -> None:
    """transformers 4.57 keeps Mixtral's experts as linear layers, which bitsandbytes replaces; 5.x stacks them."""
    found = _by_options(wazn.estimate("mixtral-8x7b", method="qlora", gpu="a100-80gb"))
    assert found["stack hf@4.57"].verdict == "fits"
    assert found["method lora"].verdict == "does-not-fit"  # 46.70 B parameters x 2 bytes
    found = _by_options(wazn.estimate("mixtral-8x7b", gpu="a6000"))
    assert found["method qlora, stack hf@4.57"].verdict == "fits"
    # GPT-OSS has stacked experts in 4.x too
    found = _by_options(wazn.estimate("gpt-oss-20b", method="qlora", gpu="a6000"))
    assert not any("stack" in options for options in found)


def test_what_int8_keeps_is_dropped_by_reentrant_checkpointing() -> None:
    """Reentrant checkpointing runs the layer without gradients first: what a function keeps on `ctx` is not kept."""
    found = _by_options(wazn.estimate("llama-3.1-8b", quantization="int8"))
    assert found["checkpointing full-reentrant"].saved_bytes > 4 * 2**30


def test_one_micro_batch_lets_gradients_go() -> None:
    """Of 1.54 B parameters the bf16 gradients are 2.87 GiB, alive through forward with a second micro-batch."""
    found = _by_options(wazn.estimate("qwen2.5-1.5b", method="full", grad_accum=8))
    assert 2 * 2**30 < found["grad_accum 1"].saved_bytes < 2 * 1_543_714_304


@pytest.mark.parametrize(
    "question",
    [
        {"model": "llama-3.1-8b", "method": "qlora", "seq_len": 8192, "micro_batch": 4},
        {"model": "qwen2.5-7b", "method": "full", "micro_batch": 4},
        {"model": "llama-3.1-8b", "micro_batch": 12, "seq_len": 32_768},
    ],
    ids=str,
)
def test_changes_are_chained_where_one_is_not_enough(question: dict[str, Any]) -> None:
    """On a T4: two or three together make it fit, and asked again with all of them it does."""
    answer = wazn.estimate(**question, gpu="t4")
    chained, *single = changes(answer)
    assert all(change.verdict == "does-not-fit" for change in single)
    assert len(chained.options) > 1
    assert chained.verdict in ("fits", "tight")
    again = wazn.estimate(**{**question, **chained.options}, gpu="t4")
    assert again.fit.verdict == chained.verdict


def test_a_sequence_is_shortened_as_far_as_it_takes() -> None:
    """Half of 16,384 tokens is still too long for 24 GB, and 2,048 need no second change."""
    answer = wazn.estimate("llama-3.1-8b", seq_len=16_384, gpu="rtx-4090")
    best = changes(answer)[0]
    assert best.options == {"seq_len": 2048}
    assert best.verdict == "fits"


def test_where_nothing_helps_nothing_is_chained() -> None:
    """The weights of 70.55 B parameters in four bits are larger than a card of 24 GB, whatever else is changed."""
    found = changes(wazn.estimate("llama-3.1-70b", method="full", gpu="rtx-4090"))
    assert found
    assert all(change.verdict == "does-not-fit" for change in found)


def test_fp16_is_offered_where_it_lets_a_fused_kernel_run() -> None:
    """On a T4 the memory-efficient kernel takes fp16, but not fewer key than query heads."""
    found = _by_options(wazn.estimate("llama-2-7b", method="qlora", gpu="t4", seq_len=4096))
    # the scores of 32 heads in fp32, twice: 2 x 2 GiB
    assert found["precision fp16-autocast"].saved_bytes >= 4 * 2**30
    found = _by_options(wazn.estimate("llama-3.1-8b", method="qlora", gpu="t4", seq_len=4096))
    assert "precision fp16-autocast" not in found
