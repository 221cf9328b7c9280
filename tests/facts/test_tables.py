"""Every table of facts holds what its README says: fields, units, ranges, sources, no line twice."""

from __future__ import annotations

import csv
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import wazn.facts
from wazn.facts.build import load_toml, memory_kind

FOLDER = Path(wazn.facts.__file__).parent
GPUS: list[dict[str, Any]] = load_toml("gpus.toml")["gpu"]
MODELS = {
    path.stem.replace("--", "/", 1): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((FOLDER / "models").glob("*.json"))
}


def rows_of(name: str) -> list[dict[str, str]]:
    """Read one CSV table."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


PRICES = rows_of("prices.csv")
CAPACITIES = rows_of("oom_capacities.csv")

GPU_FIELDS = {
    *(
        "id",
        "name",
        "vendor",
        "arch",
        "compute_capability",
        "memory_gb",
        "devices_per_board",
        "ecc",
    ),
    *("usable_gib", "usable_gib_windows", "usable_gib_wsl2", "usable_gib_ecc_on", "usable_gib_vf"),
    *("usable_observations", "memory_bandwidth_gb_s", "fp32_tflops", "fp16_tflops_dense"),
    *("bf16_tflops_dense", "fp8_tflops_dense", "tflops_basis", "nvlink_gb_s", "pcie_gen", "tdp_w"),
    *("max_per_node", "release_year", "class", "supports_bf16", "supports_fp8", "note", "unknown"),
    *("sources", "checked", "cuda_context_mib", "context_observations"),
}
GPU_MUST = {
    *("id", "name", "vendor", "arch", "compute_capability", "memory_gb", "ecc", "supports_bf16"),
    *("supports_fp8", "class", "unknown", "sources", "checked"),
}
NUMBERS = {  # field: (lowest, highest) that a real card can have
    "memory_gb": (4, 1024),
    "memory_bandwidth_gb_s": (50, 20_000),
    "fp32_tflops": (1, 500),
    "fp16_tflops_dense": (1, 10_000),
    "bf16_tflops_dense": (1, 10_000),
    "fp8_tflops_dense": (1, 20_000),
    "nvlink_gb_s": (50, 5_000),
    "tdp_w": (5, 2_000),
    "max_per_node": (1, 72),
    "release_year": (2015, 2026),
    "cuda_context_mib": (50, 2_000),
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu["id"]))
def test_gpu(gpu: dict[str, Any]) -> None:
    """A GPU has the README's fields, values that a card can have, sources, never more usable than nominal memory."""
    assert set(gpu) >= GPU_MUST
    assert set(gpu) <= GPU_FIELDS
    assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", gpu["id"])
    assert gpu["vendor"] in {"nvidia", "amd", "intel", "apple"}
    assert gpu["class"] in {"consumer", "workstation", "datacenter", "integrated"}
    assert gpu["ecc"] in {"none", "optional", "default-on", "always", "unknown"}
    pattern = {"nvidia": r"\d+\.\d", "amd": r"gfx[0-9a-f]+", "apple": "mps", "intel": "xpu|hpu"}
    assert re.fullmatch(pattern[gpu["vendor"]], gpu["compute_capability"])
    for field, (lowest, highest) in NUMBERS.items():
        if field in gpu:
            assert lowest <= gpu[field] <= highest, field
    nominal = gpu["memory_gb"] / gpu.get("devices_per_board", 1)
    for field in ("usable_gib", "usable_gib_ecc_on", "usable_gib_windows", "usable_gib_wsl2"):
        if field in gpu:
            assert 0.6 * nominal < gpu[field] <= nominal, field
    if gpu["class"] not in {"integrated"} and "usable_gib" in gpu:
        assert gpu["usable_gib"] > 0.9 * nominal
    assert gpu["sources"]
    assert all(len(source) > 8 for source in gpu["sources"])
    assert date.fromisoformat(gpu["checked"]) <= date(2026, 12, 31)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu["id"]))
def test_gpu_evidence(gpu: dict[str, Any]) -> None:
    """What was measured names its observation: usable size and context; what is listed as unknown is absent."""
    for field in gpu["unknown"]:
        assert field not in gpu
    for row in gpu.get("usable_observations", []):
        assert row["gib"] > 0
        assert row["what"]
        assert row["ref"]
    if "usable_gib" in gpu:
        seen = [row["gib"] for row in gpu["usable_observations"]]
        unified_apple = gpu["vendor"] == "apple"  # derived from the hard limit by the factor 1.7
        assert unified_apple or any(abs(gpu["usable_gib"] - gib) < 0.005 for gib in seen)
    if "cuda_context_mib" in gpu:
        assert gpu["cuda_context_mib"] in [row["mib"] for row in gpu["context_observations"]]


def test_gpu_capabilities() -> None:
    """bf16 is in hardware from compute capability 8.0 on, fp8 from 8.9 on (NVIDIA's architecture documents)."""
    for gpu in GPUS:
        if gpu["vendor"] == "nvidia":
            major, minor = (int(part) for part in gpu["compute_capability"].split("."))
            assert gpu["supports_bf16"] == ((major, minor) >= (8, 0)), gpu["id"]
            assert gpu["supports_fp8"] == ((major, minor) >= (8, 9)), gpu["id"]


def test_gpu_ids_are_unique() -> None:
    """No GPU stands twice, by id or by name."""
    assert len({gpu["id"] for gpu in GPUS}) == len(GPUS) == 127
    assert len({gpu["name"] for gpu in GPUS}) == len(GPUS)


def test_memory_kinds() -> None:
    """The kind of memory follows from the chip: cards of which the kind is known by their data sheets."""
    kinds = {gpu["id"]: memory_kind(gpu) for gpu in GPUS}
    assert kinds["a100-sxm4-80gb"] == kinds["a30-24gb"] == kinds["mi300x-192gb"] == "hbm"
    assert kinds["rtx-4090-24gb"] == kinds["rtx-a6000-48gb"] == kinds["rx-7900-xtx-24gb"] == "gddr"
    assert kinds["t4-16gb"] == kinds["l40s-48gb"] == kinds["a10-24gb"] == "gddr-ecc"
    assert kinds["apple-silicon-64gb"] == kinds["gb10-dgx-spark-128gb"] == "unified"


# prices of a card whose form the source does not say
FORM_UNSPECIFIED = {
    *("a100-40gb-form-unspecified", "a100-80gb-form-unspecified"),
    *("h100-80gb-form-unspecified", "v100-16gb-form-unspecified"),
}


def test_prices() -> None:
    """A price is positive, dated or openly undated, of a known GPU, sourced, and consistent with its count."""
    known = {gpu["id"] for gpu in GPUS} | FORM_UNSPECIFIED
    assert len(PRICES) == 608
    for row in PRICES:
        assert row["gpu_id"] in known
        count = int(row["gpu_count"])
        lowest, median = float(row["price_min_usd_h"]), float(row["price_median_usd_h"])
        assert 0 < lowest <= median
        assert abs(float(row["price_per_gpu_min_usd_h"]) * count - lowest) <= 0.0001 * count
        assert 0.01 < float(row["price_per_gpu_min_usd_h"]) < 100
        assert 1 <= count <= 72
        assert row["spot"] in {"0", "1"}
        assert int(row["n_observations"]) >= 1
        assert row["provider"]
        assert row["source"]
        assert row["quality"] in {"hand-collected", "provider-api-dump", "provider-catalog"}
        if row["catalogue_date"]:
            assert (
                date(2023, 1, 1) <= date.fromisoformat(row["catalogue_date"]) <= date(2026, 12, 31)
            )
        else:
            assert row["quality"] == "provider-catalog"


def test_prices_are_unique() -> None:
    """No offer stands twice: the same provider, instance, GPU, count, kind, date and source."""
    fields = ("provider", "instance", "gpu_id", "gpu_count", "spot", "catalogue_date", "source")
    offers = [tuple(row[field] for field in fields) for row in PRICES]
    assert len(set(offers)) == len(offers)


def test_capacities() -> None:
    """A capacity is a positive size with what it measures and where it was seen; dates are ISO, to the month."""
    assert len(CAPACITIES) == 230
    for row in CAPACITIES:
        assert 2 < float(row["total_capacity_gib"]) < 400
        assert row["gpu"]
        assert row["as_printed"]
        assert row["observation"]
        assert row["what_it_measures"]
        assert row["reference"]
        assert re.fullmatch(r"(\d{4}-\d{2}(-\d{2})?)?", row["date"])


def test_capacities_are_unique() -> None:
    """No observation stands twice."""
    lines = [tuple(row.values()) for row in CAPACITIES]
    assert len(set(lines)) == len(lines)


MODEL_NOTES = {
    *("_source", "_published_params", "_published_params_source", "_published_params_of"),
    *("_published_label", "_published_label_source", "_published_excluded"),
    *("_published_excluded_reason", "_meta_params", "_meta_class", "_meta_status", "_auto"),
    *("_untie_lm_head", "_fitted_fields", "_unsourced_fields", "_tied_embeddings"),
    *("_vision_params", "_fused_expert_params", "_attn_modules", "_lora_r16_attn"),
    *("_lora_r16_all_linear", "_lora_r16_all_linear_text_only", "_license", "_license_source"),
    *("_license_doubt", "_same_architecture_as", "_notes", "_from_model_config"),
    "_attn_implementation",
}


@pytest.mark.parametrize("model_id", MODELS, ids=str)
def test_model(model_id: str) -> None:
    """A model names its architecture and its source; counts are whole; a published total agrees as its status says."""
    config = MODELS[model_id]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", model_id)
    assert isinstance(config["model_type"], str)
    assert {key for key in config if key.startswith("_")} <= MODEL_NOTES
    assert len(config["_source"]) > 5
    counted, published = config["_meta_params"], config["_published_params"]
    assert isinstance(counted, int)
    assert 10**7 <= counted < 2 * 10**12
    status = config["_meta_status"]
    if published is None:
        assert status == "label-only"
        assert config["_published_label"]
    else:
        assert isinstance(published, int)
        assert config["_published_params_source"]
        excluded = config.get("_published_excluded") or 0
        if excluded:
            assert config["_published_excluded_reason"]
        off = abs(published - excluded - counted)
        assert off == 0 or (status == "within 0.2%" and off < 0.002 * counted)
    assert ("fitted" in status) == bool(config.get("_fitted_fields"))


def test_number_of_models() -> None:
    """The catalogue has the 318 models that its README counts, 221 of them exact."""
    statuses = [config["_meta_status"] for config in MODELS.values()]
    assert len(statuses) == 318
    assert statuses.count("exact") == 221
    assert statuses.count("label-only") == 36
    assert sum(status.startswith("exact after exclusions") for status in statuses) == 29


def test_overheads() -> None:
    """Every figure of overheads.toml has a source; every NVIDIA generation of the catalogue has a context."""
    table = load_toml("overheads.toml")
    contexts = {row["arch"]: row for row in table["context"]}
    assert len(contexts) == len(table["context"])
    assert set(contexts) == {gpu["arch"] for gpu in GPUS if gpu["vendor"] == "nvidia"}
    for row in table["context"]:
        assert 100 <= row["mib"] <= 1000
        assert set(row) == {"arch", "mib", "from", "how", "source"}
    for row in table["blas_workspace"]:
        assert set(row) == {"vendor", "capabilities", "since_torch", "kib", "source"}
        assert 4096 <= row["kib"] <= 131072
        assert re.fullmatch(r"2\.\d+", row["since_torch"])


def test_names() -> None:
    """Names checked by hand point at entries that exist."""
    models = load_toml("model_names.toml")
    for target in models["aliases"].values():
        assert target in MODELS
    for targets in models["ambiguous"].values():
        assert len(targets) > 1
        assert set(targets) <= set(MODELS)
    assert set(models["siblings"]) <= set(MODELS)
    siblings = [sibling for row in models["siblings"].values() for sibling in row]
    assert len(set(siblings)) == len(siblings)
    gpus = load_toml("gpu_names.toml")
    ids = {gpu["id"] for gpu in GPUS}
    assert set(gpus["preferred"].values()) <= ids
    assert set(gpus["also_sold_as"]) <= ids
    for chip, sizes in gpus["apple"].items():
        assert sizes == sorted(sizes)
        assert {f"apple-silicon-{size}gb" for size in sizes} <= ids, chip


def test_every_file_is_in_the_readme() -> None:
    """The README of the facts names every table that lies beside it."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        if path.suffix in {".toml", ".csv"} and not path.name.startswith("stacks"):
            assert f"`{path.name}`" in readme
    for field in MODEL_NOTES:
        assert f"`{field}`" in readme
