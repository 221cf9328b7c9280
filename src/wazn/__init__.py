"""wazn: how much GPU memory a fine-tuning run of a language model will need.

    import wazn

    answer = wazn.estimate("llama-3.1-8b", method="qlora", seq_len=4096, gpu="rtx-4090")
    answer.peak.allocated_bytes, answer.fit.verdict, answer.breakdown, answer.timeline

Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wazn._version import __version__

if TYPE_CHECKING:
    from wazn import calc as calc
    from wazn.errors import InputError, MissingExtra, UnknownFact, Unsupported, WaznError
    from wazn.estimation.answer import Estimate, Verdict
    from wazn.estimation.estimate import estimate
    from wazn.facts.models import load_model
    from wazn.timeline.breakdown import peak
    from wazn.timeline.events import Timeline
    from wazn.timeline.replay import replay

__all__ = [
    "Estimate",
    "InputError",
    "MissingExtra",
    "Timeline",
    "UnknownFact",
    "Unsupported",
    "Verdict",
    "WaznError",
    "__version__",
    "calc",
    "estimate",
    "load_model",
    "peak",
    "replay",
]

_HOMES = {
    "Estimate": "wazn.estimation.answer",
    "InputError": "wazn.errors",
    "MissingExtra": "wazn.errors",
    "Timeline": "wazn.timeline.events",
    "UnknownFact": "wazn.errors",
    "Unsupported": "wazn.errors",
    "Verdict": "wazn.estimation.answer",
    "WaznError": "wazn.errors",
    "estimate": "wazn.estimation.estimate",
    "load_model": "wazn.facts.models",
    "peak": "wazn.timeline.breakdown",
    "replay": "wazn.timeline.replay",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "calc":
        return import_module("wazn.calc")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'wazn' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
