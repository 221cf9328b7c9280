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
_TALKATIVE = ("transformers", "bitsandbytes", "peft", "trl", "accelerate", "torch", "datasets")


@contextmanager
def sandbox() -> Iterator[None]:
    """Refuse connections, swallow what is printed, and log errors only, while the context lasts."""
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
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    hub = logging.getLogger("bitsandbytes.backends.cpu.ops")
    hub_level = hub.level
    hub.setLevel(logging.CRITICAL)  # about a kernel that it would like to download
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
