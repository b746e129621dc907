"""The side that others come to."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.link.duplex import Duplex
from thinwire.link.errors import NotAdmitted, PairError
from thinwire.link.hello import FRAMES, NOTES, Badge, Knock, admit, hear
from thinwire.link.pair import Pair
from thinwire.link.secret import check_host

HELLO_SECONDS = 10.0
MOST_UNKNOWN = 128
NOTES_SIZE = struct.Struct("<I")
_LINES_SECONDS = 1.0

logger = logging.getLogger("thinwire")

Came = Callable[[Pair, bytes], None]
"""Gets who has come in, and its first frame."""


@dataclass(eq=False)
class _Half:
    """A pair whose frames have come and whose tensors have not."""

    badge: Badge
    duplex: Duplex
    first: bytes


class Listener:
    """Lets in who knows the secret. Hellos are heard side by side, each within one time limit; of more than
    ``MOST_UNKNOWN`` who have not ended theirs, the one that has been there longest goes.

    Args:
        port: 0 takes a free one.
        host: the address to listen at.
        notes: what :class:`Meeting` reads on the other side.
        roles: who may come.
        secret: of all processes of this training; None: whoever can reach the port comes in.
        insecure: there may be no secret at an address that others can reach.
        seconds: for a whole hello.

    Raises:
        PairError: the port is taken.
        ValueError: there is no such port, or nothing would keep strangers out.
    """

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        notes: dict[str, str] | None = None,
        *,
        roles: Collection[str],
        secret: bytes | None = None,
        insecure: bool = False,
        seconds: float = HELLO_SECONDS,
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"port={port!r} must be a whole number from 0 to 65535")
        check_host(host, secret, insecure)
        self._roles, self._secret, self._seconds = roles, secret, seconds
        self._notes = dict(notes or {})
        self._came: Came | None = None
        self._hello_bytes = 0
        self._unknown: dict[Duplex, None] = {}  # the longest there first
        self._halves: dict[bytes, _Half] = {}
        self._changed = threading.Condition()
        self._said, self._unsaid = 0.0, 0
        try:
            self._server: socket.socket | None = socket.create_server((host, port), backlog=MOST_UNKNOWN)
        except OSError as error:
            advice = "choose another or end its user" if port else "is that an address of this machine?"
            raise PairError(f"port {port} of {host} cannot be used ({error.strerror}): {advice}") from error
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._server,), name="thinwire-accept", daemon=True).start()

    def note(self, key: str, value: str) -> None:
        """Put a note there, or another in its place."""
        with self._changed:
            self._notes[key] = value

    def serve(self, came: Came, hello_bytes: int) -> None:
        """Take in, in threads of their own, all who have come and will come; before this they wait.

        Args:
            came: gets each pair with its first frame; a ``ValueError`` or ``RuntimeError`` sends it away.
            hello_bytes: of that frame.
        """
        with self._changed:
            self._came, self._hello_bytes = came, hello_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Take in nobody any more, and give the port back."""
        with self._changed:
            server, self._server = self._server, None
            unknown = list(self._unknown)
            self._changed.notify_all()
        if server is None:
            return
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        for duplex in unknown:
            duplex.close()

    # --- threads --------------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        while self._server is server:
            try:
                connection, _ = server.accept()
                duplex = Duplex(connection)
            except OSError:  # closed, or the process has no more descriptors
                time.sleep(0.01)
                continue
            with self._changed:
                if self._server is not server:
                    duplex.close()
                    return
                oldest = next(iter(self._unknown)) if len(self._unknown) >= MOST_UNKNOWN else None
                if oldest is not None:
                    del self._unknown[oldest]
                self._unknown[duplex] = None
            if oldest is not None:
                oldest.close()
            threading.Thread(target=self._meet, args=(duplex,), name="thinwire-hello", daemon=True).start()

    def _meet(self, duplex: Duplex) -> None:
        end = time.monotonic() + self._seconds
        try:
            heard = hear(duplex, self._roles, self._secret, end)
            if self._secret is not None:
                self._forget(duplex)
            if heard.channel == NOTES:
                admit(duplex, heard, self._secret, end)
                with self._changed:
                    notes = json.dumps(self._notes).encode()
                duplex.write(NOTES_SIZE.pack(len(notes)) + notes, end)
                duplex.close()
            elif heard.channel == FRAMES:
                self._hold(duplex, heard, end)
            else:
                self._join(duplex, heard, end)
        except NotAdmitted as error:
            self._say(f"turned away {duplex.host}: {error}")
            duplex.close()
        except (PairError, ValueError, RuntimeError) as error:
            logger.debug("%s did not come in: %s", duplex.host, error)
            duplex.close()
        finally:
            self._forget(duplex)

    def _forget(self, duplex: Duplex) -> None:
        with self._changed:
            self._unknown.pop(duplex, None)

    def _hold(self, duplex: Duplex, heard: Knock, end: float) -> None:
        """Read the first frame, and keep the connection until its tensors' comes."""
        with self._changed:
            self._wait(lambda: self._came is not None, end)
        admit(duplex, heard, self._secret, end)
        half = _Half(heard.badge, duplex, duplex.read(self._hello_bytes, end))
        with self._changed:
            if heard.token in self._halves:
                raise PairError("this pair is there already")
            self._halves[heard.token] = half
            self._changed.notify_all()
            try:
                self._wait(lambda: self._halves.get(heard.token) is not half, end)
            except PairError:
                if self._halves.get(heard.token) is half:
                    del self._halves[heard.token]
                    raise

    def _join(self, duplex: Duplex, heard: Knock, end: float) -> None:
        """The second connection of a pair, which is whole now."""
        with self._changed:
            self._wait(lambda: heard.token in self._halves, end)
            half = self._halves[heard.token]
            if half.badge != heard.badge:
                raise NotAdmitted("it wants the tensors of another")
            admit(duplex, heard, self._secret, end)
            del self._halves[heard.token]
            for ours in (duplex, half.duplex):
                self._unknown.pop(ours, None)
            self._changed.notify_all()
            came = self._came
        assert came is not None
        pair = Pair(half.duplex, duplex, half.badge)
        try:
            came(pair, half.first)
        except (ValueError, RuntimeError) as error:
            pair.close()
            self._say(f"turned away {duplex.host}: {error}")

    def _wait(self, ready: Callable[[], bool], end: float) -> None:
        """Until then; the lock is held."""
        self._changed.wait_for(lambda: self._server is None or ready(), max(0.0, end - time.monotonic()))
        if self._server is None or not ready():
            raise PairError("it took too long, or this side has closed")

    def _say(self, words: str) -> None:
        """A line in the log; of many in a moment, the first and how many."""
        with self._changed:
            now = time.monotonic()
            if now - self._said < _LINES_SECONDS:
                self._unsaid += 1
                return
            self._said, others, self._unsaid = now, self._unsaid, 0
        logger.warning("%s%s", words, f" (and {others} more before it)" if others else "")
