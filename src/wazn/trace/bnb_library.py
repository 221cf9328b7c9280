"""bitsandbytes before 0.46 without its library for CUDA.

It calls that library with pointers to memory that PyTorch has allocated for the results; fake tensors have no
pointers, and a machine without a card has no library. The calls write in place and return nothing, so they are left
out. Later versions register operators, which run on fake tensors as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from wazn.trace.imports import patched

__all__ = ["without_library"]


class _Library:
    """Has every function; all do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Return nothing."""


def _same(value: Any) -> Any:
    return value


@contextmanager
def without_library(functional: ModuleType) -> Iterator[None]:
    """Leave out the calls of the library while the context lasts, where `bitsandbytes.functional` makes them."""
    if not hasattr(functional, "pre_call"):
        yield
        return
    replacements = {
        "lib": _Library(),
        "get_ptr": _nothing,
        "is_on_gpu": _nothing,
        "pre_call": _same,
        "post_call": _nothing,
        "_get_tensor_stream": _nothing,
    }
    with patched(functional, replacements):
        yield
