"""What libraries are kept from while they rehearse: the network, and talking on stdout."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wazn.errors import Unsupported

__all__ = ["sandbox"]

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_TELEMETRY")


@contextmanager
def sandbox() -> Iterator[None]:
    """Refuse connections, swallow what is printed and logged, while the context lasts."""
    with ExitStack() as stack:
        stack.enter_context(_offline())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(_hushed())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _offline() -> Iterator[None]:
    """Say so where libraries ask for it when they are imported, and hold the door for those that do not."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            raise Unsupported("a rehearsal never touches the network, and something tried to")
        connect(self, address)

    socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        socket.socket.connect = connect  # type: ignore[method-assign]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _hushed() -> Iterator[None]:
    """Let nobody log anything that is not critical: bitsandbytes calls a kernel that it cannot download an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
