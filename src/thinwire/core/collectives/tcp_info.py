"""What TCP tells of a wire to another process, and what is asked of TCP if the wire is long."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.core.sockets import SOCKETS, WITH_BBR

LONG_SECONDS = 0.004
"""Of a round trip, from which on one socket is not enough."""
_CONTROLS = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
_TCP_CONGESTION, _TCP_INFO = 13, 11


class TcpInfo(NamedTuple):
    """What the kernel has measured of a connection. 0: it does not say."""

    trip: float = 0.0
    """Seconds to the other side and back."""
    least_trip: float = 0.0
    retransmitted: int = 0
    """Packets with data; ``sent``: all of them."""
    sent: int = 0

    @classmethod
    def of(cls, connection: socket.socket) -> TcpInfo:
        with contextlib.suppress(OSError, struct.error):
            told = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 160)
            trip, again, least, sent = (struct.unpack_from("=I", told, place)[0] for place in (68, 100, 148, 156))
            return cls(1e-6 * trip, 1e-6 * least, again, sent)
        return cls()


def use_congestion_control(connection: socket.socket, name: str) -> bool:
    """Ask for one of TCP's congestion controls; return whether the system allows it to this user."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode())
        return True
    return False


def congestion_control(connection: socket.socket) -> str:
    """Return the name of what runs; empty: the system does not say."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).split(b"\0")[0].decode()
    return ""


@dataclass(frozen=True)
class Wire:
    """What a long wire to another rank is like, as TCP on this side has seen it.

    Attributes:
        trip_seconds: there and back, without waiting in queues.
        lost: share of the packets that had to be sent again.
        sockets: that carry frames now.
        congestion_control: "bbr", "cubic" or another of the system's.
    """

    trip_seconds: float
    lost: float
    sockets: int
    congestion_control: str

    def __str__(self) -> str:
        return (
            f"round trip {1e3 * self.trip_seconds:.1f} ms, {self.lost:.2%} of the packets sent again, "
            f"{self.sockets} sockets with {self.congestion_control or 'TCP'}"
        )


def ask_for_control(connections: Collection[socket.socket]) -> str:
    """Ask for BBR, or what the user names, on connections of a long wire; return what runs."""
    named = os.environ.get("THINWIRE_CONGESTION", "")
    allowed = [use_congestion_control(one, named or "bbr") for one in connections]
    if named and not all(allowed):
        raise ValueError(f"THINWIRE_CONGESTION={named!r} must be one of those in {_CONTROLS}, which this system allows")
    return next(map(congestion_control, connections), "")


def is_long(connections: Collection[socket.socket]) -> bool:
    """Return whether one of these wires is long: by its shortest round trip, since a busy side answers late."""
    told = [TcpInfo.of(one) for one in connections]
    return max(one.least_trip or one.trip for one in told) >= LONG_SECONDS


def wanted_sockets(connections: Collection[socket.socket]) -> int:
    """Return how many sockets to another process a wire like these wants: 1, unless it is long or the user asks."""
    wish = os.environ.get("THINWIRE_SOCKETS")
    if wish and (not wish.isdecimal() or not 1 <= int(wish) <= SOCKETS):
        raise ValueError(f"THINWIRE_SOCKETS={wish!r} must be a whole number from 1 to {SOCKETS}")
    if not hasattr(select, "epoll") or not (wish or is_long(connections)):
        return 1
    control = ask_for_control(connections)
    return int(wish) if wish else WITH_BBR if control == "bbr" else SOCKETS


def active_sockets(connections: Collection[socket.socket], count: int) -> int | None:
    """Return how many of ``count`` sockets in a bundle carry frames; None: as many as TCP's reports ask for."""
    control = ask_for_control(connections)
    return count if os.environ.get("THINWIRE_SOCKETS") else WITH_BBR if control == "bbr" else None
