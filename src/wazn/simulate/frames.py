"""Checkpointed calls: how to run one again, and what stands in for what it did not keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from wazn.simulate.tensors import Tensor

if TYPE_CHECKING:
    from wazn.simulate.tape import Tape

__all__ = ["Frame", "Holder", "Saved", "StopRecomputation"]


class StopRecomputation(Exception):
    """All that was saved has been computed again (torch.utils.checkpoint, early stop)."""


class Frame:
    """One checkpointed call: how to run it again, and what the second run has saved."""

    __slots__ = (
        "autocast_dtype",
        "counter",
        "holders",
        "keep_products",
        "num_products",
        "recomputed",
        "results",
        "run",
        "tape",
    )

    def __init__(
        self, tape: Tape, run: Callable[[], object], *, keep_products: bool = False
    ) -> None:
        self.tape = tape
        self.run = run
        self.keep_products = keep_products
        self.num_products = 0
        self.results: deque[tuple[Tensor, ...]] = deque()
        self.holders: list[ref[Holder]] = []
        self.counter = 0
        self.recomputed: dict[int, Tensor] | None = None
        self.autocast_dtype = tape.autocast_dtype

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor with this index, running the call again for the first that is asked for."""
        if self.recomputed is None:
            self.recomputed = {}
            self.tape.recompute(self)
        return self.recomputed.pop(index)


class Holder:
    """Stands in a node for a tensor that checkpointing did not keep."""

    __slots__ = ("__weakref__", "frame", "index")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.index = len(frame.holders)
        frame.holders.append(ref(self))


Saved = tuple["Tensor | Holder", ...]
