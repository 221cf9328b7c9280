"""What would help: the changes that are tried, and that what they promise is kept."""

from __future__ import annotations

from typing import Any

import pytest

import wazn
from wazn.estimation.changes import changes
from wazn.timeline.breakdown import peak


@pytest.mark.parametrize(
    "question",
    [
        {"method": "full"},
        {"micro_batch": 8, "checkpointing": "none"},
        {"micro_batch": 6, "attention": "eager", "checkpointing": "none"},
        {"precision": "bf16-mixed", "method": "full"},
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
