"""An estimate for programs: the schema `wazn.estimate/1`, every key always present, unknown is null."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from wazn.dtypes import Dtype
from wazn.estimation.answer import Estimate
from wazn.report.notes import note_text

__all__ = ["SCHEMA", "to_json"]

SCHEMA = "wazn.estimate/1"


def to_json(answer: Estimate) -> dict[str, Any]:
    """Return the answer as plain values that `json.dumps` takes."""
    return {
        "schema": SCHEMA,
        "engine": answer.engine,
        "model": plain(answer.model),
        "recipe": {**plain(answer.recipe), "defaults": dict(answer.defaults)},
        "cluster": plain(answer.cluster),
        "peak": plain(answer.peak),
        "breakdown": [
            {"category": line.category, "bytes": line.num_bytes, "basis": line.basis}
            for line in answer.breakdown
        ],
        "holders": [
            {
                "category": holder.category,
                "module": holder.module,
                "op": holder.op,
                "line": holder.line,
                "bytes": holder.num_bytes,
            }
            for holder in answer.holders
        ],
        "outside": [
            {
                "category": line.category,
                "bytes": line.num_bytes,
                "basis": line.basis,
                "source": line.source,
            }
            for line in answer.outside
        ],
        "phases": [plain(phase) for phase in answer.phases],
        "resident": plain(answer.resident),
        "fit": {
            "gpu": answer.fit.gpu,
            "capacity_bytes": answer.fit.capacity_bytes,
            "verdict": answer.fit.verdict.value,
            "headroom_bytes": answer.fit.headroom_bytes,
        },
        "host": plain(answer.host),
        "batch": plain(answer.batch),
        "rehearsed": plain(answer.rehearsed),
        "notes": [
            {"code": note.code, "params": dict(note.params), "text": note_text(note)}
            for note in answer.notes
        ],
    }


def plain(value: Any) -> Any:
    """Return frozen nouns as dictionaries, types by PyTorch's names, enumerations by their words."""
    if isinstance(value, Dtype):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        return value
    return {name: plain(getattr(value, name)) for name in fields}
