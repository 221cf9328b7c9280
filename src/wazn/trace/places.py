"""Where an allocation comes from: the module of the model and the line of code.

In forward the module is the innermost one whose `__call__` runs. In backward no module runs, but the node of
autograd's graph that does was numbered in forward, in order (`Node._sequence_nr`): the numbers at which one module
gave way to another tell whose it is. What a checkpoint runs again in backward has its modules around it as in
forward.

The line is the innermost one that is neither torch's nor this package's; in backward the one that made the node in
forward.

Source of the numbering: `Node::Node` and `at::sequence_number` in torch/csrc/autograd/function.h.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

__all__ = ["NOWHERE", "Place", "Places", "unwrapped"]

_INSIDE = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
_STANDARD = sysconfig.get_paths()["stdlib"]


class Place(NamedTuple):
    """A module's path, such as `model.layers.17.mlp`, and a line, such as `transformers/trainer.py:3811`."""

    module: str = ""
    line: str = ""


NOWHERE = Place()


def unwrapped(name: str) -> str:
    """Return a module's path without the wrappers of peft, which are nameless as the model itself is.

    >>> unwrapped("base_model.model.lm_head"), unwrapped("base_model.model"), unwrapped("base_model")
    ('lm_head', '', '')
    """
    for wrapper in ("base_model.model", "base_model"):
        if name == wrapper or name.startswith(wrapper + "."):
            return name[len(wrapper) + 1 :]
    return name


class Places:
    """Knows the module and the line of what is being allocated.

    `names`, by the identity of the module, are set by `of_model`; a module that has none counts to the one around it.
    """

    def __init__(self, clock: Callable[[], int] = int) -> None:
        self.on_call: Callable[[], None] | None = None  # told of each call of a module
        self.calls: list[tuple[int, int]] = []  # begin and end of each outermost call, by `clock`
        self._clock = clock
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._starts: list[int] = []  # sequence numbers at which the module changed ...
        self._modules: list[str] = []  # ... and to which
        self._made: dict[int, Place] = {}  # by sequence number of the node
        self._files: dict[str, str] = {}  # "" for those that are passed over
        self._places: dict[tuple[str, str, int], Place] = {}

    def of_model(self, model: Any, *, under: str = "") -> None:
        """Take the names of a model's modules; wrappers of peft are left out of them.

        under: goes before them, with its dot, where the model is not the only one.
        """
        for name, module in model.named_modules():
            self._names[id(module)] = under + unwrapped(name)

    @property
    def num_modules(self) -> int:
        """How many modules have a name."""
        return len(self._names)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of modules while the context lasts."""
        original = torch.nn.Module.__call__
        names, inside = self._names, self.inside

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None:
                return original(module, *args, **kwargs)
            if self.on_call is not None:
                self.on_call()
            with inside(name):
                return original(module, *args, **kwargs)

        torch.nn.Module.__call__ = call
        try:
            with self._in_checkpoints():
                yield
        finally:
            torch.nn.Module.__call__ = original

    @contextmanager
    def _in_checkpoints(self) -> Iterator[None]:
        """Know the module that a checkpoint runs again, of which newer transformers checkpoint `forward` alone.

        Both kinds of `torch.utils.checkpoint.checkpoint` hand the function on, to these two.
        """
        plain, reentrant = (
            checkpoint._checkpoint_without_reentrant_generator,
            checkpoint.CheckpointFunction,
        )

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            name = self._stack[-1] if self._stack else ""

            def run(*args: Any, **kwargs: Any) -> Any:
                with self.inside(name):
                    return function(*args, **kwargs)

            return run

        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return reentrant.apply(around(function), *args)

        def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return plain(around(function), *args, **kwargs)

        again = type("CheckpointFunction", (reentrant,), {"apply": staticmethod(apply)})
        checkpoint.__dict__.update(
            _checkpoint_without_reentrant_generator=generator, CheckpointFunction=again
        )
        try:
            yield
        finally:
            checkpoint.__dict__.update(
                _checkpoint_without_reentrant_generator=plain, CheckpointFunction=reentrant
            )

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Be in the module of this name while the context lasts."""
        begin = None if self._stack else self._clock()
        self._stack.append(name)
        self._changed()
        try:
            yield
        finally:
            self._stack.pop()
            self._changed()
            if begin is not None:
                self.calls.append((begin, self._clock()))

    def _changed(self) -> None:
        number = torch.autograd._get_sequence_nr()
        name = self._stack[-1] if self._stack else ""
        if self._starts and self._starts[-1] == number:
            self._modules[-1] = name
        elif not self._modules or self._modules[-1] != name:
            self._starts.append(number)
            self._modules.append(name)

    def here(self) -> Place:
        """Return the place of the operation that is being dispatched; call it once for each, in order."""
        number = torch.autograd._get_sequence_nr()
        if not self._stack:
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._of_node(node._sequence_nr(), number)
        place = self._of_frame(sys._getframe(1))
        if number and torch.is_grad_enabled():
            self._made[number - 1] = place
        return place

    def _of_node(self, node: int, next_number: int) -> Place:
        if node >= next_number:  # `AccumulateGrad` has the highest number there is
            return NOWHERE
        made = self._made.get(node)
        if made is not None:
            return made
        index = bisect_right(self._starts, node) - 1
        return NOWHERE if index < 0 else Place(self._modules[index])

    def _of_frame(self, frame: FrameType | None) -> Place:
        module = self._stack[-1] if self._stack else ""
        while frame is not None:
            path = frame.f_code.co_filename
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _shown(path)
            if file:
                key = (module, file, frame.f_lineno)
                place = self._places.get(key)
                if place is None:
                    place = self._places[key] = Place(module, f"{file}:{frame.f_lineno}")
                return place
            frame = frame.f_back
        return Place(module)


def _shown(path: str) -> str:
    """Return a source file's name as it is imported; "" for what is passed over: torch, this package, Python's own."""
    if path.startswith((*_INSIDE, "<")):
        return ""
    homes = [entry for entry in sys.path if entry and path.startswith(entry + os.sep)]
    home = max(homes, key=len, default=os.path.dirname(path))  # noqa: PTH120
    return "" if home == _STANDARD else path[len(home) + 1 :].replace(os.sep, "/")
