"""What libraries are kept from while they rehearse: the network, and talking on stdout."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wazn.errors import Unsupported
from wazn.trace.imports import patched

__all__ = ["sandbox"]

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DISABLE_TELEMETRY")
_RESOLVE = ("getaddrinfo", "gethostbyaddr", "gethostbyname", "gethostbyname_ex", "getnameinfo")
_SEND = ("connect", "connect_ex", "sendto", "sendmsg")


@contextmanager
def sandbox() -> Iterator[None]:
    """Refuse connections and the resolution of names, swallow what is printed and logged, while the context lasts."""
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
    try:
        with (
            patched(socket, dict.fromkeys(_RESOLVE, _refuse)),
            _methods_on_this_machine(),
        ):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise Unsupported("a rehearsal never touches the network, and something tried to")


def _on_this_machine(name: str) -> Callable[..., Any]:
    """Return a method of sockets that refuses those of the internet; processes may talk to each other."""
    method = getattr(socket.socket, name)

    def call(self: socket.socket, *args: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse()
        return method(self, *args)

    return call


@contextmanager
def _methods_on_this_machine() -> Iterator[None]:
    for name in _SEND:  # they are inherited from a class in C
        setattr(socket.socket, name, _on_this_machine(name))
    try:
        yield
    finally:
        for name in _SEND:
            delattr(socket.socket, name)


@contextmanager
def _hushed() -> Iterator[None]:
    """Let nobody log anything that is not critical: bitsandbytes calls a kernel that it cannot download an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
