"""Sockets that a forked child must not keep: they would hide from the other side that this process has died."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_for_children(opened: socket.socket) -> socket.socket:
    """Close it in each child that this process forks from now on; return it. The parent and the other side see nothing.

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
