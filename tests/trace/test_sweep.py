"""The sweep's record (scripts/sweep): how much of what there is can be rehearsed, and by turns that it still can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.sampling import is_due
from tests.trace.sweep import IN_FP32, LACKING, LISTS, RECORD, Case, run
from wazn.facts.models import list_models

_RECORD: dict[str, Any] = json.loads(RECORD.read_text())
_RAN = [
    (Case(listed, source), entry["layers"])
    for listed, entries in _RECORD.items()
    if listed != "versions"
    for source, entry in entries.items()
    if "error" not in entry
]
_DUE = [(case, layers) for case, layers in _RAN if is_due(case.name, turns=40)]


@pytest.mark.parametrize(
    ("case", "layers"), _DUE, ids=lambda value: str(getattr(value, "name", value))
)
def test_what_is_recorded_as_running_runs(case: Case, layers: int) -> None:
    """One optimizer step of the real class, fully trained, with as many layers as have one of each kind."""
    if transformers.__version__ != _RECORD["versions"]["transformers"]:
        pytest.skip("recorded with another version")
    assert run(case, adapted=False, num_layers=layers)["layers"] == layers


def test_at_least_95_of_100_models_of_the_catalogue_can_be_rehearsed() -> None:
    """All of them are in the record; those without a class in transformers are not rehearsed, since their own code is
    not run.
    """
    entries = _RECORD["catalogue"]
    assert set(entries) == {model.id for model in list_models()}
    failed = [entry["error"] for entry in entries.values() if "error" in entry]
    assert all("has no model type" in error for error in failed)
    assert len(failed) <= 0.05 * len(entries)


def test_at_least_85_of_100_causal_types_can_be_rehearsed() -> None:
    """Of those for which the recorded version of transformers has a class."""
    entries = _RECORD["causal-lm types"]
    if transformers.__version__ == _RECORD["versions"]["transformers"]:
        assert set(entries) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ran = sum("error" not in entry for entry in entries.values())
    assert ran >= 0.85 * len(entries)


def test_at_least_9_of_10_image_text_models_of_the_catalogue_see_an_image() -> None:
    """The others: Gemma 3n needs the package timm, and Llama 4's class stops in transformers 5.24 itself."""
    entries = _RECORD["images"]
    ran = sum("error" not in entry for entry in entries.values())
    assert ran >= 0.9 * len(entries)


def test_the_page_says_what_the_record_says() -> None:
    """docs/rehearsal.md has the same totals."""
    page = (Path(__file__).parents[2] / "docs/rehearsal.md").read_text("utf-8")
    for listed in LISTS:
        entries = _RECORD[listed]
        ran = sum("error" not in entry for entry in entries.values())
        assert f"| {ran} of {len(entries)}" in page
    own = {*LACKING, *IN_FP32} & {case.source for case, _ in _RAN if case.listed == LISTS[-1]}
    assert f", {len(own)} of them by a rule of their own" in page
