"""What every test stands on: no network, no cache of the person at the desk, no colours."""

from __future__ import annotations

import os
import tempfile

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
