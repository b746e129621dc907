"""Sockets: listening at one, and closing them in forked children."""

from __future__ import annotations

import os
import selectors
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress

MESH_RANKS = 16
"""With more, connections between all pairs are too many, and a ring's chunks are no smaller than theirs."""
SOCKETS, WITH_BBR = 16, 2
"""To each rank on a long wire; BBR, which no loss slows down, needs no more than two."""
TOKEN_BYTES = 16
"""Random ones, by which a process shows that it is meant to open a connection."""

Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # without a descriptor, unlike epoll

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def check_name(host: str, what: str = "host ") -> None:
    """Raise ``ValueError`` for what Python cannot look up, with an error about its encoding; ``what`` it is."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{what}{host!r} is neither a name nor an address") from None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def server_at(address: str, ports: Iterable[int], backlog: int | None = None) -> socket.socket | None:
    """Return a server at the first of the ports that is free, 0 being any; None: none is."""
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family_of(address), backlog=backlog)
    return None


def not_for_children(opened: socket.socket) -> socket.socket:
    """Close it in each child forked from now on, which would hide from the other side that this process died.

    The sockets of Gloo, NCCL and torch's stores cannot be reached from here.
    """
    _sockets.add(opened)
    return opened


def _after_fork() -> None:
    for opened in list(_sockets):
        with suppress(OSError):  # closed before
            os.close(opened.detach())  # without a shutdown, which would end the parent's connection


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
