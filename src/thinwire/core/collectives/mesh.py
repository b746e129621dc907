"""thinwire's own TCP connections between all ranks of a lane, for messages that Gloo's connections carry less well.

They are made with the help of the lane's Gloo group, which tells every rank the others' addresses. If any two ranks
cannot reach one another (because of a firewall, for example), all ranks use Gloo. They also do so if Gloo was asked to
encrypt, and these connections were not: with ``THINWIRE_KEYS``, a directory of ``thinwire keys new``, they are TLS 1.3,
both sides show a certificate, and nobody falls back to Gloo.

All-reduces, reduce-scatters and all-gathers are messages to and from all ranks at once, with sums in rank order. The
tensors' memory is split as bytes, not as tensors: when backward has just filled the caches, a call of torch costs some
20 microseconds, and each op has 2 (W - 1) messages or twice that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.bundle import OPENING_SECONDS, Accept, Ask, Bundle, BundleStream, Call
from thinwire.core.collectives.groups import backend_for, seconds_of
from thinwire.core.collectives.socket_stream import CountdownWork, Stream, memory_of, socket_loop
from thinwire.core.collectives.tcp_info import Wire, active_sockets, congestion_control, wanted_sockets
from thinwire.core.program.bucket import working_dtype
from thinwire.core.sockets import MESH_RANKS, SOCKETS, TOKEN_BYTES, check_name, readable, server_at, writable
from thinwire.core.tls import Credentials, in_words

if TYPE_CHECKING:
    from thinwire.core.collectives.exchange import Lane

logger = logging.getLogger(__name__)

MEETING_SECONDS = 10.0
_MOST_UNKNOWN = 128
_CHANNELS = 2
_ENDPOINT_BYTES = 256
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sHB")
_SIOCGIFADDR, _LINK_LOCAL = 0x8915, "20"


class Mesh:
    """This rank's connections: two streams to every other rank, each with an order of its own.

    On a long wire they run over ``bundles``, one to every other rank, which all meshes of these ranks share.
    """

    def __init__(
        self, streams: Sequence[Mapping[int, Stream | BundleStream]], bundles: Mapping[int, Bundle] | None = None
    ) -> None:
        self.first, self.second = streams
        self.bundles = bundles or {}

    @classmethod
    def over(cls, bundles: Mapping[int, Bundle]) -> Mesh:
        return cls([{peer: bundle.stream() for peer, bundle in bundles.items()} for _ in range(_CHANNELS)], bundles)

    @property
    def shared(self) -> bool:
        return bool(self.bundles)

    def wire(self) -> Wire | None:
        """Return what the longest wire is like; None: none is long."""
        known = [wire for bundle in self.bundles.values() if (wire := bundle.wire()) is not None]
        return max(known, key=lambda wire: wire.trip_seconds, default=None)

    def another(self) -> Mesh:
        """Return a mesh over the same bundles."""
        return Mesh.over(self.bundles)

    def close(self) -> None:
        for stream in (*self.first.values(), *self.second.values(), *self.bundles.values()):
            stream.close()


def open_mesh(group: dist.ProcessGroup, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> Mesh | None:
    """Connect all ranks of a Gloo group; a collective. Returns None, on all ranks, if that is not possible."""
    on_gloo, keys = backend_for(torch.device("cpu"), group) == "gloo", identity()
    if not hasattr(select, "epoll") or not 1 < len(ranks) <= MESH_RANKS or not on_gloo:
        return None
    encrypted = gloo_encrypts() and keys is None
    server, token = None if encrypted else listen(SOCKETS * len(ranks)), secrets.token_bytes(TOKEN_BYTES)
    endpoints = exchange_endpoints(endpoint_of(server, token), group, len(ranks))
    sockets = bundled = None
    with server or contextlib.nullcontext():
        if server is not None and all(endpoints):
            sockets = meet(server, token, endpoints, rank)
        facts = _agreed(_facts(sockets, keys), group)
        if server is not None and sockets is not None and facts.met and facts.sockets > 1:
            bundled = meet(server, token, endpoints, rank, facts.sockets, have=sockets)
            if not _agreed(_Facts(bundled is not None, keys=keys is not None), group).met:
                _close((bundled or {}).values())
                facts = _Facts(met=False)
    if keys is not None:
        bundled = _encrypted(bundled if facts.met else None, rank, keys, group)
    if not facts.met:
        _close((sockets or {}).values())
        if encrypted:
            logger.info("thinwire: GLOO_DEVICE_TRANSPORT=TCP_TLS, so Gloo carries everything, encrypted")
        else:
            logger.info("thinwire: the ranks cannot reach one another directly, so Gloo carries everything")
        return None
    assert sockets is not None
    seconds = seconds_of(timeout)
    if bundled is not None:
        return Mesh.over(_bundles(bundled, facts.sockets, ranks, rank, seconds, keys))
    streams: list[dict[int, Stream]] = [{} for _ in range(_CHANNELS)]
    for (peer, channel), connection in sockets.items():
        streams[channel][peer] = Stream(connection, f"rank {ranks[peer]}", seconds, socket_loop())
    return Mesh(streams)


def _bundles(
    connections: Mapping[tuple[int, int], socket.socket],
    count: int,
    ranks: Sequence[int],
    rank: int,
    seconds: float,
    keys: Credentials | None,
) -> dict[int, Bundle]:
    active, control = active_sockets(connections.values(), count), congestion_control(next(iter(connections.values())))
    secret = ", encrypted" if keys is not None else ""
    logger.info("thinwire: up to %s sockets to each rank, with %s%s", active or count, control, secret)
    made = {}
    for peer, name in enumerate(ranks):
        if peer != rank:
            some = [connections[peer, channel] for channel in range(count)]
            made[peer] = Bundle(
                some,
                f"rank {name}",
                seconds,
                socket_loop(),
                accept=accepting(_ports(), keys) if peer > rank else None,
                call=calling(keys) if peer < rank else None,
                active=active,
            )
    return made


def accepting(ports: Iterable[int], keys: Credentials | None = None) -> Accept:
    """Return how a rank lets another one open a socket in place of a lost one: at the first of ``ports`` to be free."""

    def accept(beside: socket.socket, ask: Ask, going: Callable[[], bool]) -> socket.socket | None:
        if (server := server_at(beside.getsockname()[0], ports)) is None:
            return None
        token, unknown = secrets.token_bytes(TOKEN_BYTES), dict[socket.socket, bytes]()
        with server:
            ask(server.getsockname()[1], token)
            try:
                while going():
                    for connection, shown in _heard(server, unknown, TOKEN_BYTES, 0.25):
                        if secrets.compare_digest(shown, token):
                            return _secured(connection, keys, called=True)
                        connection.close()
            finally:
                _close(unknown)
        return None

    return accept


def calling(keys: Credentials | None = None) -> Call:
    """Return how a rank opens such a socket."""

    def call(beside: socket.socket, port: int, token: bytes) -> socket.socket:
        connection = socket.create_connection((beside.getpeername()[0], port), OPENING_SECONDS)
        connection.sendall(token)
        return _secured(connection, keys, called=False)

    return call


def _secured(connection: socket.socket, keys: Credentials | None, *, called: bool) -> socket.socket:
    connection.settimeout(OPENING_SECONDS)
    return connection if keys is None else keys.contexts[called].wrap_socket(connection, server_side=called)


@dataclass(frozen=True)
class _Facts:
    """What ranks tell one another of their connections. ``sockets``: to each rank, in a bundle; 1: none is needed."""

    met: bool
    sockets: int = 1
    keys: bool = False


def identity() -> Credentials | None:
    """Return this machine's keys, from ``THINWIRE_KEYS``; None: nothing is to be encrypted. ``ValueError``: no keys."""
    folder = os.environ.get("THINWIRE_KEYS")
    return _identity(folder) if folder else None


@functools.cache  # read once: every agreement asks
def _identity(folder: str) -> Credentials:
    keys = Credentials.of(folder)
    keys.contexts[0].check_hostname = False  # ranks are called by address; whom the authority has signed is one of them
    return keys


def _encrypted(
    connections: Mapping[tuple[int, int], socket.socket] | None, rank: int, keys: Credentials, group: dist.ProcessGroup
) -> dict[tuple[int, int], socket.socket]:
    """Shake hands over all connections at once; ``RuntimeError`` on all ranks if any does not end well."""
    why, found = "" if connections else "the ranks cannot reach one another directly", dict[tuple[int, int], Any]()
    waiting: dict[tuple[int, int], ssl.SSLSocket] = {}
    deadline = time.monotonic() + MEETING_SECONDS
    try:
        for (peer, channel), connection in (connections or {}).items():
            connection.setblocking(False)
            called = peer > rank  # by a higher rank
            waiting[peer, channel] = keys.contexts[called].wrap_socket(
                connection, server_side=called, do_handshake_on_connect=False
            )
        while waiting:
            for place, connection in list(waiting.items()):
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    connection.do_handshake()
                    found[place] = waiting.pop(place)
            if waiting and not readable(waiting.values(), deadline - time.monotonic()):
                raise TimeoutError("no answer; another rank may say why: do the clocks agree?")
    except OSError as error:
        why = in_words(error) if isinstance(error, ssl.SSLError) else str(error)
    if not _agreed(_Facts(met=not why, keys=True), group).met:
        _close((*found.values(), *waiting.values()))
        raise RuntimeError(f"THINWIRE_KEYS: {why or 'another rank has failed, and says why: do the clocks agree?'}")
    return found


def _facts(connections: Mapping[tuple[int, int], socket.socket] | None, keys: Credentials | None) -> _Facts:
    """Return what this rank has found: whether it reaches all others, and how many sockets its longest wire wants."""
    least = 1 if keys is None else _CHANNELS
    wanted = 1 if connections is None else wanted_sockets(connections.values())
    return _Facts(connections is not None, max(least, wanted), keys is not None)


def _agreed(mine: _Facts, group: dist.ProcessGroup) -> _Facts:
    """Return whether all ranks have met, and the most sockets that any of them wants; a collective.

    Raises:
        RuntimeError: on all ranks, if only some have keys.
    """
    told = torch.tensor([mine.met, -mine.sockets, mine.keys, -mine.keys], dtype=torch.int32)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    met, sockets, keys, without = told.tolist()
    if keys != -without:
        raise RuntimeError("some ranks were given THINWIRE_KEYS and others not: give it to all of them, or to none")
    return _Facts(bool(met), -sockets, bool(keys))


def gloo_encrypts() -> bool:
    """Return whether the user asked Gloo for TLS: then thinwire must not send unencrypted bytes itself."""
    return os.environ.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS"


def listen(backlog: int) -> socket.socket | None:
    """Return a server on the interface that Gloo would probably use; None: that fails.

    Raises:
        ValueError: ``THINWIRE_PORTS`` is not a range of ports, or none of them is free.
    """
    address = _address()
    server = server_at(address, _ports(), backlog)
    if server is None and os.environ.get("THINWIRE_PORTS"):
        raise ValueError(f"THINWIRE_PORTS={os.environ['THINWIRE_PORTS']}: none of these ports is free at {address}")
    return server


def _ports() -> Iterable[int]:
    """Return the ports at which a rank may listen: ``THINWIRE_PORTS``, for a firewall or a router; 0: any."""
    if not (named := os.environ.get("THINWIRE_PORTS")):
        return (0,)
    first, _, last = named.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
        raise ValueError(f"THINWIRE_PORTS={named!r} must be two ports such as 30000-30100")
    return range(int(first), int(last) + 1)


def _address() -> str:
    """Return the address of the named interface, else that of this machine's name, else the loopback; IPv4 first."""
    import fcntl  # not on Windows, where this is never called

    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", named.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
            for digits, _, _, scope, _, name in map(str.split, table):
                if name == named and scope != _LINK_LOCAL:
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    else:
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # the name cannot be resolved
                for *_, where in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_DGRAM):
                    address = str(where[0])
                    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                        probe.bind((address, 0))  # or it is an address of another machine
                        if "%" not in address:
                            return address
    return "127.0.0.1"


def endpoint_of(server: socket.socket | None, token: bytes) -> bytes:
    """Return where others reach this rank, and its token; empty: it does not listen.

    That is where it listens, or the name or address in ``THINWIRE_ADVERTISE``, whose router forwards the same port.
    """
    if server is None:
        return b""
    host, port = server.getsockname()[:2]
    host = os.environ.get("THINWIRE_ADVERTISE") or host
    check_name(host, "THINWIRE_ADVERTISE=")  # the others would not know whose it is
    if len(where := f"{host}:{port}".encode()) > _ENDPOINT_BYTES - TOKEN_BYTES:
        raise ValueError(f"THINWIRE_ADVERTISE={host!r} is too long for a name or an address")
    return token + where


def exchange_endpoints(endpoint: bytes, group: dist.ProcessGroup, size: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(endpoint.ljust(_ENDPOINT_BYTES, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    endpoints = [bytes(row.tolist()) for row in everyone]
    return [endpoint if any(endpoint) else b"" for endpoint in endpoints]


def meet(
    server: socket.socket,
    token: bytes,
    endpoints: Sequence[bytes],
    rank: int,
    channels: int = _CHANNELS,
    have: Mapping[tuple[int, int], socket.socket] | None = None,
) -> dict[tuple[int, int], socket.socket] | None:
    """Connect to every lower rank, and accept every higher one, by (rank, channel); None if a rank does not come.

    ``have``: the first channels' connections, which are kept.

    All connections are opened at once, in one round trip. Handshakes are read concurrently, so a client that connects
    and sends nothing holds up no other.
    """
    found = dict(have or {})
    first = len(found) // max(1, len(endpoints) - 1)
    called: dict[tuple[int, int], socket.socket] = {}
    unknown: dict[socket.socket, bytes] = {}  # connections whose handshake is incomplete: bytes so far; oldest first
    deadline = time.monotonic() + MEETING_SECONDS
    try:
        for peer in range(rank):
            host, _, port = endpoints[peer][TOKEN_BYTES:].rstrip(b"\0").decode().rpartition(":")
            where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            for channel in range(first, channels):
                called[peer, channel] = connection = socket.socket(where[0])
                connection.setblocking(False)
                connection.connect_ex(where[4])
        for (peer, channel), connection in called.items():
            if not writable([connection], max(0.01, deadline - time.monotonic())):
                raise TimeoutError
            connection.sendall(_HELLO.pack(endpoints[peer][:TOKEN_BYTES], rank, channel))  # or the call's error
            found[peer, channel] = connection
        while len(found) < channels * (len(endpoints) - 1):
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            for ready, hello in _heard(server, unknown, _HELLO.size, left):
                shown, other, channel = _HELLO.unpack(hello)
                known = secrets.compare_digest(shown, token) and rank < other < len(endpoints) and channel < channels
                if not known or (other, channel) in found:
                    ready.close()
                else:
                    found[other, channel] = ready
        return found
    except OSError:
        _close(one for one in (*found.values(), *called.values()) if one not in (have or {}).values())
        return None
    finally:
        _close(unknown)


def _heard(
    server: socket.socket, unknown: dict[socket.socket, bytes], size: int, seconds: float
) -> Iterator[tuple[socket.socket, bytes]]:
    """Wait up to ``seconds`` for callers; yield those whose first ``size`` bytes are whole, with these bytes.

    ``unknown``: the others, none of whom holds up another: what they have sent so far, the oldest first.
    """
    server.setblocking(False)
    for ready in readable([server, *unknown], seconds):
        if ready is server:
            with contextlib.suppress(OSError):  # it has gone again
                unknown[server.accept()[0]] = b""
            if len(unknown) > _MOST_UNKNOWN:
                _forget(next(iter(unknown)), unknown)
        elif (shown := _more(ready, unknown.get(ready, b""), size)) is None:
            _forget(ready, unknown)
        elif len(shown) < size:
            unknown[ready] = shown
        else:
            del unknown[ready]
            yield ready, shown


def _more(connection: socket.socket, shown: bytes, size: int) -> bytes | None:
    """Return what it has shown so far, with the bytes available now; None: the connection has ended."""
    try:
        connection.setblocking(False)
        more = connection.recv(size - len(shown))
    except BlockingIOError:
        return shown
    except OSError:
        return None
    return shown + more if more else None


def _forget(connection: socket.socket, unknown: dict[socket.socket, bytes]) -> None:
    unknown.pop(connection, None)
    connection.close()


def _close(sockets: Iterable[socket.socket]) -> None:
    for connection in sockets:
        connection.close()


def all_reduce_by_mesh(x: Tensor, lane: Lane) -> CountdownWork:
    """Sum over the ranks, in place; a contiguous CPU tensor.

    Each rank receives the others' parts of its own share, sums them in rank order and sends the sum to all ranks. These
    are a ring's bytes, ``2 (W - 1) / W`` of the tensor each way, but in two turns instead of ``2 (W - 1)``. The second
    turn has its own streams, because it begins when the sum is there, not in the order of the buckets. The sums are the
    same, in the same order, as those of a reduce-scatter and an all-gather.
    """
    mesh, peers, rank = _mesh(lane), lane.peers, lane.rank
    begins = [k * x.numel() // lane.size for k in range(lane.size + 1)]
    memory, wide = memory_of(x), x.itemsize
    shares = [memory[wide * begin : wide * end] for begin, end in pairwise(begins)]
    mine = x.view(-1)[begins[rank] : begins[rank + 1]]
    theirs, room = _room(mine, lane)
    whole = CountdownWork(3 * len(peers))

    def summed() -> None:
        ordered_sum(_in_order(theirs, mine, rank), out=mine)
        for peer in peers:
            mesh.second[peer].send(shares[rank], whole)

    first = CountdownWork(len(peers), summed, whole.fail)
    for peer in peers:
        mesh.first[peer].receive(room[peer], first)
        mesh.second[peer].receive(shares[peer], whole)
    for peer in peers:
        mesh.first[peer].send(shares[peer], whole)
    return whole


def reduce_scatter_by_mesh(x: Tensor, lane: Lane) -> tuple[CountdownWork, Callable[[], Tensor]]:
    """Sum ``x``, contiguous on the CPU, of a multiple of W elements; return the work, and a call for the share."""
    mesh, peers, rank = _mesh(lane), lane.peers, lane.rank
    mine = x.view(lane.size, -1)[rank]
    theirs, room = _room(mine, lane)
    memory, share = memory_of(x), mine.nbytes
    work = CountdownWork(2 * len(peers))
    for peer in reversed(peers):
        mesh.first[peer].receive(room[peer], work)
    for peer in peers:
        mesh.first[peer].send(memory[share * peer : share * (peer + 1)], work)
    return work, lambda: ordered_sum(_in_order(theirs, mine, rank))


def all_gather_by_mesh(x: Tensor, out: Tensor, lane: Lane) -> CountdownWork:
    """Gather ``x`` of every rank into ``out``, in rank order; contiguous on the CPU, ``out`` W times as large."""
    mesh, peers, share = _mesh(lane), lane.peers, x.nbytes
    memory = memory_of(out)
    if out.data_ptr() + lane.rank * share != x.data_ptr():
        out.view(lane.size, -1)[lane.rank].copy_(x.view(-1))
    mine = memory[share * lane.rank : share * (lane.rank + 1)]
    work = CountdownWork(2 * len(peers))
    for peer in peers:
        mesh.first[peer].receive(memory[share * peer : share * (peer + 1)], work)
    for peer in peers:
        mesh.first[peer].send(mine, work)
    return work


def _mesh(lane: Lane) -> Mesh:
    assert lane.mesh is not None
    return lane.mesh


def _room(mine: Tensor, lane: Lane) -> tuple[Tensor, dict[int, memoryview]]:
    """Allocate room for the others' parts of this rank's share: in rank order, and as memory by rank."""
    others = [rank for rank in range(lane.size) if rank != lane.rank]
    theirs = mine.new_empty((len(others), mine.numel()))
    memory, wide = memory_of(theirs), mine.nbytes
    return theirs, {rank: memory[wide * place : wide * (place + 1)] for place, rank in enumerate(others)}


def _in_order(theirs: Tensor, mine: Tensor, rank: int) -> list[Tensor]:
    parts = list(theirs.unbind())
    parts.insert(rank, mine)
    return parts


def ordered_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum W tensors ``[k]`` in rank order, 16-bit floats in fp32, into a new tensor or ``out``, one of them or not."""
    dtype = parts[0].dtype
    wide = working_dtype(dtype) if dtype.is_floating_point else dtype
    total = parts[0].to(wide)
    if len(parts) == 1:
        return total.to(dtype, copy=True) if out is None else out.copy_(total)
    for place, part in enumerate(parts[1:], 1):
        if out is not None and wide == dtype and place == len(parts) - 1:  # nothing is read after it
            return torch.add(total, part, out=out)
        total = total + part if total is parts[0] else total.add_(part)
    return total.to(dtype) if out is None else out.copy_(total)
