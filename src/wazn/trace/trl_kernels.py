"""TRL's fused output head as it runs on CUDA: its Triton kernels fill buffers that its Python code allocates.

Without Triton the same code folds its tiles with PyTorch's operators, and without CUDA it adds products by way of fp32
copies; both take memory that a GPU does not need. Here the kernels do nothing, and a product with an fp32 result
allocates none.

Source: trl/kernels/chunked_logprob.py, `_use_triton` and `_addmm_fp32`; there since TRL 1.13 or so, older versions have
no kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from wazn.timeline.events import Phase
from wazn.trace.imports import patched
from wazn.trace.marks import phase
from wazn.trace.rehearsal import LOSS
from wazn.trace.tracker import StorageTracker
from wazn.units import ceil_div

__all__ = ["trl_on_cuda"]


@contextmanager
def trl_on_cuda(tracker: StorageTracker) -> Iterator[None]:
    """Let TRL, which must be imported, take its CUDA path, and count its output head to the loss."""
    kernels = sys.modules.get("trl.kernels.chunked_logprob")
    utils: Any = sys.modules["trl.trainer.utils"]
    with ExitStack() as stack:
        if kernels is not None:
            stack.enter_context(patched(kernels, _ON_CUDA))
            stack.enter_context(_added(kernels, "triton", SimpleNamespace(cdiv=ceil_div)))
        if hasattr(utils, "_ChunkedLogProbFunction"):
            function = _of_loss(utils._ChunkedLogProbFunction, tracker)
            replacements = {"_use_triton": _yes, "_ChunkedLogProbFunction": function}
            stack.enter_context(patched(utils, replacements))
        yield


class _Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a kernel that writes into what it is given."""


def _yes(device: Any) -> bool:
    return True


_ON_CUDA = {
    "_use_triton": _yes,
    "_forward_kernel": _Kernel(),
    "_backward_kernel": _Kernel(),
    "_addmm_fp32": _do_nothing,
}


def _of_loss(function: Any, tracker: StorageTracker) -> Any:
    def apply(*args: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(phase(tracker, Phase.LOSS))
            if tracker.places is not None:
                stack.enter_context(tracker.places.inside(LOSS))
            return function.apply(*args)

    return SimpleNamespace(apply=apply)


@contextmanager
def _added(module: Any, name: str, value: Any) -> Iterator[None]:
    if hasattr(module, name):  # the real package: only its arithmetic is used
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)
