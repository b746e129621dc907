"""thinwire's own TCP connections between all ranks of a lane, for messages that Gloo's connections carry less well.

They are made with the help of the lane's Gloo group, which tells every rank the others' addresses. If any two ranks
cannot reach one another (because of a firewall, for example), all ranks use Gloo. They also do so if Gloo was asked to
encrypt, because these connections do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.core.collectives.backends import backend_for
from thinwire.core.collectives.bounded import seconds_of
from thinwire.core.collectives.socket_loop import socket_loop
from thinwire.core.collectives.stream import Stream
from thinwire.core.sockets import readable

logger = logging.getLogger(__name__)

MOST_RANKS = 16  # with more, all pairs are too many connections, and a ring's chunks are no smaller than theirs
MEETING_SECONDS = 10.0
_MOST_UNKNOWN = 128
_CHANNELS = 2
_TOKEN_BYTES = 16
_ENDPOINT_BYTES = 256
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sHB")
_SIOCGIFADDR = 0x8915


class Mesh:
    """This rank's connections: two streams to every other rank, each with an order of its own.

    Args:
        streams: for each channel, the streams by rank within the lane.
    """

    def __init__(self, streams: Sequence[dict[int, Stream]]) -> None:
        self.first, self.second = streams

    def close(self) -> None:
        """Close the connections. Messages under way fail, here and on the other side."""
        for stream in (*self.first.values(), *self.second.values()):
            stream.close()


def open_mesh(group: dist.ProcessGroup, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> Mesh | None:
    """Connect all ranks of a Gloo group; a collective. Returns None, on all ranks, if that is not possible.

    Args:
        group: the lane's.
        ranks: global ranks, ascending.
        rank: this rank's place in ``ranks``.
        timeout: time without a byte after which a message fails; None: torch's.
    """
    on_gloo = backend_for(torch.device("cpu"), group) == "gloo"
    if not hasattr(select, "epoll") or not 1 < len(ranks) <= MOST_RANKS or not on_gloo:
        return None
    encrypted = gloo_encrypts()
    server, token = None if encrypted else listen(2 * len(ranks)), secrets.token_bytes(_TOKEN_BYTES)
    endpoints = exchange_endpoints(endpoint_of(server, token), group, len(ranks))
    with server or contextlib.nullcontext():
        sockets = meet(server, token, endpoints, rank) if server is not None and all(endpoints) else None
    everyone = torch.tensor([sockets is not None], dtype=torch.int32)
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group)
    if not everyone.item():
        _close((sockets or {}).values())
        if encrypted:
            logger.info("thinwire: GLOO_DEVICE_TRANSPORT=TCP_TLS, so Gloo carries everything, encrypted")
        else:
            logger.info("thinwire: the ranks cannot reach one another directly, so Gloo carries everything")
        return None
    assert sockets is not None
    seconds = seconds_of(timeout)
    streams: list[dict[int, Stream]] = [{} for _ in range(_CHANNELS)]
    for (peer, channel), connection in sockets.items():
        streams[channel][peer] = Stream(connection, f"rank {ranks[peer]}", seconds, socket_loop())
    return Mesh(streams)


def gloo_encrypts() -> bool:
    """Return whether the user asked Gloo for TLS: then thinwire must not send unencrypted bytes itself."""
    return os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS"


def listen(backlog: int) -> socket.socket | None:
    """Return a server on the interface that Gloo would probably use; None: that fails."""
    try:
        return socket.create_server((_address(), 0), backlog=backlog)
    except OSError:
        return None


def _address() -> str:
    """Return the address of the named interface, else that of this machine's name, else the loopback."""
    import fcntl  # not on Windows, where this is never called

    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if named:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", named.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        with contextlib.suppress(OSError):  # the name cannot be resolved
            for *_, where in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_DGRAM):
                with contextlib.suppress(OSError):  # an address of another machine
                    probe.bind((str(where[0]), 0))
                    return str(where[0])
    return "127.0.0.1"


def endpoint_of(server: socket.socket | None, token: bytes) -> bytes:
    """Return where this rank listens, and its token; empty: it does not listen."""
    if server is None:
        return b""
    host, port = server.getsockname()[:2]
    return token + f"{host}:{port}".encode()


def exchange_endpoints(endpoint: bytes, group: dist.ProcessGroup, size: int) -> list[bytes]:
    """Return every rank's endpoint, in rank order."""
    mine = torch.frombuffer(bytearray(endpoint.ljust(_ENDPOINT_BYTES, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    endpoints = [bytes(row.tolist()) for row in everyone]
    return [endpoint if any(endpoint) else b"" for endpoint in endpoints]


def meet(
    server: socket.socket, token: bytes, endpoints: Sequence[bytes], rank: int
) -> dict[tuple[int, int], socket.socket] | None:
    """Connect to every lower rank, and accept every higher one; None if a rank does not come.

    Handshakes are read concurrently, all within one time limit, so a client that connects and sends nothing holds up
    no other.
    """
    found: dict[tuple[int, int], socket.socket] = {}
    unknown: dict[socket.socket, bytes] = {}  # connections whose handshake is incomplete: bytes so far; oldest first
    deadline = time.monotonic() + MEETING_SECONDS
    try:
        for peer in range(rank):
            host, _, port = endpoints[peer][_TOKEN_BYTES:].rstrip(b"\0").decode().rpartition(":")
            for channel in range(_CHANNELS):
                connection = socket.create_connection((host, int(port)), max(0.01, deadline - time.monotonic()))
                found[peer, channel] = connection
                connection.sendall(_HELLO.pack(endpoints[peer][:_TOKEN_BYTES], rank, channel))
        server.setblocking(False)
        while len(found) < _CHANNELS * (len(endpoints) - 1):
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            for ready in readable([server, *unknown], left):
                if ready is server:
                    with contextlib.suppress(OSError):  # it has gone again
                        unknown[server.accept()[0]] = b""
                    if len(unknown) > _MOST_UNKNOWN:
                        _forget(next(iter(unknown)), unknown)
                elif (hello := _more(ready, unknown[ready])) is None:
                    _forget(ready, unknown)
                elif len(hello) < _HELLO.size:
                    unknown[ready] = hello
                else:
                    shown, other, channel = _HELLO.unpack(hello)
                    known = (
                        secrets.compare_digest(shown, token) and rank < other < len(endpoints) and channel < _CHANNELS
                    )
                    if not known or (other, channel) in found:
                        _forget(ready, unknown)
                    else:
                        del unknown[ready]
                        found[other, channel] = ready
        return found
    except OSError:
        _close(found.values())
        return None
    finally:
        _close(unknown)


def _more(connection: socket.socket, hello: bytes) -> bytes | None:
    """Return the handshake so far, with the bytes available now; None: the connection has ended."""
    connection.setblocking(False)
    try:
        more = connection.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return hello
    except OSError:
        return None
    return hello + more if more else None


def _forget(connection: socket.socket, unknown: dict[socket.socket, bytes]) -> None:
    del unknown[connection]
    connection.close()


def _close(sockets: Iterable[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
