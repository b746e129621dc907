"""Several sockets between two ranks that carry streams of messages together, for wires that are long or lose packets.

After a loss one TCP connection halves its rate, and on a long wire it takes seconds to win it back; after idling it
starts slowly. So messages are cut into frames, and the next frame goes to whichever socket has room. The receiver puts
a frame where its header says, straight into the message's place, or keeps it until that place is posted. All meshes
over the same ranks share the sockets: each has streams of its own, which are opened without a word.

How many sockets carry frames follows from what TCP reports. If packets get lost on an empty wire, twice as many share
the damage; if they get lost because a queue on the wire is full, half as many fill it less roughly.

Each side tells how many frames of a socket it has. What is not confirmed is kept, and sent again by other sockets if
this one is lost, and the side that once accepted the connections asks the other one to open a new one: a step does not
fail unless all are lost. Before a process ends or closes its sockets it waits until the other side has everything:
closing a socket with something unread takes back what it still has to deliver.

The sockets were opened by ranks that showed the token of this job; a frame that cannot be right ends the bundle, and so
the step, with an error.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import multiprocessing.util
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from thinwire.core.collectives.socket_stream import CountdownWork, SocketLoop, memory_of
from thinwire.core.connect import Ask
from thinwire.core.errors import PairError
from thinwire.core.sockets import TOKEN_BYTES, not_for_children
from thinwire.core.tcp_info import TcpInfo, Wire, congestion_control, use_congestion_control
from thinwire.core.tls import CipherSocket

logger = logging.getLogger(__name__)

FRAME_BYTES = 32 << 10
_HEADER = struct.Struct("<BHIQI")
"""Kind, stream, message, offset, bytes; or kind, a socket's place, a port, frames received, bytes that follow."""
_DATA, _CONFIRMED, _LOST, _OPEN, _BYE = 1, 2, 3, 4, 5
_AHEAD = 1 << 16  # messages that one side may send before the other has posted their places
_UNCONFIRMED = 1 << 10  # frames of a socket that may be kept for sending them again
_TURN_BYTES = 8 * FRAME_BYTES  # received from a socket before others have their turn
_NOTSENT_BYTES = FRAME_BYTES // 2  # that wait in a socket: what waits here can still go to another one
_LINGER_SECONDS, OPENING_SECONDS = 5.0, 10.0
_CLOSED = "the other side has closed it"
STUCK_SECONDS = 10.0  # in which a socket that has something to send moved nothing, while others did: its path is dead
_KEEPALIVE_SECONDS = 30  # less than after which a router forgets a connection

_BEGIN, _ADAPT_SECONDS = 2, 0.25
_EMPTY, _FULL = 1.5, 2.0  # of a wire's queue: round trips, over those without one
_TCP_KEEPIDLE, _TCP_KEEPINTVL, _TCP_USER_TIMEOUT, _TCP_NOTSENT_LOWAT = 4, 5, 18, 25


_Frame = tuple[int, int, int, int]
"""Of a stream's message: the bytes from an offset on."""
Accept = Callable[[socket.socket, Ask, Callable[[], bool]], socket.socket | None]
"""Asks for another socket beside one, and waits for it as long as the last argument says; None: it has not come."""
Call = Callable[[socket.socket, int, bytes], socket.socket]
"""Opens a socket beside one, as the other side has asked. ``OSError``, ``PairError``: that fails."""


@dataclass(eq=False)
class _Place:
    """A posted message: where it goes, and which of its frames have come."""

    memory: memoryview
    work: CountdownWork
    left: int
    came: set[int] = field(default_factory=set)

    def part(self, offset: int, size: int, peer: str) -> memoryview:
        """Return a frame's part of the message, or raise ``_NoFrame``: the message has no such part."""
        if size != min(FRAME_BYTES, len(self.memory) - offset):
            raise _NoFrame(peer)
        return self.memory[offset : offset + size]


@dataclass(eq=False)
class _Incoming:
    """What one stream receives. ``early``: frames by message and offset whose place is not posted yet."""

    posted: int = 0
    ended: int = 0
    places: dict[int, _Place] = field(default_factory=dict)
    early: dict[int, dict[int, bytearray]] = field(default_factory=dict)


class _Inbox:
    """The messages of one other rank: their places, and who is told of whole ones.

    The bundle's lock must be held, except for :meth:`tell`.
    """

    def __init__(self, peer: str, lock: threading.RLock) -> None:
        self._peer, self._lock = peer, lock
        self._streams: dict[int, _Incoming] = {}
        self._whole = deque[CountdownWork]()  # of messages, in the order of their streams, whose users are told next
        self._telling = False
        self.most_early = math.inf
        self._early = 0  # frames

    @property
    def expects(self) -> bool:
        return any(one.places for one in self._streams.values())

    def post(self, stream: int, memory: memoryview, work: CountdownWork) -> None:
        """Give the stream's next message its place."""
        incoming = self._streams.setdefault(stream, _Incoming())
        number, incoming.posted = incoming.posted, incoming.posted + 1
        incoming.places[number] = _Place(memory, work, len(memory))
        early = incoming.early.pop(number, {})
        self._early -= len(early)
        for offset, piece in early.items():
            self.arrived((stream, number, offset, len(piece)), piece)

    def target(self, frame: _Frame) -> tuple[memoryview, bytearray | None]:
        """Return where a frame's bytes go: into its message, or for now into a buffer."""
        stream, message, offset, size = frame
        incoming = self._streams.setdefault(stream, _Incoming())
        if not 0 < size <= FRAME_BYTES or offset % FRAME_BYTES or message >= incoming.posted + _AHEAD:
            raise _NoFrame(self._peer)
        place = incoming.places.get(message)
        if place is not None and offset not in place.came:
            return place.part(offset, size, self._peer), None
        if self._early >= self.most_early:
            raise _NoFrame(self._peer)
        kept = bytearray(size)  # its place is not posted yet; or it came before, over a socket that was lost
        return memoryview(kept), kept

    def arrived(self, frame: _Frame, kept: bytearray | None) -> bool:
        """Count a frame; ``kept``: its bytes, if they are not in place. Return whether its message is posted."""
        stream, message, offset, size = frame
        incoming = self._streams[stream]
        place = incoming.places.get(message)
        if place is None or offset in place.came:
            if message >= incoming.posted and kept is not None:
                early = incoming.early.setdefault(message, {})
                self._early += offset not in early
                early[offset] = kept
            return False
        if kept is not None:
            place.part(offset, size, self._peer)[:] = kept
        place.came.add(offset)
        place.left -= size
        while (first := incoming.places.get(incoming.ended)) is not None and not first.left:
            self._whole.append(incoming.places.pop(incoming.ended).work)
            incoming.ended += 1
        return True

    def tell(self) -> None:
        """Tell the users of whole messages, of each stream in order, since what they do next depends on it.

        One thread at a time: whoever comes meanwhile, as a user who posts more, leaves it to that one.
        """
        while True:
            with self._lock:
                if self._telling or not self._whole:
                    return
                self._telling, work = True, self._whole.popleft()
            try:
                work.part_ended()
            finally:
                self._telling = False

    def empty(self) -> list[CountdownWork]:
        """Forget the places of messages that are not whole, and return whom to tell of an error."""
        works = [place.work for one in self._streams.values() for place in one.places.values()]
        for one in self._streams.values():
            one.places.clear()
        return works


class BundleStream:
    """One order of messages over a bundle; as a ``Stream`` to its users."""

    def __init__(self, bundle: Bundle, number: int) -> None:
        self._bundle, self._number = bundle, number

    def send(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post a contiguous CPU tensor, or its :func:`memory_of`; the work ends once all of it is on its way."""
        self._bundle.send(self._number, x if isinstance(x, memoryview) else memory_of(x), work)

    def receive(self, x: Tensor | memoryview, work: CountdownWork) -> None:
        """Post the place for the next message: a contiguous CPU tensor of its size, or its :func:`memory_of`."""
        self._bundle.receive(self._number, x if isinstance(x, memoryview) else memory_of(x), work)

    def close(self) -> None:
        """Do nothing: other meshes use the sockets."""


class Bundle:
    """This rank's sockets to one other rank, which it owns.

    After ``timeout`` seconds without a byte, whatever waits fails; errors name the ``peer``. One side has ``accept``
    and the other ``call``, which open a socket in place of a lost one; both encrypt as the sockets do. ``active``: so
    many of the sockets carry frames; by default as many as serves best.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        peer: str,
        timeout: float,
        loop: SocketLoop,
        *,
        accept: Accept | None = None,
        call: Call | None = None,
        active: int | None = None,
    ) -> None:
        self._peer, self.timeout, self._loop, self._process = peer, timeout, loop, os.getpid()
        self._accept, self._call, self._adapts = accept, call, active is None
        self.lock = threading.RLock()
        self._error: RuntimeError | None = None
        self._inbox = _Inbox(peer, self.lock)
        self._streams: list[int] = []  # messages sent, by stream
        self._waiting = deque[tuple[int, int, memoryview, int, CountdownWork]]()  # to send, from an offset on
        self._first = deque[bytes]()  # frames to send before: words to the other side, and those of a lost socket
        self._moved_in = self._moved_out = self._adapted = time.monotonic()
        self._ends_told, self._lost_there = False, list[_End]()
        self._held_back = False
        self.active = active or _BEGIN
        self._wanted, self._next_place = len(sockets), itertools.count(len(sockets))
        self._opening: threading.Thread | None = None
        self._called = set[int]()  # the places of sockets that this side is opening
        self._over = threading.Event()
        self.by_place = {place: _End(self, place, connection, loop) for place, connection in enumerate(sockets)}
        self.ends = list(self.by_place.values())  # those that are not lost
        self._at_exit = multiprocessing.util.Finalize(None, self.close, exitpriority=1)  # of children that fork, too
        with self.lock:  # none is lost while others have not begun
            for end in self.ends:
                end.start()

    def stream(self) -> BundleStream:
        """Return a new stream. Both sides open theirs in the same order."""
        with self.lock:
            self._streams.append(0)
            return BundleStream(self, len(self._streams) - 1)

    def keep_at_most(self, frames: int) -> None:
        """Fail if the other side sends more frames than that before the places of their messages are posted."""
        with self.lock:
            self._inbox.most_early = frames

    def wire(self) -> Wire | None:
        """Return what the wire is like; None: all sockets are lost."""
        with self.lock:
            if not self.ends:
                return None
            told, active = [TcpInfo.of(end.socket) for end in self.ends], min(self.active, len(self.ends))
            again, sent = sum(info.retransmitted for info in told), sum(info.sent for info in told)
            least = min(info.least_trip for info in told)
            return Wire(least, again / max(1, sent), active, congestion_control(self.ends[0].socket))

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, stream: int, memory: memoryview, work: CountdownWork) -> None:
        if not memory:
            work.part_ended()
            return
        with self.lock:
            if (error := self._error) is None:
                if not self._waiting:
                    self._moved_out = time.monotonic()
                self._waiting.append((stream, self._streams[stream], memory, 0, work))
                self._streams[stream] += 1
        if error is not None:
            work.fail(error)
        else:
            self._send_more()

    def _send_more(self) -> None:
        for end in list(self.ends):
            if not end.blocked:
                end.on_room()

    def _say(self, kind: int, place: int = 0, about: int = 0, more: bytes = b"") -> None:
        with self.lock:
            if self._error is None:
                self._first.append(_HEADER.pack(kind, place, about, 0, len(more)) + more)
        self._send_more()

    def next_frame(self, end: _End, ended: list[CountdownWork]) -> bytes | None:
        """Return what a socket sends next; the lock must be held.

        All but confirmations is kept until it is confirmed. It is a copy, so the message's memory is free.
        """
        for one in self.by_place.values():
            if one.told != one.received:
                one.told = one.received
                return _HEADER.pack(_CONFIRMED, one.place, 0, one.told, 0)
        frame = self._first.popleft() if self._first else self._next_of_message(end, ended)
        if frame is not None:
            end.unconfirmed.append(frame)
            end.sent += 1
        return frame

    def _next_of_message(self, end: _End, ended: list[CountdownWork]) -> bytes | None:
        if not self._waiting or end not in self.ends[: self.active]:
            return None
        if len(end.unconfirmed) >= _UNCONFIRMED:
            self._held_back = True
            return None
        stream, message, memory, offset, work = self._waiting[0]
        piece = memory[offset : offset + FRAME_BYTES]
        if offset + len(piece) < len(memory):
            self._waiting[0] = stream, message, memory, offset + len(piece), work
        else:
            self._waiting.popleft()
            ended.append(work)
        return b"".join((_HEADER.pack(_DATA, stream, message, offset, len(piece)), piece))

    def confirm(self, end: _End) -> None:
        """Tell the other side what has come, over the socket it came by, or any other one with room."""
        for one in (end, *self.ends):
            if not (one.blocked or one.stopped):
                one.on_room()
                return

    def _adapt(self, now: float) -> None:
        """Let more sockets carry frames, or fewer; the lock must be held."""
        if not self._adapts or now - self._adapted < _ADAPT_SECONDS:
            return
        self._adapted = now
        told, more = [TcpInfo.of(end.socket) for end in self.ends], 0
        for end, info in zip(self.ends, told):
            more += info.retransmitted - end.retransmitted
            end.retransmitted = info.retransmitted
        used = [info.trip for info in told[: self.active]]
        if not more or not (least := min(info.least_trip for info in told)):
            return
        longer = sum(used) / len(used) / least
        if longer < _EMPTY:
            self.active = min(len(self.ends), 2 * self.active)
        elif longer > _FULL:
            self.active = max(_BEGIN, self.active // 2)

    # --- receiving -----------------------------------------------------------------------------------------------

    def receive(self, stream: int, memory: memoryview, work: CountdownWork) -> None:
        if not memory:
            work.part_ended()
            return
        late, wrong = list[CountdownWork](), None
        with self.lock:
            if not self._inbox.expects:
                self._moved_in = time.monotonic()
            try:
                self._inbox.post(stream, memory, work)
            except _NoFrame as caught:
                wrong = caught
            if (error := self._error) is not None:
                late = self._inbox.empty()  # all but messages of which everything had come before
        for one in late:
            one.fail(error or RuntimeError())
        if wrong is not None:
            self.fail(wrong)
        self._inbox.tell()

    def after_data(self) -> None:
        """Do what may call users, for which the lock must not be held."""
        while self._lost_there:
            self.lost(self._lost_there.pop(), "the other side has lost it")
        self._inbox.tell()
        if self._held_back:
            self._held_back = False
            self._send_more()

    def target(self, kind: int, frame: _Frame) -> tuple[memoryview, bytearray | None]:
        """Return where the bytes go that follow a header; the lock must be held."""
        if kind == _DATA:
            return self._inbox.target(frame)
        if frame[-1] != (TOKEN_BYTES if kind == _OPEN else 0) or not _DATA < kind <= _BYE:
            raise _NoFrame(self._peer)
        kept = bytearray(frame[-1])
        return memoryview(kept), kept

    def arrived(self, end: _End, kind: int, frame: _Frame, kept: bytearray | None) -> None:
        """Take a whole frame; ``kept``: its bytes, if they are not in place. The lock must be held."""
        place, port, total, _ = frame
        if kind == _CONFIRMED:
            self._confirmed(place, total)
            return
        end.received += 1
        if kind == _DATA:
            if self._inbox.arrived(frame, kept):
                for other in self.ends:
                    other.leave(frame)
        elif kind == _LOST:
            self._lost_there += [one for one in self.ends if one.place == place]
        elif kind == _OPEN:
            known = self.by_place.keys() | self._called  # this side may not know yet which of them are lost
            if self._call is not None and place not in known and len(known) < 2 * self._wanted:
                self._called.add(place)
                opens = partial(self._call, end.socket, port, bytes(kept or b""))
                threading.Thread(target=self._open, args=(place, opens), name="thinwire-open", daemon=True).start()
        else:
            self._ends_told = True

    def _confirmed(self, place: int, total: int) -> None:
        """Forget frames that have arrived."""
        if (end := self.by_place.get(place)) is None:
            return
        if total > end.sent:
            raise _NoFrame(self._peer)
        end.moved = time.monotonic()
        for _ in range(total - end.sent + len(end.unconfirmed)):  # none: it was overtaken by a later confirmation
            end.unconfirmed.popleft()

    def moved(self, *, out: bool) -> None:
        if out:
            self._moved_out = time.monotonic()
        else:
            self._moved_in = time.monotonic()

    # --- sockets that are lost, and new ones ---------------------------------------------------------------------

    def lost(self, end: _End, why: str) -> None:
        """Let the other sockets send what a lost one had not delivered; without any, all fails."""
        with self.lock:
            if end.stopped:
                return
            self._first.extend(end.stop())
            self.by_place.pop(end.place, None)
            self.ends.remove(end)
            for one in self.ends:
                one.told = -1  # what told it may have been lost
            others = len(self.ends)
        if not others:
            self.fail(RuntimeError(f"the connection to {self._peer} was lost: {why}"))
        elif self._ends_told:
            self._send_more()
        else:
            logger.warning("thinwire: a socket to %s was lost (%s); %d others carry on", self._peer, why, others)
            if self._accept is not None:
                self._replace(self._accept)
            self._say(_LOST, end.place)

    def _replace(self, accept: Accept) -> None:
        with self.lock:
            if self._opening is None and self._error is None:
                self._opening = threading.Thread(
                    target=self._accept_more, args=(accept,), name="thinwire-accept", daemon=True
                )
                self._opening.start()

    def _accept_more(self, accept: Accept) -> None:
        """Let the other side open sockets until there are as many as at first."""
        while True:
            with self.lock:
                if not self.ends or self._ends_told or len(self.ends) >= self._wanted:
                    self._opening = None
                    return
                beside, end = self.ends[0].socket, time.monotonic() + OPENING_SECONDS
                place = next(n & 0xFFFF for n in self._next_place if n & 0xFFFF not in self.by_place)
            connection = None
            with contextlib.suppress(OSError):  # the one beside is lost just now
                connection = accept(beside, partial(self._say, _OPEN, place), partial(self._before, end))
            if connection is not None:
                self._add(place, connection)
            else:
                self._over.wait(max(0.0, end - time.monotonic()))

    def _before(self, end: float) -> bool:
        return time.monotonic() < end and not self._over.is_set()

    def _open(self, place: int, opens: Callable[[], socket.socket]) -> None:
        """Open a socket that the other side has asked for."""
        with contextlib.suppress(OSError, PairError):  # the other side will ask again
            self._add(place, opens())
        with self.lock:
            self._called.discard(place)

    def _add(self, place: int, connection: socket.socket) -> None:
        with self.lock:
            if not self.ends:  # all are lost, so it is over
                connection.close()
                return
            use_congestion_control(connection, congestion_control(self.ends[0].socket))
            end = self.by_place[place] = _End(self, place, connection, self._loop)
            self.ends.append(end)
            end.start()
        logger.info("thinwire: a socket to %s was opened in place of a lost one", self._peer)
        end.on_room()

    # --- ends ----------------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        with self.lock:
            self._adapt(now)
            waits_out = bool(self._waiting or self._first or any(end.unconfirmed for end in self.ends))
            still = max(
                now - self._moved_in if self._inbox.expects else 0.0,
                now - max(self._moved_in, self._moved_out) if waits_out else 0.0,
            )
            last = max((end.moved for end in self.ends), default=now)
            stuck = [e for e in self.ends if e.unconfirmed and last - e.moved > STUCK_SECONDS]
        for end in stuck:
            self.lost(end, f"it moved nothing for {STUCK_SECONDS:.0f} seconds")
        if still > self.timeout:
            self.fail(RuntimeError(f"timed out: {self._peer} moved no byte for {self.timeout:.0f} seconds"))

    def fail(self, error: RuntimeError) -> None:
        with self.lock:
            if self._error is not None:
                return
            self._error = error
            works = [work for *_, work in self._waiting] + self._inbox.empty()
            self._waiting.clear()
            self._first.clear()
            for end in self.ends:
                end.stop()
            self.ends.clear()
            self.by_place.clear()
        self._over.set()
        self._at_exit.cancel()
        for work in works:
            work.fail(error)

    def _flush(self, deadline: float) -> None:
        """Wait until the other side has confirmed everything, and knows what this one has."""
        while time.monotonic() < deadline:
            with self.lock:
                if not (self._waiting or self._first or any(end.busy for end in self.ends)):
                    return
            time.sleep(0.002)

    def close(self, linger: float = _LINGER_SECONDS) -> None:
        """Close the sockets, once what was sent has arrived or time is up; messages that still wait get an error."""
        if os.getpid() == self._process:  # else the sockets are a parent's
            deadline = time.monotonic() + linger
            self._flush(deadline)
            self._say(_BYE)
            self._flush(deadline)
        self.fail(RuntimeError(f"the connection to {self._peer} is closed"))


class _NoFrame(RuntimeError):
    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer} sent bytes that are no frame of a message")


class _End:
    """One socket of a bundle: what of a frame is left to send or to come, and the frames not confirmed yet."""

    def __init__(self, bundle: Bundle, place: int, connection: socket.socket, loop: SocketLoop) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (
            (_TCP_NOTSENT_LOWAT, _NOTSENT_BYTES),
            (_TCP_USER_TIMEOUT, int(1000 * min(bundle.timeout, 2e6))),
            (_TCP_KEEPIDLE, _KEEPALIVE_SECONDS),
            (_TCP_KEEPINTVL, _KEEPALIVE_SECONDS // 3),
        ):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket, self._bundle, self._loop = not_for_children(connection), bundle, loop
        self.number, self.place = connection.fileno(), place
        self.unconfirmed = deque[bytes]()
        self.sent = 0  # frames, without confirmations
        self.received = self.told = 0  # frames, and of how many the other side knows
        self.retransmitted = 0  # packets
        self.moved = time.monotonic()  # when something was confirmed, or could first have been
        self.stopped = self.blocked = False
        self._left = memoryview(b"")  # of what is being sent
        self._header = bytearray(_HEADER.size)
        self._into = memoryview(self._header)
        self._kind, self._frame = 0, (0, 0, 0, 0)  # of what comes after a header; kind 0: a header comes
        self._kept: bytearray | None = None
        self._wakes_at = 1
        self._decrypts = connection if isinstance(connection, CipherSocket) else None

    @property
    def busy(self) -> bool:
        """Whether the other side may not have, or not know, everything."""
        return bool(self.unconfirmed or self._left or self.told != self.received)

    def start(self) -> None:
        self._loop.add(self)
        self._loop.watch(self, select.EPOLLIN)

    def stop(self) -> Iterable[bytes]:
        """Close the socket. Return the frames that may not have arrived; the bundle's lock must be held."""
        if not self.stopped:
            self.stopped = True
            self._loop.remove(self)
            with contextlib.suppress(OSError):
                self.socket.close()
        frames, self.unconfirmed = self.unconfirmed, deque()
        self._left = memoryview(b"")
        return frames

    def on_room(self) -> None:
        """Send until the kernel takes no more, or there is nothing left."""
        ended: list[CountdownWork] = []
        error: OSError | None = None
        bundle = self._bundle
        with bundle.lock:
            try:
                while not self.stopped:
                    if not self._left:
                        if (frame := bundle.next_frame(self, ended)) is None:
                            self._wait_for_room(False)
                            break
                        self._left = memoryview(frame)
                    if len(self.unconfirmed) <= 1:
                        self.moved = time.monotonic()
                    self._left = self._left[self.socket.send(self._left) :]
                    bundle.moved(out=True)
            except BlockingIOError:
                self._wait_for_room(True)
            except OSError as caught:
                error = caught
        if error is not None:
            bundle.lost(self, error.strerror or str(error))
        for work in ended:
            work.part_ended()

    def _wait_for_room(self, blocked: bool) -> None:
        if blocked != self.blocked:
            self.blocked = blocked
            self._loop.watch(self, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    def on_data(self) -> None:
        """Receive what has come, at most some frames."""
        lost, wrong = "", None
        bundle, received = self._bundle, 0
        with bundle.lock:
            try:
                while not self.stopped and (received < _TURN_BYTES or (self._decrypts and self._decrypts.pending())):
                    count = self.socket.recv_into(self._into)
                    if not count:
                        raise ConnectionResetError(_CLOSED)
                    received += count
                    bundle.moved(out=False)
                    self._into = self._into[count:]
                    if not self._into:
                        self._take()
            except BlockingIOError:
                pass
            except OSError as caught:
                lost = caught.strerror or str(caught)
            except _NoFrame as caught:
                wrong = caught
            if not (self.stopped or lost or wrong):
                self._wake_at(1 if self._decrypts else min(len(self._into), FRAME_BYTES // 2))
        if wrong:
            bundle.fail(wrong)
        elif lost:
            bundle.lost(self, lost)
        elif self.received != self.told:
            bundle.confirm(self)
        bundle.after_data()

    def _take(self) -> None:
        """Take a whole header, or the last byte of a frame."""
        if not self._kind:
            self._kind, *frame = _HEADER.unpack(self._header)
            self._frame = frame[0], frame[1], frame[2], frame[3]
            self._into, self._kept = self._bundle.target(self._kind, self._frame)
        if not self._into:
            kind, self._kind, self._into = self._kind, 0, memoryview(self._header)
            self._bundle.arrived(self, kind, self._frame, self._kept)

    def leave(self, frame: _Frame) -> None:
        """Write no more into a message's memory: all of this frame came over another socket."""
        if self._kind == _DATA and self._frame == frame and self._kept is None:
            self._kept = bytearray(len(self._into))  # no longer its bytes, but they are not looked at
            self._into = memoryview(self._kept)

    def _wake_at(self, enough: int) -> None:
        if enough != self._wakes_at:
            self._wakes_at = enough
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def hung_up(self) -> None:
        self.on_data()
        self._bundle.lost(self, _CLOSED)

    def check(self, now: float) -> None:
        if self._wakes_at > 1 or self._decrypts:
            self.on_data()  # there may be fewer bytes than the kernel wakes for, or some that were read before
        if self._bundle.ends and self._bundle.ends[0] is self:
            self._bundle.check(now)

    def fail(self, error: Exception) -> None:
        self._bundle.fail(RuntimeError(f"{type(error).__name__}: {error}"))
