"""What the program reads is what the readable tables say, and reading it is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import wazn.facts
from wazn.facts.build import load_toml, main, prepared, price_index, short_model_names
from wazn.facts.gpus import list_gpus
from wazn.facts.models import list_models

FOLDER = Path(wazn.facts.__file__).parent


@pytest.mark.parametrize("name", ["gpus.json", "models.json", "prices.json"])
def test_prepared_equals_its_sources(name: str) -> None:
    """Each prepared file is, byte for byte, what `scripts/build_facts` makes of the tables."""
    assert (FOLDER / "prepared" / name).read_text(encoding="utf-8") == prepared()[name]


def test_check_is_quiet_when_nothing_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    """`scripts/build_facts --check` leaves with 0 and writes nothing."""
    assert main(["--check"]) == 0
    assert capsys.readouterr() == ("", "")


def test_gpu_values_carry_over() -> None:
    """Every GPU of gpus.toml is there with its values; one board with two devices is one device of half the size."""
    rows = {row["id"]: row for row in load_toml("gpus.toml")["gpu"]}
    gpus = {gpu.id: gpu for gpu in list_gpus()}
    assert list(gpus) == list(rows)
    for gpu_id, gpu in gpus.items():
        row = rows[gpu_id]
        devices = row.get("devices_per_board", 1)
        assert gpu.memory_gb * devices == row["memory_gb"]
        if gpu.usable_basis == "measured":
            assert gpu.usable_bytes == int(row["usable_gib"] * 2**30)
            assert gpu.usable_reference is None
        else:
            assert "usable_gib" not in row
            assert "usable_gib" in rows[str(gpu.usable_reference)]
            assert 0.6 * 2**30 * gpu.memory_gb < gpu.usable_bytes < 2**30 * gpu.memory_gb
        if gpu.memory_bandwidth_gb_s is not None:
            assert gpu.memory_bandwidth_gb_s * devices == row["memory_bandwidth_gb_s"]
    assert sum(gpu.usable_basis == "measured" for gpu in gpus.values()) == 76
    assert gpus["mi250x-128gb"].memory_gb == 64


def test_model_values_carry_over() -> None:
    """Every model file has one line with its type, its counts and its status."""
    lines = {model.id: model for model in list_models()}
    paths = sorted((FOLDER / "models").glob("*.json"))
    assert len(lines) == len(paths) == 318
    for path in paths:
        config = json.loads(path.read_text(encoding="utf-8"))
        line = lines[path.stem.replace("--", "/", 1)]
        assert line.family == config["model_type"]
        assert line.parameters == config["_meta_params"]
        assert line.published_parameters == config["_published_params"]
        assert line.status == config["_meta_status"]


def test_lowest_price() -> None:
    """Of the dated on-demand rows within a year of the newest: the T4 at AWS for 0.526 USD, 2026-07-20."""
    assert price_index()["t4-16gb"] == {
        "usd_per_gpu_hour": 0.526,
        "provider": "aws",
        "date": "2026-07-20",
    }


@pytest.mark.parametrize(
    ("model_id", "short"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", {"mixtral8x7bv0.1": 0, "mixtral8x7b": 1}),
        ("meta-llama/Meta-Llama-3-8B", {"metallama3-8b": 0, "llama3-8b": 1}),
        ("openai-community/gpt2", {"gpt2": 0}),
    ],
)
def test_short_names(model_id: str, short: dict[str, int]) -> None:
    """A short name leaves out a maker's prefix and the words that say which release it is."""
    assert short_model_names(model_id) == short


def test_reading_imports_no_parser_of_tables() -> None:
    """Resolving a GPU and a model imports neither tomllib, csv, difflib nor huggingface_hub."""
    script = (
        "import sys\n"
        "from wazn.facts.gpus import resolve_gpu\n"
        "from wazn.facts.models import resolve_model\n"
        "resolve_gpu('rtx-4090'); resolve_model('llama-3.1-8b')\n"
        "heavy = {'tomllib', 'csv', 'difflib', 'huggingface_hub', 'pathlib', 'importlib.resources'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"
