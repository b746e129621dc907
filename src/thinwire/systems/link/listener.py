"""Both ends of connecting: the listening side, which bounds unknown connections, and the calling side."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from thinwire.core.collectives.bundle import Ask
from thinwire.core.collectives.tcp_info import ask_for_control
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.sockets import TOKEN_BYTES, check_name, family_of, not_for_children
from thinwire.systems.link.duplex import Duplex, dial, end_of
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

HELLO_SECONDS = 10.0
MOST_UNKNOWN = 128
MOST_NUMBERS = 64  # of one certificate name
_LINES_SECONDS, _LOOK_SECONDS = 1.0, 0.25
_MOST_NOTES = 1 << 24
_NOTES_SIZE = struct.Struct("<I")

logger = logging.getLogger("thinwire")


class ListeningPort:
    """Lets ``hear`` (must not raise) meet each connection in a thread; of over ``most`` unknown, the oldest goes."""

    def __init__(
        self,
        port: int,
        host: str,
        hear: Callable[[Duplex, float], None],
        seconds: float = HELLO_SECONDS,
        most: int = MOST_UNKNOWN,
    ) -> None:
        check_port(port)
        check_name(host)
        with socket.socket() as probe:
            ask_for_control([probe])  # refuse now what no connection could use
        self._hear, self._seconds, self._most = hear, seconds, most
        self._unknown: dict[Duplex, None] = {}  # the oldest first
        self._lock = threading.Lock()
        try:
            server = socket.create_server((host, port), family=family_of(host), backlog=MOST_UNKNOWN)
        except OSError as error:
            advice = "choose another or end the program using it" if port else "is that an address of this machine?"
            raise PairError(f"port {port} of {host} cannot be used ({error.strerror}): {advice}") from error
        self._server: socket.socket | None = not_for_children(server)
        self.port = int(server.getsockname()[1])

    def open(self) -> None:
        threading.Thread(target=self._accept, args=(self._server,), name="thinwire-accept", daemon=True).start()

    def forget(self, duplex: Duplex) -> None:
        """Note that a connection has identified itself."""
        with self._lock:
            self._unknown.pop(duplex, None)

    @property
    def closed(self) -> bool:
        return self._server is None

    def close(self) -> None:
        with self._lock:
            server, self._server = self._server, None
            unknown = list(self._unknown)
        if server is None:
            return
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        for duplex in unknown:
            duplex.close()

    def _accept(self, server: socket.socket) -> None:
        while not self.closed:
            try:
                connection, _ = server.accept()
                duplex = Duplex(connection)
            except OSError:  # closed, or the process has no descriptors left
                time.sleep(0.01)
                continue
            with self._lock:
                if self.closed:
                    duplex.close()
                    return
                if len(self._unknown) >= self._most:
                    oldest = next(iter(self._unknown))
                    del self._unknown[oldest]
                    # while the lock is held: a connection that has been forgotten must not be closed for this reason
                    oldest.close(f"{self._most} others connected before it had said hello")
                self._unknown[duplex] = None
            try:
                threading.Thread(target=self._meet, args=(duplex,), name="thinwire-hello", daemon=True).start()
            except RuntimeError as error:  # perhaps no threads left; the caller will try again
                self.forget(duplex)
                duplex.close(str(error))

    def _meet(self, duplex: Duplex) -> None:
        try:
            self._hear(duplex, time.monotonic() + self._seconds)
        finally:
            self.forget(duplex)


def check_port(port: int, least: int = 0) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
        raise ValueError(f"port={port!r} must be a whole number from {least} to 65535")


@dataclass(eq=False)
class _Half:
    """A peer whose connection for frames is there, but not yet all for tensors; the first of these comes last."""

    identity: PeerIdentity
    duplex: Duplex
    first: bytes
    tensors: dict[int, Duplex] = field(default_factory=dict)
    whole: bool = False


@dataclass(eq=False)
class _Awaited:
    """A socket that a peer has been asked for, as long as ``going`` says."""

    identity: PeerIdentity
    going: Callable[[], bool]
    came: socket.socket | None = None


class Listener:
    """Accepts callers with a certificate of its authority, or with its secret; a :class:`ListeningPort` bounds others.

    With certificates, a number in a role belongs to the name that first came with it. ``notes``: for :class:`Caller`.
    ``trust`` None: everybody may connect; ``insecure`` allows that at an address that others reach.
    """

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        notes: dict[str, str] | None = None,
        *,
        roles: Collection[str],
        trust: Trust = None,
        insecure: bool = False,
        seconds: float = HELLO_SECONDS,
    ) -> None:
        check_host(host, trust, insecure)
        self._roles, self._trust, self._notes = roles, trust, dict(notes or {})
        self._came: Callable[[Peer, bytes], None] | None = None
        self._hello_bytes = 0
        self._halves: dict[bytes, _Half] = {}
        self._awaited: dict[bytes, _Awaited] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._said, self._unsaid = 0.0, 0
        self._listening = ListeningPort(port, host, self._meet, seconds)
        self.port = self._listening.port
        self._listening.open()

    def note(self, key: str, value: str) -> None:
        with self._changed:
            self._notes[key] = value

    def serve(self, came: Callable[[Peer, bytes], None], hello_bytes: int) -> None:
        """Accept callers, waiting and to come, in a thread each; ``came`` turns one away by Value- or RuntimeError."""
        with self._changed:
            self._came, self._hello_bytes = came, hello_bytes
            self._changed.notify_all()

    def close(self) -> None:
        self._listening.close()
        with self._changed:
            self._changed.notify_all()

    def _meet(self, duplex: Duplex, end: float) -> None:
        try:
            heard = hear(duplex, self._roles, self._trust, end)
            if not self._is_its_own(heard.identity):
                refuse(duplex, end)
            if self._trust is not None:
                self._listening.forget(duplex)
            if heard.channel == NOTES:
                admit(duplex, heard, self._trust, end)
                with self._changed:
                    notes = json.dumps(self._notes).encode()
                duplex.write(_NOTES_SIZE.pack(len(notes)) + notes, end)
                duplex.close()
            elif heard.channel == FRAMES:
                self._hold(duplex, heard, end)
            elif heard.channel == AGAIN:
                self._replace(duplex, heard, end)
            else:
                self._join(duplex, heard, end)
        except NotAdmitted as error:
            self._say(f"turned away {duplex.host}: {error}")
            duplex.close()
        except (PairError, ValueError, RuntimeError) as error:
            logger.debug("%s was not let in: %s", duplex.host, error)
            duplex.close()

    def _is_its_own(self, identity: PeerIdentity) -> bool:
        """Return whether a certificate's name owns its number; the first name that uses a number owns it."""
        if identity.shown is None:
            return True
        place, name = (identity.role, identity.number), identity.shown.name
        with self._changed:
            if place not in self._owners and sum(owner == name for owner in self._owners.values()) >= MOST_NUMBERS:
                return False
            return self._owners.setdefault(place, name) == name

    def _hold(self, duplex: Duplex, heard: Introduction, end: float) -> None:
        with self._changed:
            self._wait(lambda: self._came is not None, end)
        admit(duplex, heard, self._trust, end)
        half = _Half(heard.identity, duplex, duplex.read(self._hello_bytes, end))
        with self._changed:
            if heard.token in self._halves:
                raise PairError("this peer is already here")
            self._halves[heard.token] = half
            self._changed.notify_all()
            self._wait_for_rest(heard.token, half, end)

    def _wait_for_rest(self, token: bytes, half: _Half, end: float) -> None:
        try:
            self._wait(lambda: half.whole, end)
        except PairError:
            if half.whole:
                return
            if self._halves.get(token) is half:
                del self._halves[token]
            raise

    def _join(self, duplex: Duplex, heard: Introduction, end: float) -> None:
        place = heard.channel - TENSORS
        with self._changed:
            self._wait(lambda: heard.token in self._halves, end)
            half = self._halves[heard.token]
            if half.identity != heard.identity:
                raise NotAdmitted("it asks for the tensors of another process")
            if place in half.tensors or (not place and sorted(half.tensors) != [*range(1, 1 + len(half.tensors))]):
                raise NotAdmitted("its connections for tensors do not fit together")
            admit(duplex, heard, self._trust, end)
            half.tensors[place] = duplex
            if place:
                self._wait_for_rest(heard.token, half, end)
                return
            del self._halves[heard.token]
            half.whole = True
            tensors = [half.tensors[number] for number in range(len(half.tensors))]
            for ours in (*tensors, half.duplex):
                self._listening.forget(ours)
            self._changed.notify_all()
            came = self._came
        assert came is not None
        try:
            peer = Peer(half.duplex, together(tensors, accept=partial(self._await, half.identity)), half.identity)
        except (OSError, PairError) as error:  # it has gone again
            for ours in (*tensors, half.duplex):
                ours.close()
            raise PairError(str(error)) from error
        try:
            came(peer, half.first)
        except (ValueError, RuntimeError) as error:
            peer.close()
            self._say(f"turned away {duplex.host}: {error}")

    def _await(
        self, identity: PeerIdentity, _: socket.socket, ask: Ask, going: Callable[[], bool]
    ) -> socket.socket | None:
        """Ask a peer for a socket in place of a lost one, and return it; None: it does not come."""
        token, awaited = secrets.token_bytes(TOKEN_BYTES), _Awaited(identity, going)
        with self._changed:
            self._awaited[token] = awaited
        ask(self.port, token)
        with self._changed:
            while token in self._awaited and going() and not self._listening.closed:
                self._changed.wait(_LOOK_SECONDS)
            self._awaited.pop(token, None)
        return awaited.came

    def _replace(self, duplex: Duplex, heard: Introduction, end: float) -> None:
        with self._changed:
            awaited = self._awaited.get(heard.token)
            if awaited is None or awaited.identity != heard.identity or not awaited.going():
                raise NotAdmitted("nobody has asked it for another connection")
            admit(duplex, heard, self._trust, end)
            self._listening.forget(duplex)
            awaited.came = duplex.release()
            del self._awaited[heard.token]
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], end: float) -> None:
        self._changed.wait_for(lambda: self._listening.closed or ready(), max(0.0, end - time.monotonic()))
        if self._listening.closed or not ready():
            raise PairError("it took too long, or this side has closed")

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
            (size,) = _NOTES_SIZE.unpack(duplex.read(_NOTES_SIZE.size, end))
            if size > _MOST_NOTES:
                raise PairError(f"{self._host} has notes of {size} bytes: is it a thinwire server?")
            notes = json.loads(duplex.read(size, end))
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
        opened[FRAMES].write(hello, end)
        count = opened[FRAMES].sockets_wanted
        with ThreadPoolExecutor(count) as pool:  # without a thread, as long as there is nothing to do
            list(pool.map(call, range(TENSORS + 1, TENSORS + count)))
        call(TENSORS)
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
