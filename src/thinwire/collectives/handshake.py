"""How the two ranks of a pair find one another: a store that lives on the socket which they have already."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_SIZES = struct.Struct("<II")
_MOST = 1 << 20
_c10d: Any = dist  # its stores are not declared as exported


class Handshake(_c10d.Store):  # type: ignore[misc]
    """What one side sets, the other can get; only while a group is made.

    A TCPStore would do it too, but each connection to one has the names of both addresses looked up. A name server that
    loses one such question of a burst holds up the store, and all who ask it, for the resolver's five seconds.

    Args:
        connection: whose other end has a handshake too; nothing else may be on it before :meth:`finish` returns.
        read: reads exactly that many bytes from it.
    """

    def __init__(self, connection: socket.socket, read: Callable[[socket.socket, int], bytes]) -> None:
        super().__init__()
        self._connection, self._read = connection, read
        self._known: dict[str, bytes] = {}
        self._ended = False

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Tell the other side."""
        name, data = _text(key), value.encode() if isinstance(value, str) else bytes(value)
        self._known[name] = data
        self._send(name.encode(), data)

    def get(self, key: str | bytes) -> bytes:
        """What either side has set; waits for it."""
        self.wait([key])
        return self._known[_text(key)]

    def wait(self, keys: Sequence[str | bytes], timeout: Any = None) -> None:
        """Until all are there; the socket's own time limit holds."""
        while not self.check(keys):
            self._receive()

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all are there."""
        return all(_text(key) in self._known for key in keys)

    def finish(self) -> None:
        """Leave nothing of this on the socket."""
        self._send(b"", b"")
        while not self._ended:
            self._receive()

    def _send(self, name: bytes, data: bytes) -> None:
        self._connection.sendall(_SIZES.pack(len(name), len(data)) + name + data)

    def _receive(self) -> None:
        if self._ended:
            raise RuntimeError("the other side has ended the handshake too early")
        name, data = _SIZES.unpack(self._read(self._connection, _SIZES.size))
        if max(name, data) > _MOST:
            raise ValueError("what arrived is no handshake: is another program using the port?")
        self._ended = name == 0
        body = self._read(self._connection, name + data)
        if not self._ended:
            self._known[body[:name].decode()] = body[name:]


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode()
