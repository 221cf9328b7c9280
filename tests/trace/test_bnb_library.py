"""bitsandbytes before 0.46 calls a library for CUDA that is not there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from wazn.trace.bnb_library import without_library


def old_module() -> Any:
    """What `bitsandbytes/functional.py` of 0.43 has at hand when it dequantises."""
    functional: Any = ModuleType("functional")
    functional.lib = object()
    functional.get_ptr = lambda tensor: tensor.data_ptr()
    functional.is_on_gpu = lambda tensors: 1 / 0
    functional.pre_call = lambda device: 1 / 0
    functional.post_call = lambda device: 1 / 0
    return functional


def test_calls_of_the_library_are_left_out() -> None:
    """Inside, every function of the library exists and does nothing, and nobody asks for pointers or devices."""
    functional = old_module()
    before = dict(vars(functional))
    with without_library(functional):
        assert functional.lib.cdequantize_blockwise_bf16_nf4(functional.get_ptr("a tensor")) is None
        functional.is_on_gpu([])
        functional.post_call(functional.pre_call("cuda:0"))
    assert vars(functional) == before


def test_newer_versions_are_left_alone() -> None:
    """From 0.46 on there is no `pre_call`: operators are registered with PyTorch."""
    functional: Any = ModuleType("functional")
    functional.lib = library = object()
    with without_library(functional):
        assert functional.lib is library
