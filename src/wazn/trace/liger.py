"""Liger kernels on fake tensors: the package's own Python code, its Triton kernels not launched.

What the package holds (chunks of logits, fp32 gradients of the head, rows of statistics, results written over their
inputs) is allocated by its Python code, in `torch.autograd.Function`s; the kernels fill it. So its modules see a
`triton` whose kernels do nothing where the real one is absent, and the launches of the real one do nothing.

The package changes modules of transformers for good; a world changes them back when it ends.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from wazn.errors import Unsupported
from wazn.timeline.events import Phase
from wazn.trace.imports import Patch, patched
from wazn.trace.marks import at_loss, phase
from wazn.trace.tracker import StorageTracker
from wazn.units import ceil_div

__all__ = ["EXECUTED_IN", "apply_liger", "patches", "require_liger", "sees_triton"]


def require_liger() -> None:
    """Make sure that the package is installed; nothing stands for it, because what it holds depends on its version.

    Raises: Unsupported.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unsupported(
            "Liger kernels are rehearsed with the package liger-kernel, which is not installed",
            hint="pip install --no-deps liger-kernel (it needs neither Triton nor a GPU for this)",
        )


def apply_liger(model: Any, **config: bool) -> None:
    """Put the kernels into a model of transformers, as `use_liger_kernel=True` of `TrainingArguments` does.

    Must be called inside a world, and a rehearsal of the real Trainer needs it not: Trainer does it.

    Args:
        config: which kernels, such as `rope` or `fused_linear_cross_entropy`; the package's choice otherwise.
    Raises: Unsupported if the package is not installed.
    """
    require_liger()
    monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")

    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    monkey_patch._apply_liger_kernel_to_instance(model=model, **config)


class _Kernel:
    """A kernel that is launched and does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _launch


def _launch(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


class _Constant:
    """`tl.constexpr`: an annotation, or a number that Python code reads back."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Namespace(ModuleType):
    """What kernels name in their bodies and annotations, such as `tl.float32`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = _Namespace(f"{self.__name__}.{name}")
        setattr(self, name, child)
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


def _unchanged(*args: Any, **options: Any) -> Callable[[Any], Any]:
    """Stand for `autotune` and `heuristics`."""

    def decorate(kernel: Any) -> Any:
        return kernel

    return decorate


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _make_triton() -> ModuleType:
    module = _Namespace("triton")
    contents = {
        "__version__": _VERSION,
        "jit": _jit,
        "autotune": _unchanged,
        "heuristics": _unchanged,
        "cdiv": ceil_div,
        "next_power_of_2": _next_power_of_2,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    module.language.constexpr = _Constant
    return module


_VERSION = "3.0.0"  # the oldest in which everything that the package imports has its place of today
_TRITON = _make_triton()


@contextmanager
def sees_triton(module: ModuleType) -> Iterator[None]:
    """Let the `import` statements of one module find Triton: PyTorch and others ask whether it is there, and it is not.

    The statement calls `__import__` of the module's own `__builtins__`.
    """
    if importlib.util.find_spec("triton") is None:
        own = {**vars(builtins), "__import__": _import}
        vars(module)["__builtins__"] = own
    yield


def _import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    if level == 0 and name.partition(".")[0] == "triton":
        return _triton(name) if fromlist else _TRITON
    module = builtins.__import__(name, globals, locals, fromlist, level)
    if module is importlib:
        copy = ModuleType("importlib")
        vars(copy).update(vars(importlib), import_module=_import_module)
        return copy
    return module


def _import_module(name: str, package: str | None = None) -> ModuleType:
    if name.partition(".")[0] == "triton":
        return _triton(name)
    return importlib.import_module(name, package)


def _triton(name: str) -> Any:
    module: Any = _TRITON
    for part in name.split(".")[1:]:
        module = getattr(module, part)
    return module


@contextmanager
def _kernels_do_nothing(jit: ModuleType) -> Iterator[None]:
    """Source: `KernelInterface` in triton/runtime/jit.py, the base of what is launched, tuned or not."""

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return _launch

    with patched(jit.KernelInterface, {"__getitem__": launcher}):
        yield


@contextmanager
def _transformers_as_before(monkey_patch: ModuleType) -> Iterator[None]:
    """Undo what `_apply_liger_kernel_to_instance` does to modules and classes, when the context ends."""
    name = "_apply_liger_kernel_to_instance"
    original = getattr(monkey_patch, name)
    before: dict[Any, dict[str, Any]] = {torch.nn.functional: dict(vars(torch.nn.functional))}

    def apply(model: Any, **options: Any) -> Any:
        for owner in _owners(model):
            before.setdefault(owner, dict(vars(owner)))
        return original(model, **options)

    try:
        with patched(monkey_patch, {name: apply}):
            yield
    finally:
        for owner, contents in before.items():
            for attribute, value in vars(owner).copy().items():
                if attribute in contents and contents[attribute] is not value:
                    setattr(owner, attribute, contents[attribute])


def _owners(model: Any) -> set[Any]:
    """Return the modules in which the parts of a model are defined, and the classes in them."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    modules = {
        sys.modules[kind.__module__]
        for kind in kinds
        if kind.__module__.startswith("transformers.")
    }
    classes = {
        item for module in modules for item in vars(module).values() if _is_own(item, module)
    }
    return modules | classes


def _is_own(item: Any, module: ModuleType) -> bool:
    return isinstance(item, type) and item.__module__ == module.__name__


def patches(tracker: StorageTracker) -> dict[str, Patch]:
    """Return what is changed in the package and in Triton; what its losses make counts to the loss."""
    made: dict[str, Patch] = {
        f"liger_kernel.ops.{name}": partial(_counted_to_loss, tracker, f"{name}_forward")
        for name in ("cross_entropy", "fused_linear_cross_entropy")
    }
    return made | {
        "liger_kernel.transformers.monkey_patch": _transformers_as_before,
        "triton.runtime.jit": _kernels_do_nothing,
    }


@contextmanager
def _counted_to_loss(tracker: StorageTracker, name: str, module: ModuleType) -> Iterator[None]:
    original = getattr(module, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with phase(tracker, Phase.LOSS), at_loss(tracker):
            return original(*args, **kwargs)

    with patched(module, {name: marked}):
        yield


EXECUTED_IN: dict[str, Patch] = {"liger_kernel": sees_triton}
