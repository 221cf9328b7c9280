"""Change a library for as long as a context lasts, whether it is imported already or only inside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["Patch", "patched", "when_imported"]

Patch = Callable[[ModuleType], AbstractContextManager[None]]


@contextmanager
def patched(owner: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Put attributes of a module or class in place of its own while the context lasts; those it lacks are left out."""
    originals = {name: owner.__dict__[name] for name in replacements if name in owner.__dict__}
    for name in originals:
        setattr(owner, name, replacements[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextmanager
def when_imported(
    patches: Mapping[str, Patch], *, executed_in: Mapping[str, Patch] | None = None
) -> Iterator[None]:
    """Enter `patches[name](module)` for every module that is or will be imported, until the context ends.

    Args:
        executed_in: by name of package, the context in which the code of its modules is executed.
    """
    finder = _Finder(patches, executed_in or {})
    with finder.stack:
        for name in patches:
            if name in sys.modules:
                finder.patch(sys.modules[name])
        sys.meta_path.insert(0, finder)
        finder.stack.callback(sys.meta_path.remove, finder)
        yield


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and has them patched after their execution."""

    def __init__(self, patches: Mapping[str, Patch], executed_in: Mapping[str, Patch]) -> None:
        self.stack = ExitStack()
        self._patches = patches
        self._executed_in = executed_in

    def patch(self, module: ModuleType) -> None:
        """Change a module that is there."""
        self.stack.enter_context(self._patches[module.__name__](module))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own specification, its loader taught to patch; None for other modules."""
        if fullname not in self._patches and _package(fullname) not in self._executed_in:
            return None
        spec = PathFinder.find_spec(fullname, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        context = self._executed_in.get(_package(module.__name__))
        with context(module) if context is not None else nullcontext():
            execute(module)
        if module.__name__ in self._patches:
            self.patch(module)


def _package(name: str) -> str:
    return name.partition(".")[0]
