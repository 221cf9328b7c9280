"""The rehearsal: real library code on fake tensors. The only room, with `measure`, that imports torch.

    world       fake tensors on the cpu device that behave as CUDA tensors do
    tracker     which storages are alive, in order
    opcheck     what one operation saves, holds and returns
    specs       what is measured there and what was seen, without torch
    step        whole training steps of a real model class; `python -m wazn.trace.step`
    rehearsal   what a rehearsal saw: events, peaks, breakdown, timeline
    trainer     the same steps in the real `transformers.Trainer`

Nothing is imported here: `import wazn.trace` is free, and the names below are loaded when first used.

Known limitations, most of them below a few MiB:

- scratch memory of sorting, scans, `nonzero`, `index_put` with accumulation and of reductions that are
  split over multiprocessors;
- cuDNN's attention, which newer PyTorch prefers on compute capability 9.0 and 10.x: FlashAttention-2 is
  rehearsed there;
- attention splits its keys on small batches (one sample of a few hundred tokens), with fp32 buffers;
- the fused 4-bit product of bitsandbytes is assumed up to 1,536 tokens and never above; below, some
  shapes dequantise;
- 8-bit layers run without the decomposition of outliers, whose number depends on data;
- newest PyTorch returns cuBLAS's workspaces after each product; here they stay, as in versions up to 2.13;
- experts get balanced shares of the tokens; Mamba and linear attention run their reference code;
- sizes are those of the requests: the caching allocator may hand out larger blocks, which a replay of
  the timeline adds.
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
