"""What happens with a model that is not in the catalogue: each answer of the Hub has its own words.

Each question is asked in a process of its own, as a person would: `huggingface_hub` reads its environment once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.facts.hub_server import CONFIG, VALID_TOKEN, Hub, running_hub

_ASK = """
import json, sys
from wazn.errors import WaznError
from wazn.facts.models import resolve_model
try:
    source = resolve_model(sys.argv[1])
except WaznError as error:
    print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
else:
    print(json.dumps({
        "id": source.id, "origin": source.origin, "path": source.path, "mapping": source.mapping,
        "published": source.published_parameters, "notes": [note.code for note in source.notes],
    }))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """One stand-in for all questions of this file."""
    with running_hub() as running:
        yield running


def ask(url: str, model: str, home: Path, **environment: str) -> dict[str, Any]:
    """Resolve one model in a new process against a Hub at `url`, with an empty or given cache."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    base |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _ASK, model],
        env=base | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def test_found(hub: Hub, tmp_path: Path) -> None:
    """A public model gives its config.json, and the parameter total that the Hub reads from the safetensors headers."""
    answer = ask(hub.url, "org/good", tmp_path)
    assert answer["origin"] == "hub"
    assert answer["id"] == "org/good"
    assert answer["path"] == "org/good/config.json"
    assert answer["mapping"] == CONFIG
    assert answer["published"] == 12345
    assert answer["notes"] == []


def test_only_json_is_fetched(hub: Hub, tmp_path: Path) -> None:
    """Code named by `auto_map` is neither fetched nor run; a note says so."""
    before = len(hub.requests)
    answer = ask(hub.url, "org/with-code", tmp_path)
    assert answer["notes"] == ["model-code-not-run"]
    paths = {path.partition("?")[0] for _, path, _ in hub.requests[before:]}
    assert paths == {"/org/with-code/resolve/main/config.json", "/api/models/org/with-code"}


def test_token(hub: Hub, tmp_path: Path) -> None:
    """HF_TOKEN opens a private model; without it the repository is not found; a wrong one is named as the cause."""
    opened = ask(hub.url, "org/private", tmp_path / "a", HF_TOKEN=VALID_TOKEN)
    assert opened["mapping"] == CONFIG
    closed = ask(hub.url, "org/private", tmp_path / "b")
    assert closed["error"] == "UnknownFact"
    assert "or it is private" in closed["message"]
    refused = ask(hub.url, "org/private", tmp_path / "c", HF_TOKEN="hf_wrong")
    assert refused["error"] == "InputError"
    assert "refused the token" in refused["message"]
    assert "HF_TOKEN" in refused["hint"]


@pytest.mark.parametrize("model", ["org/gated", "org/gated-403"])
def test_gated(hub: Hub, tmp_path: Path, model: str) -> None:
    """A gated model is told apart from a missing one: where to accept, and how to go on without."""
    answer = ask(hub.url, model, tmp_path)
    assert answer["error"] == "InputError"
    assert "gated" in answer["message"]
    assert f"{hub.url}/{model}" in answer["hint"]
    assert "HF_TOKEN" in answer["hint"]
    assert "config.json" in answer["hint"]


def test_missing(hub: Hub, tmp_path: Path) -> None:
    """A repository that does not exist is answered with the nearest models of the catalogue."""
    answer = ask(hub.url, "meta-lama/Llama-3.1-8B", tmp_path)
    assert answer["error"] == "UnknownFact"
    assert "meta-llama/Llama-3.1-8B" in answer["hint"]


def test_no_config(hub: Hub, tmp_path: Path) -> None:
    """A repository without config.json is named as such: adapters and GGUF files have none."""
    answer = ask(hub.url, "org/weights-only", tmp_path)
    assert answer["error"] == "InputError"
    assert "has no config.json" in answer["message"]
    assert "base model" in answer["hint"]


def test_malformed(hub: Hub, tmp_path: Path) -> None:
    """A config.json that is not JSON is a fault of that file, named by repository."""
    answer = ask(hub.url, "org/broken", tmp_path)
    assert answer["error"] == "InputError"
    assert answer["message"].startswith("org/broken/config.json: not valid JSON")


def test_over_large_by_announcement(hub: Hub, tmp_path: Path) -> None:
    """A config.json of 50 MB is refused after its headers: the file itself is never asked for."""
    before = len(hub.requests)
    answer = ask(hub.url, "org/huge", tmp_path)
    assert answer["error"] == "InputError"
    assert "larger than" in answer["message"]
    assert [method for method, _, _ in hub.requests[before:]] == ["HEAD"]


def test_over_large_by_surprise(hub: Hub, tmp_path: Path) -> None:
    """A server that announces no size and sends 400 MB is cut off, and leaves under 64 MB on the disk."""
    answer = ask(hub.url, "org/liar", tmp_path)
    assert answer["error"] == "InputError"
    assert "larger than" in answer["message"]
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert written < 64 * 2**20


def test_redirect_loop(hub: Hub, tmp_path: Path) -> None:
    """A server that redirects to itself is given up."""
    answer = ask(hub.url, "org/circle", tmp_path)
    assert answer["error"] == "InputError"
    assert "too many redirects" in answer["message"]


def test_slow(hub: Hub, tmp_path: Path) -> None:
    """A server that does not answer in time is named as such; the time is the library's HF_HUB_ETAG_TIMEOUT."""
    answer = ask(hub.url, "org/slow", tmp_path, HF_HUB_ETAG_TIMEOUT="1")
    assert answer["error"] == "InputError"
    assert "did not answer in time" in answer["message"]


def test_down(hub: Hub, tmp_path: Path) -> None:
    """A failing server is told with its status."""
    answer = ask(hub.url, "org/down", tmp_path)
    assert answer["error"] == "InputError"
    assert "answered 500" in answer["message"]


def test_refused_connection(tmp_path: Path) -> None:
    """Nobody listens: the address and the reason are named, and what works without it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        answer = ask(url, "org/good", tmp_path)
    assert answer["error"] == "InputError"
    assert url in answer["message"]
    assert "cannot be reached" in answer["message"]
    assert "both work offline" in answer["hint"]


def test_offline(hub: Hub, tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE nothing is asked; what the cache holds still works, with or without a server."""
    before = len(hub.requests)
    answer = ask(hub.url, "org/good", tmp_path, HF_HUB_OFFLINE="1")
    assert answer["error"] == "InputError"
    assert "HF_HUB_OFFLINE" in answer["message"]
    assert len(hub.requests) == before

    assert ask(hub.url, "org/good", tmp_path)["mapping"] == CONFIG
    cached = ask(hub.url, "org/good", tmp_path, HF_HUB_OFFLINE="1")
    assert cached["mapping"] == CONFIG
    assert cached["published"] is None
    unreachable = ask("http://127.0.0.1:9", "org/good", tmp_path)
    assert unreachable["mapping"] == CONFIG


def test_plain_name_stays_here(hub: Hub, tmp_path: Path) -> None:
    """A name without a slash is never looked up on the network, and neither is anything in the catalogue."""
    before = len(hub.requests)
    answer = ask(hub.url, "lama-3.1-8b", tmp_path)
    assert answer["error"] == "UnknownFact"
    assert "meta-llama/Llama-3.1-8B" in answer["hint"]
    assert ask(hub.url, "Qwen/Qwen2.5-7B-Instruct", tmp_path)["origin"] == "catalogue"
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    "setting",
    [
        {"HF_ENDPOINT": "http://[::1"},
        {"HF_ENDPOINT": "http://127.0.0.1:99999"},
        {"HF_HUB_ETAG_TIMEOUT": "abc"},
    ],
    ids=["address", "port", "timeout"],
)
def test_setting_that_cannot_be_read(setting: dict[str, str], tmp_path: Path) -> None:
    """The library fails on import; we say whose fault it is, and stdout stays free for the answer."""
    environment = {"HF_HOME": str(tmp_path), **setting}
    run = subprocess.run(
        [sys.executable, "-m", "wazn", "estimate", "org/good", "--format", "json"],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"error: a setting of huggingface_hub cannot be read: " in run.stderr
    assert b"HF_ENDPOINT" in run.stderr
