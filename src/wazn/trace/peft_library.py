"""What peft must know of quantised layers whose weights are fake: it goes by the names of bitsandbytes' classes of
parameters, and a fake tensor has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch

from wazn.trace.imports import Patch, patched, when_imported

__all__ = ["patches", "sees_quantised_layers"]

_NAME = "dequantize_module_weight"
# where the function is imported to; what DoRA measures with it are norms of whole matrices
_USERS = ("peft.tuners.lora.dora", "peft.tuners.lora.layer", "peft.tuners.lora.variants")


def patches() -> dict[str, Patch]:
    """Return the changes to peft's modules, by name."""
    return dict.fromkeys(_USERS, _dequantises)


@contextmanager
def sees_quantised_layers() -> Iterator[None]:
    """Make the same changes outside a world, where adapters are added on `meta`."""
    with when_imported(patches()):
        yield


def _dequantises(module: ModuleType) -> AbstractContextManager[None]:
    original: Callable[[Any], Any] | None = getattr(module, _NAME, None)

    def dequantize_module_weight(layer: Any) -> Any:
        if type(layer).__name__ in ("Linear4bit", "Linear8bitLt"):
            return _whole(layer)
        assert original is not None
        return original(layer)

    return patched(module, {_NAME: dequantize_module_weight})


def _whole(layer: Any) -> torch.Tensor:
    """Return a quantised layer's matrix as peft has it from bitsandbytes: in 4 bits of the type that was packed, in 8
    bits of fp32. On `meta` there are no states yet, and nothing to compute.

    Source: `dequantize_bnb_weight` in peft/utils/integrations.py.
    """
    from bitsandbytes import functional

    is_4bit = type(layer).__name__ == "Linear4bit"
    whole: torch.Tensor
    if layer.weight.is_meta:
        dtype = layer.compute_dtype if is_4bit else torch.float32
        whole = torch.empty((layer.out_features, layer.in_features), dtype=dtype, device="meta")
    elif is_4bit:
        whole = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    elif hasattr(functional, "int8_vectorwise_dequant"):
        whole = functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB)
    else:  # before bitsandbytes 0.45
        whole = layer.weight.data * layer.state.SCB.view(-1, 1) * (1 / 127)
    return whole
