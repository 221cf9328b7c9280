"""Which packages of kernels count as installed: mamba-ssm, causal-conv1d, flash-linear-attention, and RWKV's own.

The code that transformers has for these layers itself goes token by token or writes out what the kernels do not, so
nobody trains with it who can install them.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

from wazn.errors import Unsupported
from wazn.trace.chunk_scan import mamba_split_conv1d_scan_combined
from wazn.trace.delta_rule import chunk_gated_delta_rule
from wazn.trace.imports import Patch, patched
from wazn.trace.selective_scan import causal_conv1d_fn, mamba_inner_fn, selective_scan_fn

__all__ = ["are_in", "patches"]

_SINCE_5_16 = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
}
_FIRST_KIND = ("mamba", "falcon_mamba", "jamba", "zamba")


def patches() -> dict[str, Patch]:
    """Return what puts the stand-ins into the modules of transformers that are imported.

    Since 5.16 each module has a function of its own that calls the package, before it has the package's or None.
    """
    made: dict[str, Patch] = {}
    for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
        kind = name.rpartition(".modeling_")[2]
        if kind in _FIRST_KIND:
            made[name] = _all_kernels
        elif kind == "rwkv":
            made[name] = _rwkv_kernels
        elif any(callable(sys.modules[name].__dict__.get(kernel)) for kernel in _SINCE_5_16):
            made[name] = _newer_kernels
    return made


def are_in(model: Any) -> bool:
    """Say whether a model has layers whose kernels are stood in for."""
    modules = patches()
    return any(type(module).__module__ in modules for module in model.modules())


def _all_kernels(module: ModuleType) -> AbstractContextManager[None]:
    return patched(
        module,
        {
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": _not_in_training,
            "mamba_inner_fn": mamba_inner_fn,
            "mamba_selective_scan": selective_scan_fn,
            "selective_scan_fn": selective_scan_fn,
            "selective_state_update": _not_in_training,
            "is_fast_path_available": True,
            "_lazy_load_causal_conv1d": lambda: (_not_in_training, causal_conv1d_fn),
        },
    )


def _newer_kernels(module: ModuleType) -> AbstractContextManager[None]:
    return patched(module, _SINCE_5_16)


def _rwkv_kernels(module: ModuleType) -> AbstractContextManager[None]:
    """They fill tensors that are handed to them: `RwkvLinearAttention` in modeling_rwkv.py, which runs as it is."""
    names = ("forward", "forward_with_state", "backward")
    filled = {f"{name}{suffix}": _fill for name in names for suffix in ("", "_bf16")}
    return patched(
        module, {"rwkv_cuda_kernel": SimpleNamespace(max_seq_length=sys.maxsize, **filled)}
    )


def _fill(*tensors: Any) -> None:
    """Write into tensors that are there."""


def _not_in_training(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported("generation token by token is not rehearsed")
