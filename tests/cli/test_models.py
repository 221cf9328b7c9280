"""`wazn models`: list and search."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_gpus import run


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has every key for every model; Llama-3.1-8B has 8,030,261,248 parameters, published and counted."""
    status, out, _ = run(capsys, "models", "llama 3.1 8b", "--format", "json")
    assert status == 0
    assert json.loads(out) == {
        "schema": "wazn.models/1",
        "models": [
            {
                "id": "meta-llama/Llama-3.1-8B",
                "family": "llama",
                "num_parameters": 8_030_261_248,
                "published_parameters": 8_030_261_248,
                "status": "exact",
                "supported": True,
            }
        ],
    }


def test_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a query all 318 models are listed under one line of headings."""
    status, out, err = run(capsys, "models")
    assert status == 0
    assert len(out.splitlines()) == 319
    assert err == ""
    assert "\x1b" not in out


def test_unsupported_is_listed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that cannot be estimated is in the list, and says so."""
    _, out, _ = run(capsys, "models", "flan-t5-base", "--format", "json")
    assert json.loads(out)["models"][0]["supported"] is False


def test_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """A query that finds nothing leaves with 2 and the nearest names on stderr."""
    status, out, err = run(capsys, "models", "lama-3.1-9b")
    assert status == 2
    assert out == ""
    assert "meta-llama/Llama-3.1-8B" in err
