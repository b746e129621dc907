"""Several sockets between two ranks that carry streams of messages together, for wires that are long or lose packets.

After a loss one TCP connection halves its rate, and on a long wire it takes seconds to win it back; after idling it
starts slowly. So messages are cut into frames, and the next frame goes to whichever socket has room. The receiver puts
a frame where its header says, straight into the message's place, or keeps it until that place is posted. All meshes
over the same ranks share the sockets: each has streams of its own, which are opened without a word.

Each side tells how many frames of a socket it has. What is not confirmed is kept, and sent again by other sockets if
this one is lost: a step does not fail unless all are lost. Confirmations have a socket of their own, the first, so that
a process that ends with some unread resets only that one, not those that still carry its data.

The sockets were opened by ranks that showed the token of this job; a frame that cannot be right ends the bundle, and so
the step, with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.core.collectives.streams import CountdownWork, SocketLoop, memory_of
from thinwire.core.sockets import not_for_children

logger = logging.getLogger(__name__)

FRAME_BYTES = 32 << 10
_HEADER = struct.Struct("<BHIQI")
"""Kind, stream, message, offset, bytes; of a confirmation only its kind, the socket and how many frames."""
_DATA, _CONFIRMED = 1, 2
_AHEAD = 1 << 16  # messages that one side may send before the other has posted their places
_TURN_BYTES = 8 * FRAME_BYTES  # received from a socket before others have their turn
_NOTSENT_BYTES = FRAME_BYTES // 2  # that wait in a socket: what waits here can still go to another one
_LINGER_SECONDS = 5.0
_CLOSED = "the other side has closed it"
_TCP_NOTSENT_LOWAT = 25
_TCP_KEEPIDLE, _TCP_KEEPINTVL, _TCP_USER_TIMEOUT = 4, 5, 18
STUCK_SECONDS = 10.0  # in which a socket that has something to send moved nothing, while others did: its path is dead
_KEEPALIVE_SECONDS = 30  # less than after which a router forgets a connection

LONG_SECONDS = 0.004
"""Of a round trip, from which on one socket is not enough."""
SOCKETS, WITH_BBR, MOST_SOCKETS = 8, 2, 16
"""To each rank on a long wire, beside the one for confirmations; BBR, which no loss slows down, needs no more."""
_TCP_CONGESTION, _TCP_INFO = 13, 11
_ROUND_TRIP = struct.Struct("=68xI")  # in Linux' tcp_info, in microseconds

_Frame = tuple[int, int, int, int]
"""Of a stream's message: the bytes from an offset on."""


def round_trip(connection: socket.socket) -> float:
    """Return the seconds that the kernel has measured; 0: it does not say."""
    with contextlib.suppress(OSError, struct.error):
        return 1e-6 * int(_ROUND_TRIP.unpack(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _ROUND_TRIP.size))[0])
    return 0.0


def use_bbr(connection: socket.socket) -> bool:
    """Ask for BBR, which an ordinary user may where the system allows it; return whether it runs."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, b"bbr")
        return True
    return False


@dataclass(eq=False)
class _Place:
    """A posted message: where it goes, and which of its frames have come."""

    memory: memoryview
    work: CountdownWork
    left: int
    came: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Incoming:
    """What one stream receives. ``early``: frames by message and offset whose place is not posted yet."""

    posted: int = 0
    ended: int = 0
    places: dict[int, _Place] = field(default_factory=dict)
    early: dict[int, dict[int, bytearray]] = field(default_factory=dict)


class BundleStream:
    """One order of messages over a bundle; as a :class:`~thinwire.core.collectives.streams.Stream` to its users."""

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

    After ``timeout`` seconds without a byte, whatever waits fails; errors name the ``peer``.
    """

    def __init__(self, sockets: Sequence[socket.socket], peer: str, timeout: float, loop: SocketLoop) -> None:
        self._peer, self.timeout, self._process = peer, timeout, os.getpid()
        self._lock = threading.RLock()
        self._error: RuntimeError | None = None
        self._sent: list[int] = []  # messages, by stream
        self._incoming: dict[int, _Incoming] = {}
        self._waiting = deque[tuple[int, int, memoryview, int, CountdownWork]]()  # to send, from an offset on
        self._returned = deque[bytes]()  # frames of a lost socket
        self._whole = deque[CountdownWork]()  # of messages, in the order of their streams, whose users are told next
        self._telling = False
        self._moved_in = self._moved_out = time.monotonic()
        self._back, *ends = self.all_ends = [
            _End(self, place, connection, loop) for place, connection in enumerate(sockets)
        ]
        self.ends = ends  # those that carry messages, and are not lost
        for end in self.all_ends:
            end.start()

    def stream(self) -> BundleStream:
        """Return a new stream. Both sides open theirs in the same order."""
        with self._lock:
            self._sent.append(0)
            return BundleStream(self, len(self._sent) - 1)

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, stream: int, memory: memoryview, work: CountdownWork) -> None:
        if not memory:
            work.part_ended()
            return
        with self._lock:
            if (error := self._error) is None:
                if not self._waiting:
                    self._moved_out = time.monotonic()
                self._waiting.append((stream, self._sent[stream], memory, 0, work))
                self._sent[stream] += 1
        if error is not None:
            work.fail(error)
            return
        for end in list(self.ends):
            end.on_room()

    def next_frame(self, end: _End, ended: list[CountdownWork]) -> bytes | None:
        """Return what a socket sends next; the lock must be held.

        It is copied, so that the message's memory is free, and kept until it is confirmed.
        """
        if end is not self._back:
            frame = self._next_of_message(ended)
            if frame is not None and not self._back.stopped:
                end.unconfirmed.append(frame)
            return frame
        for one in self.all_ends:
            if one.received:
                frame = _HEADER.pack(_CONFIRMED, one.place, one.received, 0, 0)
                one.received = 0
                return frame
        return None

    def confirm(self) -> None:
        self._back.on_room()

    def confirmed(self, place: int, count: int) -> None:
        """Forget frames that have arrived; the lock must be held."""
        if not 0 < place < len(self.all_ends):
            raise _NoFrame(self._peer)
        end = self.all_ends[place]
        if count > len(end.unconfirmed) and not end.stopped:
            raise _NoFrame(self._peer)
        end.moved = time.monotonic()
        for _ in range(min(count, len(end.unconfirmed))):
            end.unconfirmed.popleft()

    def _next_of_message(self, ended: list[CountdownWork]) -> bytes | None:
        if self._returned:
            return self._returned.popleft()
        if not self._waiting:
            return None
        stream, message, memory, offset, work = self._waiting[0]
        piece = memory[offset : offset + FRAME_BYTES]
        if offset + len(piece) < len(memory):
            self._waiting[0] = stream, message, memory, offset + len(piece), work
        else:
            self._waiting.popleft()
            ended.append(work)
        return b"".join((_HEADER.pack(_DATA, stream, message, offset, len(piece)), piece))

    # --- receiving -----------------------------------------------------------------------------------------------

    def receive(self, stream: int, memory: memoryview, work: CountdownWork) -> None:
        if not memory:
            work.part_ended()
            return
        wrong = None
        with self._lock:
            if (error := self._error) is None:
                if not self._expects:
                    self._moved_in = time.monotonic()
                incoming = self._incoming.setdefault(stream, _Incoming())
                number, incoming.posted = incoming.posted, incoming.posted + 1
                incoming.places[number] = _Place(memory, work, len(memory))
                try:
                    for offset, piece in incoming.early.pop(number, {}).items():
                        self.arrived((stream, number, offset, len(piece)), piece)
                except _NoFrame as caught:
                    wrong = caught
        if error is not None:
            work.fail(error)
        elif wrong is not None:
            self.fail(wrong)
        else:
            self.tell()

    def target(self, frame: _Frame) -> tuple[memoryview, bytearray | None]:
        """Return where a frame's bytes go: into its message, or for now into a buffer; the lock must be held."""
        stream, message, offset, size = frame
        incoming = self._incoming.setdefault(stream, _Incoming())
        if not 0 < size <= FRAME_BYTES or offset % FRAME_BYTES or message >= incoming.posted + _AHEAD:
            raise _NoFrame(self._peer)
        place = incoming.places.get(message)
        if place is not None and offset not in place.came:
            return self._room(place, offset, size), None
        kept = bytearray(size)  # its place is not posted yet; or it came before, over a socket that was lost
        return memoryview(kept), kept

    def arrived(self, frame: _Frame, kept: bytearray | None) -> None:
        """Count a frame; ``kept``: its bytes, if they are not in place. The lock must be held."""
        stream, message, offset, size = frame
        incoming = self._incoming[stream]
        place = incoming.places.get(message)
        if place is None or offset in place.came:
            if message >= incoming.posted and kept is not None:
                incoming.early.setdefault(message, {})[offset] = kept
            return
        if kept is not None:
            self._room(place, offset, size)[:] = kept
        for end in self.ends:
            end.leave(frame)
        place.came.add(offset)
        place.left -= size
        while (first := incoming.places.get(incoming.ended)) is not None and not first.left:
            self._whole.append(incoming.places.pop(incoming.ended).work)
            incoming.ended += 1

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

    def _room(self, place: _Place, offset: int, size: int) -> memoryview:
        """Return a frame's part of a message, or raise ``_NoFrame``: the message has no such part."""
        if size != min(FRAME_BYTES, len(place.memory) - offset):
            raise _NoFrame(self._peer)
        return place.memory[offset : offset + size]

    @property
    def _expects(self) -> bool:
        return any(one.places for one in self._incoming.values())

    def moved(self, *, out: bool) -> None:
        if out:
            self._moved_out = time.monotonic()
        else:
            self._moved_in = time.monotonic()

    # --- ends ----------------------------------------------------------------------------------------------------

    def lost(self, end: _End, why: str) -> None:
        """Let the other sockets send what a lost one had not delivered; without any, all fails."""
        with self._lock:
            if end.stopped:
                return
            if end is self._back:
                for one in self.all_ends:
                    one.unconfirmed.clear()  # nothing will be confirmed
            self._returned.extend(end.stop())
            if end in self.ends:
                self.ends.remove(end)
            others = list(self.ends)
        if not others:
            self.fail(RuntimeError(f"the connection to {self._peer} was lost: {why}"))
            return
        log = logger.info if why == _CLOSED else logger.warning
        log("thinwire: a socket to %s was lost (%s); %d others carry on", self._peer, why, len(others))
        for other in others:
            other.on_room()

    def check(self, now: float) -> None:
        with self._lock:
            waits_out = bool(self._waiting or self._returned or any(end.unconfirmed for end in self.ends))
            still = max(
                now - self._moved_in if self._expects else 0.0,
                now - max(self._moved_in, self._moved_out) if waits_out else 0.0,
            )
            last = max((end.moved for end in self.ends), default=now)
            stuck = [e for e in self.ends if e.unconfirmed and last - e.moved > STUCK_SECONDS]
        for end in stuck:
            self.lost(end, f"it moved nothing for {STUCK_SECONDS:.0f} seconds")
        if still > self.timeout:
            self.fail(RuntimeError(f"timed out: {self._peer} moved no byte for {self.timeout:.0f} seconds"))

    def fail(self, error: RuntimeError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            works = [work for *_, work in self._waiting]
            works += [place.work for one in self._incoming.values() for place in one.places.values()]
            works += self._whole
            self._whole.clear()
            self._waiting.clear()
            self._returned.clear()
            self._incoming.clear()
            for end in self.all_ends:
                end.stop()
            self.ends.clear()
        for work in works:
            work.fail(error)

    def flush(self, seconds: float = _LINGER_SECONDS) -> None:
        """Wait until the other side has confirmed everything: closing before could take back what is on its way."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if not (self._waiting or self._returned or any(end.unconfirmed or end.left for end in self.ends)):
                    return
            time.sleep(0.002)

    def close(self) -> None:
        """Close the sockets, once what was sent has arrived; messages that still wait get an error."""
        if os.getpid() == self._process:  # else the sockets are a parent's
            self.flush()
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
        self.left = memoryview(b"")  # of what is being sent
        self.moved = time.monotonic()  # when something was confirmed, or could first have been
        self.stopped = self._blocked = False
        self._header = bytearray(_HEADER.size)
        self._frame: _Frame | None = None
        self._kept: bytearray | None = None
        self._into = memoryview(self._header)
        self.received = 0  # frames not confirmed to the other side yet
        self._wakes_at = 1

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
        self.left = memoryview(b"")
        return frames

    def on_room(self) -> None:
        """Send until the kernel takes no more, or there is nothing left."""
        ended: list[CountdownWork] = []
        error: OSError | None = None
        bundle = self._bundle
        with bundle._lock:
            try:
                while not self.stopped:
                    if not self.left:
                        if (frame := bundle.next_frame(self, ended)) is None:
                            self._wait_for_room(False)
                            break
                        self.left = memoryview(frame)
                    if len(self.unconfirmed) <= 1:
                        self.moved = time.monotonic()
                    self.left = self.left[self.socket.send(self.left) :]
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
        if blocked != self._blocked:
            self._blocked = blocked
            self._loop.watch(self, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    def on_data(self) -> None:
        """Receive what has come, at most some frames."""
        lost, wrong = "", None
        bundle, received = self._bundle, 0
        with bundle._lock:
            try:
                while not self.stopped and received < _TURN_BYTES:
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
                self._wake_at(min(len(self._into), FRAME_BYTES // 2))
        if wrong:
            bundle.fail(wrong)
        elif lost:
            bundle.lost(self, lost)
        elif self.received:
            bundle.confirm()
        bundle.tell()

    def _take(self) -> None:
        """Take a whole header, or the last byte of a frame."""
        bundle = self._bundle
        if (frame := self._frame) is not None:
            self.received += 1
            self._frame, self._into = None, memoryview(self._header)
            bundle.arrived(frame, self._kept)
            return
        kind, stream, message, offset, size = _HEADER.unpack(self._header)
        if kind == _DATA and self.place:
            self._frame = frame = stream, message, offset, size
            self._into, self._kept = bundle.target(frame)
        elif kind == _CONFIRMED and not self.place:
            bundle.confirmed(stream, message)
            self._into = memoryview(self._header)
        else:
            raise _NoFrame(bundle._peer)

    def leave(self, frame: _Frame) -> None:
        """Write no more into a message's memory: all of this frame came over another socket."""
        if self._frame == frame and self._kept is None:
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
        if self._wakes_at > 1:
            self.on_data()  # there may be fewer bytes than the kernel wakes for
        if self._bundle.ends and self._bundle.ends[0] is self:
            self._bundle.check(now)

    def fail(self, error: Exception) -> None:
        self._bundle.fail(RuntimeError(f"{type(error).__name__}: {error}"))
