"""The rehearsal: real library code on fake tensors. The only room, with `measure`, that imports torch.

    step, script            a recipe and the script around it, rehearsed
    configs, models, adapters, quantized, checkpointing, images, batches     what is trained, on what
    loop, trainer, preference, marks, trainer_marks                          whose loop, and where it is
    world                   fake tensors on the cpu device that behave as CUDA tensors do; it is made of
      habits, autocast, attention, kernels, engine, values, assumed, recall  operations
      card, libraries, imports, flash_attn, liger, outliers, optimizers ...  what code asks and believes
    tracker, places         which storages are alive, in order, and whose they are
    rehearsal               what was seen: events, peaks, timeline
    opcheck, specs          what one operation saves, holds and returns
    refusals, sandbox       what stops a rehearsal, and what it is kept from

Nothing is imported here: `import wazn.trace` is free, and the names below are loaded when first used.
How it works, what it assumes and what it does not see: docs/rehearsal.md.
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
