"""Whole runs with every optimizer: the tape holds at its peak what the real Trainer, with the real optimizer, holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wazn
from tests.sampling import is_due
from wazn.recipe import Optimizer
from wazn.timeline.breakdown import peak

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
    "tie_word_embeddings": False,
}
SCALARS_BYTES = (
    16 * 512
)  # numbers of the loss, of clipping and of logging, and the rotary table's own copy
CASES = [
    f"{optimizer}, {precision}"
    for optimizer in Optimizer
    for precision in ("bf16", "bf16-mixed")
    if is_due(f"{optimizer}, {precision}", turns=6)
]


@pytest.mark.parametrize("case", CASES)
def test_the_tape_peaks_where_trainer_does(case: str, tmp_path: Path) -> None:
    """Full fine-tuning of a small Llama, two steps: the allocated peak and the managed memory."""
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    optimizer, precision = case.split(", ")
    counted, traced = (
        wazn.estimate(
            str(tmp_path),
            method="full",
            optimizer=optimizer,
            precision=precision,
            seq_len=128,
            engine=engine,
        )
        for engine in ("simulate", "trace")
    )
    levels = [
        peak(answer.timeline) for answer in (counted, traced)
    ]  # without the allocator's unsplit rests
    assert abs(levels[0].peak_bytes - levels[1].peak_bytes) <= SCALARS_BYTES
    assert [line.num_bytes for line in counted.outside] == [
        line.num_bytes for line in traced.outside
    ]
    assert levels[0].phase == levels[1].phase
