"""A package `triton` whose kernels do nothing: what a training tool's kernels allocate is allocated before they start.

A Triton kernel works on memory that its caller hands over; it returns nothing and takes no memory of its own that
PyTorch's allocator would see. On a machine without a card the rest of such code runs as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from wazn.units import ceil_div

__all__ = ["triton_stand_in"]


class _Kernel:
    """What `@triton.jit` makes of a function: `kernel[grid](*arguments)` launches nothing."""

    def __init__(self, function: Any) -> None:
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return _launch


def _launch(*arguments: Any, **options: Any) -> None:
    """Launch nothing."""


def _jit(function: Any = None, **options: Any) -> Any:
    if function is None:
        return _jit
    return function if isinstance(function, _Kernel) else _Kernel(function)


def _decorator(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return _jit


class _Constant(int):
    """`tl.constexpr`: a number, and a word in annotations."""

    @property
    def value(self) -> int:
        """The number."""
        return int(self)


class _Language(ModuleType):
    """`triton.language`: whatever a kernel's body names is there, and is not called."""

    constexpr = _Constant

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Language(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Only decorators are called while a module is imported."""
        return _jit


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _package() -> dict[str, ModuleType]:
    package, language = ModuleType("triton"), _Language("triton.language")
    package.__dict__.update(
        {
            "__path__": [],
            "__spec__": ModuleSpec("triton", None, is_package=True),
            "__version__": "3.0.0",
            "jit": _jit,
            "autotune": _decorator,
            "heuristics": _decorator,
            "Config": dict,
            "cdiv": ceil_div,
            "next_power_of_2": _next_power_of_2,
            "language": language,
        }
    )
    return {"triton": package, "triton.language": language}


@contextmanager
def triton_stand_in() -> Iterator[None]:
    """Let modules that are imported meanwhile find it; what they took from it they keep."""
    modules = _package()
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
