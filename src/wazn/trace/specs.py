"""What goes into a measurement of one operation and what comes out, described without torch.

`opcheck` measures; who only reads stored measurements needs no torch for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wazn.trace.tracker import StorageEvent

__all__ = ["OpTrace", "Spec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTrace:
    """What one operation did, in bytes above what existed before it.

    `kept_bytes`: alive after forward with the result still held; `saved_bytes`: alive once the caller let
    go of the result, thus what autograd holds for backward; `gradient_bytes`: alive after backward, the
    gradients of inputs and parameters. Events carry requested bytes; their `phase` is `forward`, `release`
    (the result is let go) or `backward`.
    """

    kept_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int
    events: tuple[StorageEvent, ...]

    def changes(self, phase: str) -> list[int]:
        """Return the sizes of one phase in order: positive allocates, negative frees."""
        return [event.num_bytes for event in self.events if event.phase == phase]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to make: its shape, the name of its dtype, and whether it requires a gradient.

    `memory_order` makes the tensor as a transposed view: the order of dimensions in memory, such as (0, 2, 1, 3).
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    requires_grad: bool = False
    memory_order: tuple[int, ...] | None = None

    def make(self) -> torch.Tensor:
        """Return the tensor (fake inside a world), a leaf."""
        import torch

        from wazn.trace.tracker import DEVICE

        dtype = getattr(torch, self.dtype)
        if self.memory_order is None:
            tensor = torch.empty(self.shape, dtype=dtype, device=DEVICE)
        else:
            tensor = torch.empty_permuted(self.shape, self.memory_order, dtype=dtype, device=DEVICE)
        return tensor.requires_grad_(self.requires_grad)
