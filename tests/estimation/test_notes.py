"""What is said beside the numbers, and that it is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import wazn
from wazn.estimation.notes import running_attention
from wazn.facts.stacks import RULED_FIELDS, resolve_stack

SOURCE = Path(__file__).resolve().parents[2] / "src" / "wazn"


def test_all_habits_are_followed() -> None:
    """The simulation or the options read every habit, but for the type to load, which is the question's."""
    files = [*(SOURCE / "simulate").glob("*.py"), SOURCE / "estimation" / "options.py"]
    text = "\n".join(path.read_text("utf-8") for path in files)
    read = set(re.findall(r"\bhabits\.(\w+)", text))
    assert set(RULED_FIELDS) - read == {"loads_fp32"}


def _notes(model: str, **question: Any) -> dict[str, dict[str, object]]:
    return {note.code: dict(note.params) for note in wazn.estimate(model, **question).notes}


def test_a_margin_below_what_measured_processes_held_is_thin() -> None:
    """Below 2 GiB, where the verdict is `fits`, on a card that is named: what is left is told, to the byte."""
    seen = set()
    for seq_len in (1024, 2048, 2560, 3072, 3584, 4096, 5120):
        answer = wazn.estimate("llama-3.1-8b", gpu="rtx-4090", seq_len=seq_len)
        headroom_bytes = answer.fit.headroom_bytes
        assert headroom_bytes is not None
        thin = answer.fit.verdict == "fits" and headroom_bytes < 2**31
        found = [note for note in answer.notes if note.code == "thin-margin"]
        assert [note.params for note in found] == [{"headroom_bytes": headroom_bytes}] * thin
        seen.add((answer.fit.verdict.value, thin))
    assert {("fits", True), ("fits", False)} <= seen
    assert "thin-margin" not in _notes("smollm2-135m")


def test_experts_that_are_not_quantised_can_outweigh_all_that_is() -> None:
    """Mixtral's 45.1 B parameters in experts take 180 GB in fp32, all 46.7 B in 16 bits 93; as they are, less."""
    assert "qlora-larger-than-lora" in _notes("mixtral-8x7b", method="qlora")
    unprepared = _notes("mixtral-8x7b", method="qlora", kbit_preparation="none")
    assert "experts-not-quantised" in unprepared
    assert "qlora-larger-than-lora" not in unprepared
    assert "experts-not-quantised" not in _notes("mixtral-8x7b", method="qlora", stack="hf@4.57")


def test_int8_keeps_its_inputs_under_one_kind_of_checkpointing() -> None:
    """`MatMul8bitLt` keeps them on `ctx`, which hooks on saved tensors do not see; nf4 on a new stack keeps none."""
    assert "int8-keeps-inputs" in _notes("smollm2-135m", quantization="int8", stack="hf")
    for other in (
        {"quantization": "int8", "checkpointing": "full-reentrant"},
        {"quantization": "nf4"},
    ):
        assert "int8-keeps-inputs" not in _notes("smollm2-135m", **other)


def test_published_weights_that_are_quantised() -> None:
    """GPT-OSS is published in MXFP4; the run that is weighed has 16-bit weights."""
    found = _notes("gpt-oss-20b", seq_len=64)["published-quantised"]
    assert found == {"format": "MXFP4", "dtype": "bfloat16"}
    assert "published-quantised" not in _notes("smollm2-135m")


@pytest.mark.parametrize(("gpu", "said"), [("mi300x", True), ("h100", False)])
def test_whose_allocator_is_replayed(gpu: str, said: bool) -> None:
    """The allocator is CUDA's; on another maker's card that is said."""
    assert ("allocator-of-cuda" in _notes("smollm2-135m", gpu=gpu)) is said


def test_the_precision_to_type_on_a_card_without_bfloat16() -> None:
    """fp16 under autocast with adapters; with weights that are trained fp32 ones, as the scaler refuses fp16."""
    for method, precision in (("lora", "fp16-autocast"), ("full", "fp16-mixed")):
        found = _notes("smollm2-135m", gpu="t4", method=method)["bf16-not-in-hardware"]
        assert found["precision"] == precision
        again = _notes("smollm2-135m", gpu="t4", method=method, precision=precision)
        assert "bf16-not-in-hardware" not in again


def test_the_kernel_that_takes_fewer_key_heads() -> None:
    """On a T4 in fp16 it is the memory-efficient one, which wants as many key as query heads (Llama 2, not Llama 3)."""
    for model, kernel in (("llama-2-7b", "memory-efficient"), ("llama-3.1-8b", "math")):
        found = _notes(model, gpu="t4", precision="fp16-autocast", seq_len=64)
        assert found["flash-not-on-this-gpu"]["instead"] == kernel


@pytest.mark.parametrize(
    ("model", "runs"), [("gpt-oss-20b", "eager"), ("gemma-2-9b", "eager"), ("smollm2-135m", "sdpa")]
)
def test_the_attention_that_runs(model: str, runs: str) -> None:
    """GPT-OSS has sinks and Gemma 2 caps its scores, which scaled_dot_product_attention does not know."""
    answer = wazn.estimate(model, seq_len=64)
    habits = resolve_stack("hf", family=answer.spec.family)
    assert running_attention(answer.spec, answer.recipe, habits) == runs
