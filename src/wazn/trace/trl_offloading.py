"""TRL's activation offloading on fake tensors: what forward saves for backward goes to the host and comes back.

`OffloadActivations` is TRL's own, with its own choice of tensors, its stash of the last five and its cleaning up at the
nodes of backward. It needs to know where a tensor's memory is, to send nothing twice and no weights; storages without
memory are given addresses. And it is called where a world does not look, from within the operation that saves a tensor:
its copies are sent to the host and to the card from here. Time does not pass in a rehearsal: a copy is done when it is
begun, and what a second stream keeps longer is kept here no longer than its events say.

Source: trl/models/activation_offloading.py; there since TRL 0.18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from wazn.errors import Unsupported
from wazn.trace.imports import patched
from wazn.trace.tracker import StorageTracker

__all__ = ["offloading_on_cuda"]


@contextmanager
def offloading_on_cuda(tracker: StorageTracker) -> Iterator[None]:
    """Let TRL's trainers that are made inside offload as they do on CUDA.

    Raises: Unsupported where the installed TRL has no offloading.
    """
    try:
        from trl.models import activation_offloading as module
    except ImportError as error:
        raise Unsupported(
            "the installed TRL does not offload activations", hint="`pip install -U trl`"
        ) from error

    original = module.OffloadActivations.__init__

    def init(offload: Any, *args: Any, **kwargs: Any) -> None:
        original(offload, *args, **kwargs)
        offload.pack_hook = _copying(tracker, offload.pack_hook)
        offload.unpack_hook = _copying(tracker, offload.unpack_hook)

    with (
        patched(module.OffloadActivations, {"__init__": init}),
        _storages_have_addresses(),
    ):
        yield


class _OnTheWay(TorchFunctionMode):
    """Makes copies on the host where the host is named, and on the card where the card is."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cpu":
            kwargs = {name: item for name, item in kwargs.items() if name != "pin_memory"}
            with self._tracker.going_to("host"):
                return func(*args, **kwargs)
        if func is torch.Tensor.to:
            with self._tracker.going_to("device"):
                return torch.clone(args[0])
        return func(*args, **kwargs)


def _copying(tracker: StorageTracker, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(item: Any) -> Any:
        with _OnTheWay(tracker):
            return hook(item)

    return call


@contextmanager
def _storages_have_addresses() -> Iterator[None]:
    """Let a storage without memory have an address of its own."""
    storage: Any = torch.UntypedStorage
    storage.data_ptr = _address
    try:
        yield
    finally:
        del storage.data_ptr


def _address(storage: Any) -> int:
    address: int = storage._cdata
    return address
