"""Fake tensors on the cpu device that behave as CUDA tensors do.

A `World` is a context: inside it every new tensor is fake (`torch._subclasses.FakeTensorMode`), every
allocation is recorded, and CUDA's habits replace the CPU's:

    habits      functions that take another path on CUDA: attention, dropout, normalisation
    autocast    CUDA's lists
    kernels     memory that CUDA kernels take for the time of one operation
    engine      what autograd does in place with real tensors only; answers to `.item()`
    libraries   what transformers, bitsandbytes and optimizers must believe
    card        the answers of `torch.cuda`

Why not a fake CUDA device: a CPU build of PyTorch cannot run backward on one (no device guard).
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wazn.trace.autocast import cuda_autocast
from wazn.trace.card import Card, fake_card
from wazn.trace.engine import Engine
from wazn.trace.habits import Habits
from wazn.trace.libraries import libraries_on_cuda
from wazn.trace.tracker import DEVICE, StorageTracker
from wazn.trace.values import KnownValues

__all__ = ["World"]

_AMPERE = (8, 0)


class World:
    """The context in which real library code runs without data and without a GPU.

    Args:
        capability: compute capability of the card, such as (8, 0) for an A100; it decides the attention kernel.
        matmul_workspaces: whether the first matrix product of forward and of backward allocates the
            workspace of cuBLAS.
        card: the card that `torch.cuda` describes; its capability wins. By default one without a name that has
            room for everything.
    """

    def __init__(
        self,
        *,
        capability: tuple[int, int] = _AMPERE,
        matmul_workspaces: bool = False,
        card: Card | None = None,
    ) -> None:
        self.card = card or Card.of_capability(capability)
        capability = self.card.capability
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_mode.cache_enabled = False  # `recall` is faster
        engine = Engine(capability, matmul_workspaces=matmul_workspaces)
        self.tracker = StorageTracker(KnownValues(engine))
        self.capability = capability
        self._stack = ExitStack()
        self._depth = 0

    def __enter__(self) -> Self:
        """Enter the world; entering it again inside changes nothing."""
        self._depth += 1
        if self._depth > 1:
            return self
        self._stack.enter_context(self.fake_mode)
        self._stack.enter_context(self.tracker)
        self._stack.enter_context(cuda_autocast())
        self._stack.enter_context(fake_card(self.card, self.tracker))
        self._stack.enter_context(libraries_on_cuda(self.tracker))
        habits = Habits(self.tracker, capability=self.capability)
        self._stack.enter_context(habits.through_backward())
        self._stack.enter_context(habits)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def materialise(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give a module that was built on `meta` fake storages, in place; what shared one goes on sharing it.

        Must be called inside the world.
        """
        return module._apply(_fake_like)


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    if (
        tensor.is_contiguous()
    ):  # nearly always, and sizes are remembered faster than tensors on `meta`
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
    return torch.empty_like(tensor, device=DEVICE)
