"""A port that strangers reach: who is met there, for how long, and who may come in by a token.

Every connection between two of our processes begins here, at one side: those of ranks (``collectives``), and those of a
parameter server, its nodes and shards, and of split training (``systems.link``).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from thinwire.core.duplex import Duplex
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.sockets import TOKEN_BYTES, not_for_children
from thinwire.core.tcp_info import ask_for_control

HELLO_SECONDS = 10.0
MOST_UNKNOWN = 128
_LOOK_SECONDS = 0.25

Ask = Callable[[int, bytes], None]
"""Tells the other side to open a socket at a port, and the token of ``TOKEN_BYTES`` that it is to show there."""


class ListeningPort:
    """Lets ``hear`` meet each connection in a thread, until a point in time; of over ``most`` unknown, the oldest goes.

    ``hear`` ends with ``PairError`` if it does not want the connection, and returns True if it stays unknown until
    ``forget``. ``server``: listens already, and is owned.
    """

    def __init__(
        self,
        server: socket.socket,
        hear: Callable[[Duplex, float], bool | None],
        seconds: float = HELLO_SECONDS,
        most: int = MOST_UNKNOWN,
    ) -> None:
        with socket.socket() as probe:
            ask_for_control([probe])  # refuse now what no connection could use
        self._hear, self._seconds, self._most = hear, seconds, most
        self._unknown: dict[Duplex, None] = {}  # the oldest first
        self._lock = threading.Lock()
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
        stays = None
        try:
            stays = self._hear(duplex, time.monotonic() + self._seconds)
        except PairError as error:
            duplex.close(str(error))
        finally:
            if not stays:
                self.forget(duplex)


@dataclass(eq=False)
class Invitation:
    """A connection that somebody was asked for. ``came``: once it is there; ``over``: nobody waits for it any more."""

    token: bytes
    who: Any
    going: Callable[[], bool]
    came: Any = None
    over: bool = False


class Invitations:
    """The connections that others were asked for. Each shows its token once, as the one who was asked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[Invitation] = []

    def add(self, token: bytes, who: Any = None, going: Callable[[], bool] = lambda: True) -> Invitation:
        """Expect a connection as long as ``going`` says."""
        made = Invitation(token, who, going)
        with self._changed:
            self._open.append(made)
            self._changed.notify_all()
        return made

    def take(self, shown: bytes, who: Any = None, end: float = 0.0) -> Invitation:
        """Return the invitation of a caller, which nobody else can use then; wait for it until ``end``.

        Raises:
            NotAdmitted: it has none.
        """
        with self._changed:
            while (found := self._find(shown, who)) is None:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise NotAdmitted("nobody has asked it for this connection")
            self._open.remove(found)
        return found

    def _find(self, shown: bytes, who: Any) -> Invitation | None:
        known = (one for one in self._open if secrets.compare_digest(shown, one.token))
        return next((one for one in known if one.who == who and one.going()), None)

    def fill(self, taken: Invitation, came: Any) -> None:
        with self._changed:
            if taken.over:
                came.close()
                return
            taken.came = came
            self._changed.notify_all()

    def wait(self, for_: Collection[Invitation], going: Callable[[], bool]) -> bool:
        """Wait for connections as long as ``going`` says; return whether all have come. Close those of some."""
        with self._changed:
            while going() and any(one.came is None for one in for_):
                self._changed.wait(_LOOK_SECONDS)
            self._open = [one for one in self._open if one not in for_]
            if all(one.came is not None for one in for_):
                return True
            for one in for_:
                one.over = True
                if one.came is not None:
                    one.came.close()
        return False

    def ask(self, port: int, who: Any, ask: Ask, going: Callable[[], bool]) -> Any:
        """Ask somebody for one more connection, to a port, and return it; None: it does not come."""
        wanted = self.add(secrets.token_bytes(TOKEN_BYTES), who, going)
        ask(port, wanted.token)
        return wanted.came if self.wait([wanted], going) else None
