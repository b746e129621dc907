"""Both ends of connecting: the listening side, which knows who is there, and the calling side."""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from thinwire.core.connect import HELLO_SECONDS, MOST_UNKNOWN, Ask, Invitations, ListeningPort
from thinwire.core.duplex import Duplex, dial, end_of
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.sockets import SOCKETS, TOKEN_BYTES, check_name, family_of
from thinwire.core.tls import Credentials
from thinwire.systems.link.hello import (
    AGAIN,
    FRAMES,
    NOTES,
    TENSORS,
    Introduction,
    PeerIdentity,
    Trust,
    admit,
    check_host,
    hear,
    introduce,
    refuse,
)
from thinwire.systems.link.peer import Peer
from thinwire.systems.link.tensor_sockets import together

MOST_NUMBERS = 64  # of one certificate name
_LINES_SECONDS = 1.0
_MOST_NOTES = 1 << 24
_SIZE = struct.Struct("<I")

logger = logging.getLogger("thinwire")


def check_port(port: int, least: int = 0) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
        raise ValueError(f"port={port!r} must be a whole number from {least} to 65535")


def server_of(port: int, host: str) -> socket.socket:
    """Listen at a port, 0 being any. ``PairError``: it cannot be used."""
    check_port(port)
    check_name(host)
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=MOST_UNKNOWN)
    except OSError as error:
        advice = "choose another or end the program using it" if port else "is that an address of this machine?"
        raise PairError(f"port {port} of {host} cannot be used ({error.strerror}): {advice}") from error


def _send_text(duplex: Duplex, text: bytes, end: float) -> None:
    duplex.write(_SIZE.pack(len(text)) + text, end)


def _receive_text(duplex: Duplex, most: int, end: float) -> bytes:
    (size,) = _SIZE.unpack(duplex.read(_SIZE.size, end))
    if size > most:
        raise PairError(f"{duplex.host} sends {size} bytes where {most} are the most: is it a thinwire server?")
    return duplex.read(size, end)


class Listener:
    """Accepts callers with a certificate of its authority, or with its secret; a :class:`ListeningPort` bounds others.

    With certificates, a number in a role belongs to the name that first came with it. ``notes``: for :class:`Caller`.
    """

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        notes: dict[str, str] | None = None,
        *,
        roles: Collection[str],
        trust: Trust = None,
        seconds: float = HELLO_SECONDS,
    ) -> None:
        check_host(host, trust)
        self._roles, self._trust, self._notes = roles, trust, dict(notes or {})
        self._came: Callable[[Peer, bytes], None] | None = None
        self._most_hello = 0
        self._invitations = Invitations()
        self._owners: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._said, self._unsaid = 0.0, 0
        self._listening = ListeningPort(server_of(port, host), self._meet, seconds)
        self.port = self._listening.port
        self._listening.open()

    def note(self, key: str, value: str) -> None:
        with self._changed:
            self._notes[key] = value

    def serve(self, came: Callable[[Peer, bytes], None], most_hello: int) -> None:
        """Accept callers, waiting and to come, in a thread each; ``came`` turns one away by Value- or RuntimeError.

        ``most_hello``: bytes with which a caller may begin.
        """
        with self._changed:
            self._came, self._most_hello = came, most_hello
            self._changed.notify_all()

    def close(self) -> None:
        self._listening.close()
        with self._changed:
            self._changed.notify_all()

    def _meet(self, duplex: Duplex, end: float) -> bool:
        """Return whether the connection waits for others of the same peer, all of which :meth:`_welcome` then knows."""
        try:
            heard = hear(duplex, self._roles, self._trust, end)
            if not self._is_its_own(heard.identity):
                refuse(duplex, end)
            if isinstance(self._trust, (Credentials, bytes)):
                self._listening.forget(duplex)
            if heard.channel == NOTES:
                admit(duplex, heard, self._trust, end)
                with self._changed:
                    notes = json.dumps(self._notes).encode()
                _send_text(duplex, notes, end)
                duplex.close()
            elif heard.channel == FRAMES:
                self._welcome(duplex, heard, end)
            else:
                again = heard.channel == AGAIN
                who = heard.identity, heard.channel
                invited = self._invitations.take(heard.token, who, 0.0 if again else end)
                admit(duplex, heard, self._trust, end)
                self._invitations.fill(invited, duplex)
                return not again
        except NotAdmitted as error:
            self._say(f"turned away {duplex.host}: {error}")
            duplex.close()
        except (PairError, ValueError, RuntimeError) as error:
            logger.debug("%s was not let in: %s", duplex.host, error)
            duplex.close()
        return False

    def _is_its_own(self, identity: PeerIdentity) -> bool:
        """Return whether a certificate's name owns its number; the first name that uses a number owns it."""
        if identity.shown is None:
            return True
        place, name = (identity.role, identity.number), identity.shown.name
        with self._changed:
            if place not in self._owners and sum(owner == name for owner in self._owners.values()) >= MOST_NUMBERS:
                return False
            return self._owners.setdefault(place, name) == name

    def _welcome(self, duplex: Duplex, heard: Introduction, end: float) -> None:
        """Wait for a peer's connections for tensors, and hand it over."""
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._listening.closed, max(0.0, end - time.monotonic()))
            came = self._came
        if came is None:
            raise PairError("this side did not begin to serve")
        admit(duplex, heard, self._trust, end)
        count, *hello = _receive_text(duplex, 1 + self._most_hello, end)
        if not 1 <= count <= SOCKETS:
            raise PairError(f"{count} connections for tensors")
        own = heard.identity
        places = [self._invitations.add(heard.token, (own, TENSORS + place)) for place in range(count)]
        whole = self._invitations.wait(places, lambda: self._waits(end) and not duplex.closed)
        tensors = [one.came for one in places]
        for ours in (duplex, *tensors):
            if ours is not None:
                self._listening.forget(ours)
        if not whole:
            raise PairError("its connections for tensors did not come in time")

        def accept(_: socket.socket, ask: Ask, going: Callable[[], bool]) -> socket.socket | None:
            found = self._invitations.ask(self.port, (own, AGAIN), ask, lambda: going() and self._waits())
            return None if found is None else found.release()

        try:
            peer = Peer(duplex, together(tensors, accept=accept), own)
        except (OSError, PairError) as error:  # it has gone again
            for one in tensors:
                one.close()
            raise PairError(str(error)) from error
        try:
            came(peer, bytes(hello))
        except (ValueError, RuntimeError) as error:
            peer.close()
            self._say(f"turned away {duplex.host}: {error}")

    def _waits(self, end: float = math.inf) -> bool:
        return time.monotonic() < end and not self._listening.closed

    def _say(self, words: str) -> None:
        """Log a line; of many in quick succession, only the first, and later how many there were."""
        with self._changed:
            now = time.monotonic()
            if now - self._said < _LINES_SECONDS:
                self._unsaid += 1
                return
            self._said, others, self._unsaid = now, self._unsaid, 0
        logger.warning("%s%s", words, f" (and {others} more before it)" if others else "")


class Caller:
    """A listener's address ``host:port``, and its notes when last read. ``found_at``: the IP address reached.

    ``source``: this machine's address to connect from. ``NotAdmitted``: not let in. ``PairError``: nobody listens now.
    """

    def __init__(
        self, address: str, identity: PeerIdentity, seconds: float = HELLO_SECONDS, source: str | None = None
    ) -> None:
        self._host, self._port = split_address(address)
        self._identity, self._seconds, self._source = identity, seconds, source
        self._notes: dict[str, str] = {}
        self.found_at = ""
        self.refresh()

    def refresh(self) -> None:
        end, who = time.monotonic() + self._seconds, f"{self._host} has no notes: is it a thinwire server?"
        try:
            duplex = _call(self._host, self._port, self._identity, NOTES, bytes(TOKEN_BYTES), end, self._source)
        except NotAdmitted:
            raise
        except (OSError, PairError) as error:
            raise PairError(f"nobody listens at {self._host}:{self._port} ({error})") from error
        try:
            notes = json.loads(_receive_text(duplex, _MOST_NOTES, end))
            if not isinstance(notes, dict):
                raise PairError(who)
            self._notes, self.found_at = notes, duplex.host
        except (RecursionError, ValueError) as error:
            raise PairError(who) from error
        finally:
            duplex.close()

    def note(self, key: str) -> str:
        if not isinstance(found := self._notes.get(key), str):
            raise PairError(f"{self._host} does not give its {key}: is it a thinwire server?")
        return found

    def connect(self, hello: bytes) -> Peer:
        return connect(self._host, self._port, hello, self._identity, self._seconds, self._source)


def connect(
    host: str,
    port: int,
    hello: bytes,
    identity: PeerIdentity,
    seconds: float = HELLO_SECONDS,
    source: str | None = None,
) -> Peer:
    """Connect, with ``hello`` as the first frame. ``PairError``: nobody listens; ``NotAdmitted``: it is no use."""
    end, token = time.monotonic() + seconds, secrets.token_bytes(TOKEN_BYTES)
    opened: dict[int, Duplex] = {}

    def call(channel: int) -> None:
        opened[channel] = _call(host, port, identity, channel, token, end, source)

    def again(_: socket.socket, __: int, token: bytes) -> socket.socket:
        return _call(host, port, identity, AGAIN, token, end_of(seconds), source).release()

    try:
        call(FRAMES)
        count = opened[FRAMES].sockets_wanted
        _send_text(opened[FRAMES], bytes([count]) + hello, end)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(call, range(TENSORS, TENSORS + count)))
        tensors = together([opened[TENSORS + place] for place in range(count)], call=again)
    except (OSError, RuntimeError, ValueError) as error:
        for duplex in opened.values():
            duplex.close()
        if isinstance(error, (NotAdmitted, ValueError)):
            raise
        raise PairError(f"{host} did not let this process in ({error})") from error
    return Peer(opened[FRAMES], tensors, PeerIdentity("listener", 0))


def _call(
    host: str, port: int, identity: PeerIdentity, channel: int, token: bytes, end: float, source: str | None
) -> Duplex:
    own = None if source is None else (source, 0)
    duplex = dial(host, port, max(0.001, end - time.monotonic()), own)
    try:
        introduce(duplex, identity, channel, token, end, host)
    except PairError:
        duplex.close()
        raise
    return duplex


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` into its two values; ``[::1]:port`` too. ``ValueError``: the text has another form."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"address {address!r} is not a host:port, such as 10.0.0.1:29400")
    check_name(host)
    return host, int(port)
