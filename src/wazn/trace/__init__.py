"""The rehearsal: real library code on fake tensors. The only room, with `measure`, that imports torch.

    tracker     which storages are alive, in order
    world       fake tensors on the cpu device that behave as CUDA tensors do
    opcheck     what one operation saves, holds and returns
    step        whole training steps of a real model class

Nothing is imported here: `import wazn.trace` is free, and the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wazn.errors import MissingExtra

__all__ = ["OpTrace", "StorageTracker", "World", "measure_op"]

_HOMES = {
    "OpTrace": "opcheck",
    "StorageTracker": "tracker",
    "World": "world",
    "measure_op": "opcheck",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "wazn":
            raise
        raise MissingExtra("a rehearsal", extra="trace") from error
    return getattr(home, name)
