"""What every test stands on: no network, no cache of the person at the desk, no colours."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from hypothesis import settings

from tests.sampling import DAY

# Set before any test imports a library that reads them once, at import.
_SCRATCH = tempfile.TemporaryDirectory(prefix="wazn-tests-")
os.environ.update(
    HF_HOME=_SCRATCH.name,
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    NO_COLOR="1",
    TOKENIZERS_PARALLELISM="false",
)
for _name in ("HF_TOKEN", "HF_ENDPOINT", "WAZN_DEBUG", "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(_name, None)

# A busy machine is no failure; and CI tries the same examples each time, so that what it says depends on the change.
settings.register_profile("wazn", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("wazn")

# The base install has no torch, and must work without: there, the files that import it are left out
# (`scripts/pythons`). Where torch is installed, as in CI, nothing is.
_NEEDS_TORCH = re.compile(
    r"^(import|from) (torch|transformers|peft|bitsandbytes|trl|wazn\.trace(?!\.specs))\b"
    r"|^torch = pytest\.importorskip",
    re.MULTILINE,
)
_HAS_TORCH = importlib.util.find_spec("torch") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that cannot be imported without torch, where there is none."""
    if _HAS_TORCH or collection_path.suffix != ".py":
        return None
    return True if _NEEDS_TORCH.search(collection_path.read_text("utf-8")) else None


def pytest_collection_finish() -> None:
    """Leave what stays for the whole run out of garbage collection, which every measured operation asks for."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Say at the top of the run what is compared with the real libraries."""
    if not _HAS_TORCH:
        return "without torch: the tests that run the real libraries are left out"
    return f"run for real: what has its turn on {DAY} (WAZN_DAY, WAZN_SAMPLE: tests/sampling.py)"
