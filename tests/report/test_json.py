"""The schema `wazn.estimate/1`: every key there, every sum right, nothing that JSON cannot say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import wazn
from wazn.report.json import to_json

# As the contract has it; a change here is a change of the schema.
KEYS: dict[str, Any] = {
    "schema": None,
    "engine": None,
    "model": {"id", "family", "num_parameters", "num_trainable_parameters"},
    "recipe": None,
    "cluster": None,
    "peak": {"allocated_bytes", "reserved_bytes", "device_bytes", "phase", "step"},
    "breakdown": [{"category", "bytes", "basis"}],
    "holders": [{"category", "module", "op", "line", "bytes"}],
    "outside": [{"category", "bytes", "basis", "source"}],
    "phases": [{"step", "phase", "peak_allocated_bytes"}],
    "resident": {
        "weights_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "adapter_bytes",
        "quantization_state_bytes",
    },
    "fit": {"gpu", "capacity_bytes", "verdict", "headroom_bytes"},
    "host": {"ram_bytes", "disk_bytes"},
    "batch": {"micro_batch", "grad_accum", "data_parallel", "effective_batch", "tokens_per_step"},
    "rehearsed": None,
    "notes": [{"code", "params", "text"}],
}
CATEGORIES = {
    "weights", "quantization-state", "adapter-weights", "gradients", "optimizer-states", "activations",
    "logits-and-loss", "temporary", "communication", "workspaces", "inputs",
}  # fmt: skip
RECIPE = {
    "method", "adapter", "quantization", "precision", "optimizer", "micro_batch", "seq_len", "grad_accum",
    "checkpointing", "attention", "loss", "stack", "defaults",
}  # fmt: skip

QUESTIONS: list[dict[str, Any]] = [
    {},
    {"gpu": "rtx-4090"},
    {"gpu": "rtx-4090", "method": "full"},
    {"gpu": "h100", "method": "full", "optimizer": "paged-adamw-8bit", "grad_accum": 4},
    {"gpu": "t4", "precision": "fp16-mixed", "checkpointing": "none", "seq_len": 100},
    {"gpu": "24GB", "method": "qlora", "micro_batch": 2},
    {"gpu": "mi300x", "stack": "hf@4.48", "targets": "q_proj,nope", "seq_len": 200_000},
]


@pytest.fixture(params=QUESTIONS, ids=str)
def document(request: pytest.FixtureRequest) -> Any:
    """One answer, as a program on the other side of a pipe reads it."""
    return json.loads(json.dumps(to_json(wazn.estimate("llama-3.1-8b", **request.param))))


def test_every_key_is_there(document: Any) -> None:
    """The keys are those of the contract, whatever was asked."""
    assert list(document) == list(KEYS)
    assert document["schema"] == "wazn.estimate/1"
    for key, inner in KEYS.items():
        if isinstance(inner, set):
            assert set(document[key]) == inner
        elif isinstance(inner, list):
            assert all(set(item) == inner[0] for item in document[key]), key
    assert set(document["recipe"]) >= RECIPE


def test_the_sums_are_exact(document: Any) -> None:
    """Lines sum to the allocated peak; reserved and outside to the device; what is left to the capacity."""
    peak = document["peak"]
    assert sum(line["bytes"] for line in document["breakdown"]) == peak["allocated_bytes"]
    assert sum(holder["bytes"] for holder in document["holders"]) == peak["allocated_bytes"]
    outside = sum(line["bytes"] for line in document["outside"])
    assert peak["reserved_bytes"] + outside == peak["device_bytes"]
    assert peak["allocated_bytes"] <= peak["reserved_bytes"]
    highest = max(phase["peak_allocated_bytes"] for phase in document["phases"])
    assert highest == peak["allocated_bytes"]
    fit = document["fit"]
    if fit["gpu"] is not None:
        assert fit["capacity_bytes"] - peak["device_bytes"] == fit["headroom_bytes"]
        assert (fit["verdict"] == "does-not-fit") == (fit["headroom_bytes"] < 0)


def test_the_words_are_those_of_the_contract(document: Any) -> None:
    """Categories, verdicts and bases are on the lists that programs were promised."""
    assert {line["category"] for line in document["breakdown"]} <= CATEGORIES
    lines = [*document["breakdown"], *document["outside"]]
    assert {line["basis"] for line in lines} <= {"counted", "traced", "measured", "assumed"}
    assert document["fit"]["verdict"] in ("fits", "tight", "does-not-fit", "no-gpu-given")
    assert all(note["text"] for note in document["notes"])


def test_the_page_names_every_key() -> None:
    """docs/answer.md describes each key of the document."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "answer.md").read_text("utf-8")
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    assert [key for key in KEYS if f"`{key}`" not in rows] == []


def test_unknown_is_null() -> None:
    """Without a card there is no capacity and no headroom; what the host needs is not known yet."""
    document = to_json(wazn.estimate("smollm2-135m"))
    assert document["fit"] == {
        "gpu": None,
        "capacity_bytes": None,
        "verdict": "no-gpu-given",
        "headroom_bytes": None,
    }
    assert document["cluster"]["gpu"] is None
    assert document["outside"] == []
    assert document["host"] == {"ram_bytes": None, "disk_bytes": None}


def test_what_was_taken_by_default_says_who_took_it() -> None:
    """What was asked for is no default; the optimizer is the stack's, the length wazn's."""
    defaults = to_json(wazn.estimate("smollm2-135m", rank=8))["recipe"]["defaults"]
    assert "rank" not in defaults
    assert defaults["optimizer"] == "stack"
    assert defaults["seq-len"] == "wazn"


def test_the_batch_is_multiplied_out() -> None:
    """3 samples in 5 micro-batches of 100 tokens: 15 samples and 1,500 tokens in each step."""
    document = to_json(wazn.estimate("smollm2-135m", micro_batch=3, grad_accum=5, seq_len=100))
    assert document["batch"] == {
        "micro_batch": 3,
        "grad_accum": 5,
        "data_parallel": 1,
        "effective_batch": 15,
        "tokens_per_step": 1500,
    }
