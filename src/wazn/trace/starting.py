"""What starting a rehearsal need not cost: a third of it would be searches for garbage and a compiler.

Imports make a few hundred thousand objects that stay, and the collector would walk over all of them many times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from wazn.trace.imports import patched, when_imported

__all__ = ["nothing_compiled", "objects_frozen", "uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while the context lasts."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Look for garbage only among what is made while the context lasts; there the collector is on, as in a real run."""
    was_enabled, is_ours = gc.isenabled(), not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()
        if is_ours:
            gc.unfreeze()


def nothing_compiled() -> AbstractContextManager[None]:
    """Import bitsandbytes without the compiler that it wraps around its kernels for the CPU, which are not run."""
    return when_imported({}, executed_in={"bitsandbytes": _without_compiler})


def _without_compiler(package: ModuleType) -> AbstractContextManager[None]:
    import torch

    return patched(torch, {"compile": _as_it_is})


def _as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    return _as_it_is if model is None else model
