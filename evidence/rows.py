"""Measured runs: reading them, and checking what is written in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wazn.errors import InputError

__all__ = ["MEASURED", "Row", "faults", "read_rows"]

MEASURED = Path(__file__).with_name("measured.jsonl")

_TEXT, _NUMBER, _COUNT, _SWITCH = (str,), (int, float), (int,), (bool,)
_OPTIONAL = (type(None),)
# The kind of each field; what is null is not said by the source.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "id": _TEXT,
    "source_repo": _TEXT,
    "source_path": _TEXT,
    "source_commit": _TEXT,
    "model": _TEXT,
    "params_b": _NUMBER + _OPTIONAL,
    "method": _TEXT,
    "lora_rank": _COUNT + _OPTIONAL,
    "lora_targets": _TEXT + _OPTIONAL,
    "trainable_params": _COUNT + _OPTIONAL,
    "optimizer": _TEXT + _OPTIONAL,
    "weight_dtype": _TEXT + _OPTIONAL,
    "compute_dtype": _TEXT + _OPTIONAL,
    "master_weights": _SWITCH + _OPTIONAL,
    "quant": _TEXT,
    "double_quant": _SWITCH + _OPTIONAL,
    "micro_batch": _COUNT + _OPTIONAL,
    "seq_len": _COUNT + _OPTIONAL,
    "seq_len_kind": _TEXT + _OPTIONAL,
    "grad_accum": _COUNT + _OPTIONAL,
    "grad_checkpointing": _TEXT + _OPTIONAL,
    "attention": _TEXT + _OPTIONAL,
    "loss_impl": _TEXT + _OPTIONAL,
    "compile": _SWITCH + _OPTIONAL,
    "fused_optimizer_in_backward": _SWITCH + _OPTIONAL,
    "activation_offload": _SWITCH + _OPTIONAL,
    "cpu_offload": _TEXT + _OPTIONAL,
    "parallelism": _TEXT + _OPTIONAL,
    "num_gpus": _COUNT + _OPTIONAL,
    "gpu": _TEXT + _OPTIONAL,
    "framework": _TEXT,
    "framework_version": _TEXT + _OPTIONAL,
    "torch_version": _TEXT + _OPTIONAL,
    "peak_gb": _NUMBER + _OPTIONAL,
    "peak_unit": _TEXT + _OPTIONAL,
    "peak_metric": _TEXT,
    "outcome": _TEXT,
    "notes": _TEXT,
    "peak_bytes": _COUNT + _OPTIONAL,
    "reliability": _TEXT,
    "arch": (dict,) + _OPTIONAL,
}
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peak_metric": ("max_memory_allocated", "max_memory_reserved", "nvidia-smi", "unknown"),
    "outcome": ("ok", "oom"),
    "reliability": ("A", "B", "C"),
    "seq_len_kind": ("fixed", "max", "dataset", "mean", None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What of a measured run is needed to rehearse it; names are those of the file, bytes are of one GPU.

    peak_bytes: None where the run ran out of memory.
    seq_len_kind: `fixed` where each batch has exactly this length; `max`, `dataset` where the data decide.
    """

    id: str
    source_repo: str
    source_path: str
    model: str
    params_b: float | None
    method: str
    lora_rank: int | None
    lora_targets: str | None
    micro_batch: int | None
    seq_len: int | None
    seq_len_kind: str | None
    quant: str
    gpu: str | None
    framework: str
    peak_metric: str
    peak_bytes: int | None
    outcome: str
    reliability: str
    notes: str

    @property
    def left_bytes(self) -> int | None:
        """What `torch.cuda.memory_allocated` said when training had ended, where the notes have it."""
        _, _, after = self.notes.partition("torch alloc = ")
        digits = after.partition(";")[0].strip()
        return int(digits) if digits.isdigit() else None


def read_rows(file: Path = MEASURED) -> list[Row]:
    """Return the rows of a file, in its order.

    Raises: InputError with every fault that was found.
    """
    tables = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = list(faults(tables))
    if found:
        raise InputError(f"{file.name}: " + "; ".join(found[:10]))
    names = [field.name for field in fields(Row)]
    return [Row(**{name: table[name] for name in names}) for table in tables]


def faults(tables: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield what is wrong with rows as they stand in the file."""
    seen: set[object] = set()
    for number, table in enumerate(tables, start=1):
        name = table.get("id")
        where = f"line {number} ({name})"
        if name in seen:
            yield f"{where}: the id is there twice"
        seen.add(name)
        yield from (f"{where}: `{key}` is missing" for key in _KINDS.keys() - table.keys())
        yield from (f"{where}: `{key}` is no field" for key in table.keys() - _KINDS.keys())
        for key, value in table.items():
            kinds = _KINDS.get(key, (object,))
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                yield f"{where}: `{key}` is {value!r}"
            if key in _VALUES and value not in _VALUES[key]:
                yield f"{where}: `{key}` is {value!r}, not one of {_VALUES[key]}"
        if table.get("outcome") == "ok" and not table.get("peak_bytes"):
            yield f"{where}: a run that went well has no peak"
