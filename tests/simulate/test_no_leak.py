"""Whatever the stack: after two steps only weights, states and the last batch are left."""

from __future__ import annotations

from typing import Any

import pytest

from wazn.estimation.estimate import run_through
from wazn.estimation.options import Options
from wazn.facts.models import load_model
from wazn.timeline.events import Category

STAY = {
    Category.WEIGHTS,
    Category.ADAPTER_WEIGHTS,
    Category.QUANTIZATION_STATE,
    Category.OPTIMIZER_STATES,
    Category.INPUTS,
    Category.WORKSPACES,
}
MODELS = [
    "llama-3.1-8b",
    "mistral-7b-v0.1",
    "gemma-2-9b",
    "Qwen/Qwen2.5-7B",
    "microsoft/Phi-3-mini-4k-instruct",
    "EleutherAI/pythia-6.9b",
    "facebook/opt-6.7b",
    "gpt2",
    "bigscience/bloom-7b1",
    "tiiuae/falcon-7b",
    "mixtral-8x7b",
]
QUESTIONS: list[dict[str, Any]] = [
    {"method": "full", "optimizer": "adamw", "checkpointing": "none"},
    {"method": "full", "optimizer": "adamw"},
    {"method": "lora", "targets": "attention", "checkpointing": "none", "grad_accum": 4},
    {"method": "qlora", "targets": "attention", "checkpointing": "none"},
    {"method": "qlora", "targets": "attention"},
    {"method": "lora", "targets": "attention", "attention": "eager", "keep_outputs": True},
    {"method": "lora", "targets": "attention", "quantization": "int8", "checkpointing": "none"},
]


@pytest.mark.parametrize("version", ["4.42", "4.45", "4.48", "4.53", "4.57", "5.24"])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: "-".join(map(str, q.values())))
@pytest.mark.parametrize("model", MODELS)
def test_nothing_else_stays(model: str, question: dict[str, Any], version: str) -> None:
    """What is allocated for a pass is freed by its end, in repeated layers as in those that are run."""
    options = Options(**question, stack="hf@" + version, seq_len=512, micro_batch=2)
    timeline = run_through(load_model(model), options, None).simulation.timeline
    left = dict.fromkeys(Category, 0)
    for event in timeline.events():
        left[event.tag.category] += event.num_bytes
    assert {
        category: size for category, size in left.items() if size and category not in STAY
    } == {}
