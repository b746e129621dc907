"""How the ranks of a lane connect to one another, with the help of the lane's Gloo group, or agree not to.

Gloo tells every rank the others' addresses. If any two ranks cannot reach one another (because of a firewall, for
example), all ranks use Gloo. They also do so if Gloo was asked to encrypt, and these connections were not: with
``THINWIRE_KEYS``, a directory of ``thinwire keys new``, they are TLS 1.3, both sides show a certificate, and nobody
falls back to Gloo.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.core.collectives.bundle import OPENING_SECONDS, Accept, Bundle, Call
from thinwire.core.collectives.groups import backend_for, seconds_of
from thinwire.core.collectives.mesh import CHANNELS, Mesh
from thinwire.core.collectives.socket_stream import Stream, socket_loop
from thinwire.core.connect import MOST_UNKNOWN, Ask, Invitations, ListeningPort
from thinwire.core.duplex import Duplex, dial, end_of
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.sockets import MESH_RANKS, SOCKETS, TOKEN_BYTES, check_name, server_at
from thinwire.core.tcp_info import active_sockets, congestion_control
from thinwire.core.tls import Credentials

logger = logging.getLogger(__name__)

MEETING_SECONDS = 10.0
_ENDPOINT_BYTES = 256
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sHB")
_SIOCGIFADDR, _LINK_LOCAL = 0x8915, "20"

Place = tuple[int, int]
"""A rank and the number of a connection to it."""


def open_mesh(group: dist.ProcessGroup, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> Mesh | None:
    """Connect all ranks of a Gloo group; a collective. Returns None, on all ranks, if that is not possible."""
    on_gloo, keys = backend_for(torch.device("cpu"), group) == "gloo", identity()
    if not hasattr(select, "epoll") or not 1 < len(ranks) <= MESH_RANKS or not on_gloo:
        return None
    encrypted = gloo_encrypts() and keys is None
    server, token = None if encrypted else listen(SOCKETS * len(ranks)), secrets.token_bytes(TOKEN_BYTES)
    endpoints = exchange_endpoints(endpoint_of(server, token), group, len(ranks))
    found: dict[Place, Duplex] = {}
    with contextlib.ExitStack() as stack:
        meeting = None
        if server is not None and all(endpoints):
            meeting = stack.enter_context(contextlib.closing(Meeting(server, token, endpoints, rank)))
        elif server is not None:
            server.close()
        met = meeting is not None and meeting.connect(found)
        facts = _agreed(_facts(met, found.values(), keys), group)
        if meeting is not None and facts.met and facts.sockets > 1:
            met = meeting.connect(found, facts.sockets)
            facts = _agreed(_Facts(met, facts.sockets, keys is not None), group)
    if not facts.met:
        _close(found.values())
        found = {}
    if keys is not None:
        _encrypt(found, rank, keys, group)
    if not facts.met:
        if encrypted:
            logger.info("thinwire: GLOO_DEVICE_TRANSPORT=TCP_TLS, so Gloo carries everything, encrypted")
        else:
            logger.info("thinwire: the ranks cannot reach one another directly, so Gloo carries everything")
        return None
    sockets, seconds = {place: duplex.release() for place, duplex in found.items()}, seconds_of(timeout)
    if facts.sockets > 1:
        return Mesh.over(rank, _bundles(sockets, facts.sockets, ranks, rank, seconds, keys))
    streams: list[dict[int, Stream]] = [{} for _ in range(CHANNELS)]
    for (peer, channel), connection in sockets.items():
        streams[channel][peer] = Stream(connection, f"rank {ranks[peer]}", seconds, socket_loop())
    return Mesh(rank, streams)


def _bundles(
    connections: Mapping[Place, socket.socket],
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
        invitations = Invitations()

        def hear(duplex: Duplex, end: float) -> None:
            invited = invitations.take(duplex.read(TOKEN_BYTES, end))
            if keys is not None:
                duplex.secure(keys, end)
            invitations.fill(invited, duplex.release())

        with contextlib.closing(ListeningPort(server, hear, OPENING_SECONDS)) as port:
            port.open()
            found: socket.socket | None = invitations.ask(port.port, None, ask, going)
            return found

    return accept


def calling(keys: Credentials | None = None) -> Call:
    """Return how a rank opens such a socket."""

    def call(beside: socket.socket, port: int, token: bytes) -> socket.socket:
        host, end = str(beside.getpeername()[0]), end_of(OPENING_SECONDS)
        duplex = dial(host, port, OPENING_SECONDS)
        duplex.write(token, end)
        if keys is not None:
            duplex.secure(keys, end, host)
        return duplex.release()

    return call


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


def _encrypt(found: Mapping[Place, Duplex], rank: int, keys: Credentials, group: dist.ProcessGroup) -> None:
    """Shake hands over all connections at once; ``RuntimeError`` on all ranks if any does not end well."""
    end = end_of(MEETING_SECONDS)

    def secure(place: Place) -> None:
        duplex = found[place]
        duplex.secure(keys, end, duplex.host if place[0] < rank else None)  # a higher rank has called this one

    failed = _at_once(secure, found)
    why = "" if found else "the ranks cannot reach one another directly"
    if failed:
        told = (str(error) for error in failed if isinstance(error, NotAdmitted))
        why = next(told, "no answer; another rank may say why: do the clocks agree?")
    if not _agreed(_Facts(met=not why, keys=True), group).met:
        _close(found.values())
        raise RuntimeError(f"THINWIRE_KEYS: {why or 'another rank has failed, and says why: do the clocks agree?'}")


def _at_once(do: Callable[[Place], None], places: Collection[Place]) -> list[Exception]:
    """Call for all places, each in a thread; return what went wrong on the network."""
    if not places:
        return []
    with ThreadPoolExecutor(len(places)) as pool:
        errors = [calls.exception() for calls in [pool.submit(do, place) for place in places]]
    for error in errors:
        if error is not None and not isinstance(error, (OSError, PairError)):
            raise error
    return [error for error in errors if isinstance(error, (OSError, PairError))]


def _facts(met: bool, connections: Collection[Duplex], keys: Credentials | None) -> _Facts:
    """Return what this rank has found: whether it reaches all others, and how many sockets its longest wire wants."""
    wanted = max((one.sockets_wanted for one in connections), default=1) if met else 1
    return _Facts(met, max(1 if keys is None else CHANNELS, wanted), keys is not None)


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


class Meeting:
    """A rank's port, and its calls of lower ranks, while the ranks of a mesh connect to one another.

    A stranger that connects and sends nothing holds up nobody. ``server`` is owned.
    """

    def __init__(self, server: socket.socket, token: bytes, endpoints: Sequence[bytes], rank: int) -> None:
        self._endpoints, self._rank = endpoints, rank
        self._invitations = Invitations()
        places = [(peer, channel) for peer in range(rank + 1, len(endpoints)) for channel in range(SOCKETS)]
        self._expected = {place: self._invitations.add(token, place) for place in places}
        self._port = ListeningPort(server, self._hear, MEETING_SECONDS, MOST_UNKNOWN + len(places))
        self._port.open()

    def _hear(self, duplex: Duplex, end: float) -> None:
        shown, *place = _HELLO.unpack(duplex.read(_HELLO.size, end))
        self._invitations.fill(self._invitations.take(shown, tuple(place)), duplex)

    def connect(self, found: dict[Place, Duplex], channels: int = CHANNELS) -> bool:
        """Call every lower rank, and wait for every higher one, so often; return whether ``found`` is complete."""
        end = end_of(MEETING_SECONDS)
        others = [peer for peer in range(len(self._endpoints)) if peer != self._rank]
        places = [(peer, channel) for peer in others for channel in range(channels) if (peer, channel) not in found]

        def call(place: Place) -> None:
            peer, channel = place
            host, _, port = self._endpoints[peer][TOKEN_BYTES:].rstrip(b"\0").decode().rpartition(":")
            found[place] = duplex = dial(host, int(port), MEETING_SECONDS)
            duplex.write(_HELLO.pack(self._endpoints[peer][:TOKEN_BYTES], self._rank, channel), end)

        if _at_once(call, [place for place in places if place[0] < self._rank]):
            return False
        expected = [self._expected.pop(place) for place in places if place[0] > self._rank]
        if not self._invitations.wait(expected, lambda: time.monotonic() < end):
            return False
        found |= {one.who: one.came for one in expected}
        return True

    def close(self) -> None:
        """Take no more connections, and end those that came but were not asked for."""
        self._port.close()
        _close(one.came for one in self._expected.values() if one.came is not None)


def _close(connections: Iterable[Duplex]) -> None:
    for connection in connections:
        connection.close()
