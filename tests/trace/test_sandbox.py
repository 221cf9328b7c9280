"""Nothing gets out of a sandbox, and it leaves no trace."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from wazn.errors import Unsupported
from wazn.trace.sandbox import sandbox

ADDRESS = ("127.0.0.1", 9)


def _socket(kind: socket.SocketKind) -> socket.socket:
    return socket.socket(socket.AF_INET, kind)


@pytest.mark.parametrize(
    "reach",
    [
        lambda: socket.getaddrinfo("huggingface.co", 443),
        lambda: socket.gethostbyname("localhost"),
        lambda: socket.create_connection(ADDRESS),
        lambda: _socket(socket.SOCK_STREAM).connect(ADDRESS),
        lambda: _socket(socket.SOCK_STREAM).connect_ex(ADDRESS),
        lambda: _socket(socket.SOCK_DGRAM).sendto(b"", ADDRESS),
        lambda: _socket(socket.SOCK_DGRAM).sendmsg([b""], [], 0, ADDRESS),
    ],
    ids=["resolve", "resolve here", "create", "connect", "connect_ex", "sendto", "sendmsg"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_leaves_the_machine(reach: Callable[[], object]) -> None:
    """Not even the question what a name's address is, which a resolver would carry out."""
    with sandbox(), pytest.raises(Unsupported, match="never touches the network"):
        reach()


def test_processes_of_one_machine_may_talk() -> None:
    """A pair of sockets without an address family of the internet works inside."""
    with sandbox():
        one, other = socket.socketpair()
        with one, other:
            one.sendmsg([b"word"])
            assert other.recv(4) == b"word"


def test_it_leaves_no_trace() -> None:
    """After it sockets are Python's own again, and names are resolved."""
    before = dict(vars(socket.socket)), dict(vars(socket))
    with sandbox():
        pass
    assert (dict(vars(socket.socket)), dict(vars(socket))) == before
