"""Two processes that find one another and exchange frames and tensors, without a fixed world of ranks.

One side listens: it holds a TCPStore at a known port, where the address of its control socket stands, and takes in
whoever comes. Every connection is one TCP socket for small frames and one two-rank Gloo group for tensors, so a member
can go and come back without touching the others. Frames go by socket since Gloo takes some 0.2 to 0.5 ms of CPU time
for each message, however small. All waits have time limits of their own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.handshake import Handshake

_c10d: Any = dist  # its stores are not declared as exported
_CONTROL = "thinwire/control"
_MEETING_SECONDS = 10.0
_NEVER_SENT = 1  # a tag


class PairError(RuntimeError):
    """The other side has gone, or did not answer in time."""


class Pair:
    """One end of a connection. Sending and receiving may happen in two threads, frames and tensors in two more.

    Args:
        connection: the control socket.
        group: of two ranks, for tensors.
        side: 0 where the listener is, else 1.
    """

    def __init__(self, connection: socket.socket, group: Any, side: int) -> None:
        self._socket, self._group, self._peer = connection, group, 1 - side
        self._sending = threading.Lock()
        self.sent_bytes = self.received_bytes = 0

    @property
    def host(self) -> str:
        """The other side's address."""
        return str(self._socket.getpeername()[0])

    def send_frame(self, frame: bytes) -> None:
        """Send bytes, whole and in order with other frames.

        Raises:
            PairError: the other side has gone.
        """
        try:
            with self._sending:
                self._socket.sendall(frame)
                self.sent_bytes += len(frame)
        except OSError as error:
            raise PairError(f"the other side has gone ({error})") from error

    def receive_frame(self, size: int, seconds: float | None) -> bytes:
        """Exactly ``size`` bytes. Raises ``PairError`` if they do not come in time; None: there is no limit."""
        try:
            self._socket.settimeout(seconds)
        except OSError as error:
            raise PairError("this connection is closed") from error
        frame = _read(self._socket, size)
        self.received_bytes += size
        return frame

    def send_tensor(self, x: Tensor, seconds: float) -> None:
        """Send a contiguous tensor; the other side must have been told of it by a frame."""
        self._wait(self._group.send([x], self._peer, 0), seconds)
        self.sent_bytes += x.numel() * x.element_size()

    def receive_tensor(self, x: Tensor, seconds: float) -> Tensor:
        """Receive into ``x``, which is returned. A time-out ends the pair for good: Gloo closes it."""
        self._wait(self._group.recv([x], self._peer, 0), seconds)
        self.received_bytes += x.numel() * x.element_size()
        return x

    @staticmethod
    def _wait(work: Any, seconds: float) -> None:
        try:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise PairError(f"a tensor did not pass: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """End all waits of this side. A receive that times out is the one way to make Gloo give a connection up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


class Listener:
    """The side that others come to.

    Args:
        port: of the store; 0 takes a free one. Without a store: of the control socket.
        host: the interface to listen on.
        notes: put into the store, for :func:`notes` on the other side.
        store: whether to have one. Who is told the control socket's port by others needs none: see :func:`connect`.

    Raises:
        PairError: the port is taken.
        ValueError: there is no such port.
    """

    def __init__(
        self, port: int = 0, host: str = "0.0.0.0", notes: dict[str, str] | None = None, *, store: bool = True
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"port={port!r} must be a whole number from 0 to 65535")
        self._probe(port, host)
        self.store: Any = None
        self._server: socket.socket | None = None
        if not store:
            self._server = socket.create_server((host, port))
            self.port = int(self._server.getsockname()[1])
            return
        try:
            self.store = _c10d.TCPStore(host, port, None, True, timedelta(seconds=30), wait_for_workers=False)
        except RuntimeError as error:
            raise PairError(f"port {port} cannot be used: {str(error).splitlines()[0]}") from error
        self.port = int(self.store.port)
        self._server = socket.create_server((host, 0))
        for key, value in (notes or {}).items():
            self.note(key, value)
        self.store.set(_CONTROL, str(self._server.getsockname()[1]))

    def note(self, key: str, value: str) -> None:
        """Put a note into the store, or another in its place."""
        self.store.set(f"thinwire/{key}", value)

    @staticmethod
    def _probe(port: int, host: str) -> None:
        try:
            with socket.create_server((host, port)):
                pass
        except OSError as error:
            raise PairError(f"port {port} cannot be used ({error.strerror}): choose another or end its user") from error

    def serve(self, came: Callable[[Pair, bytes], None], hello_bytes: int) -> None:
        """Take in, in a thread of its own, each who connects; ``came`` gets the pair and the first frame."""

        server = self._server

        def accept() -> None:
            while server is not None:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=self._meet, args=(connection, hello_bytes, came), daemon=True).start()

        threading.Thread(target=accept, name="thinwire-accept", daemon=True).start()

    def _meet(self, connection: socket.socket, size: int, came: Callable[[Pair, bytes], None]) -> None:
        try:
            _prepare(connection)
            hello = _read(connection, size)
            if self._server is None:
                raise PairError("closed")
            came(Pair(connection, _group(connection, 0), 0), hello)
        except (OSError, RuntimeError, ValueError):  # a stranger, or one who died while coming
            connection.close()

    def close(self) -> None:
        """Take in nobody any more, and give the ports back."""
        self.store, server, self._server = None, self._server, None
        if server is None:
            return
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


class Meeting:
    """The way to a listener.

    Args:
        address: ``host:port`` of its store.

    Raises:
        PairError: nobody listens there now.
        ValueError: this is no address.
    """

    def __init__(self, address: str, seconds: float = _MEETING_SECONDS) -> None:
        self._host, port = split_address(address)
        self._seconds = seconds
        try:  # quieter than the store's own attempts
            socket.create_connection((self._host, port), seconds).close()
            self._store = _c10d.TCPStore(self._host, port, None, False, timedelta(seconds=seconds))
        except (OSError, RuntimeError) as error:
            raise PairError(f"nobody listens at {address} ({str(error).splitlines()[0]})") from error

    def note(self, key: str) -> str:
        """What the listener has put into its store."""
        try:
            return str(self._store.get(f"thinwire/{key}").decode())
        except RuntimeError as error:
            raise PairError(f"{self._host} does not tell its {key}: is it a thinwire server?") from error

    def connect(self, hello: bytes) -> Pair:
        """Introduce oneself with a first frame."""
        try:
            port = int(self._store.get(_CONTROL).decode())
        except (RuntimeError, ValueError) as error:
            raise PairError(f"{self._host} did not take us in ({str(error).splitlines()[0]})") from error
        return connect(self._host, port, hello, self._seconds)


def connect(host: str, port: int, hello: bytes, seconds: float = _MEETING_SECONDS) -> Pair:
    """Introduce oneself with a first frame at a listener's control socket.

    Raises:
        PairError: nobody is there, or does not take us in.
    """
    try:
        connection = socket.create_connection((host, port), seconds)
        _prepare(connection, seconds)
        connection.sendall(hello)
        return Pair(connection, _group(connection, 1), 1)
    except (OSError, RuntimeError, ValueError) as error:
        raise PairError(f"{host} did not take us in ({str(error).splitlines()[0]})") from error


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` as two values.

    Raises:
        ValueError: it is not that.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"address {address!r} is no host:port: write for example 10.0.0.1:29400")
    return host, int(port)


def _prepare(connection: socket.socket, seconds: float = _MEETING_SECONDS) -> None:
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(size - len(data))
        except OSError as error:
            raise PairError(f"no frame came ({error})") from error
        if not piece:
            raise PairError("the other side has closed the connection")
        data += piece
    return bytes(data)


def _group(connection: socket.socket, side: int) -> Any:
    """A Gloo group of two, outside any default group, on the interface that the control socket has found.

    Left alone, Gloo would look up this machine's name, which may lead to another interface, or take seconds.
    """
    handshake = Handshake(connection, _read)
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=connection.getsockname()[0])]
    options._timeout = timedelta(seconds=_MEETING_SECONDS)
    group = _c10d.ProcessGroupGloo(handshake, side, 2, options)
    handshake.finish()
    return group


def empty_bytes(size: int) -> Tensor:
    """Room for what arrives."""
    return torch.empty(size, dtype=torch.uint8)
