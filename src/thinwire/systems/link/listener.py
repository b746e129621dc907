"""The listening side of a connection."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from thinwire.systems.link.door import HELLO_SECONDS, Door
from thinwire.systems.link.duplex import Duplex
from thinwire.systems.link.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import FRAMES, NOTES, Badge, Knock, admit, hear, refuse
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.secret import Trust, check_host

NOTES_SIZE = struct.Struct("<I")
_LINES_SECONDS = 1.0
MOST_NUMBERS = 64  # of one certificate name

logger = logging.getLogger("thinwire")

Came = Callable[[Pair, bytes], None]
"""Called with a new pair and its first frame."""


@dataclass(eq=False)
class _Half:
    """A pair whose connection for frames is there, but not yet the one for tensors."""

    badge: Badge
    duplex: Duplex
    first: bytes


class Listener:
    """Accepts callers with a certificate of its authority, or with its secret; :class:`Door` handles the others.

    With certificates, a number in a role belongs to the name that first came with it.

    Args:
        port: 0 chooses a free one.
        host: the address to listen at.
        notes: what :class:`Meeting` reads on the other side.
        roles: which may connect.
        trust: this side's credentials, or the secret of all processes of this training; None: everybody who reaches the
            port may connect.
        insecure: allow None even at an address that others can reach.
        seconds: for a whole hello.

    Raises:
        PairError: the port is taken.
        ValueError: the port is not valid, or strangers could connect.
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
        self._roles, self._trust = roles, trust
        self._notes = dict(notes or {})
        self._came: Came | None = None
        self._hello_bytes = 0
        self._halves: dict[bytes, _Half] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._said, self._unsaid = 0.0, 0
        self._door = Door(port, host, self._meet, seconds)
        self.port = self._door.port
        self._door.open()

    def note(self, key: str, value: str) -> None:
        """Set a note, replacing an earlier one with the same key."""
        with self._changed:
            self._notes[key] = value

    def serve(self, came: Came, hello_bytes: int) -> None:
        """Accept all callers, those that wait already and those to come, each in its own thread.

        Args:
            came: called with each pair and its first frame; if it raises ``ValueError`` or ``RuntimeError``, the pair
                is closed.
            hello_bytes: size of that frame.
        """
        with self._changed:
            self._came, self._hello_bytes = came, hello_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Accept nobody any more, and give the port back."""
        self._door.close()
        with self._changed:
            self._changed.notify_all()

    # --- threads --------------------------------------------------------------------------------------------------

    def _meet(self, duplex: Duplex, end: float) -> None:
        try:
            heard = hear(duplex, self._roles, self._trust, end)
            if not self._is_its_own(heard.badge):
                refuse(duplex, end)
            if self._trust is not None:
                self._door.forget(duplex)
            if heard.channel == NOTES:
                admit(duplex, heard, self._trust, end)
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
            logger.debug("%s was not let in: %s", duplex.host, error)
            duplex.close()

    def _is_its_own(self, badge: Badge) -> bool:
        """Return whether a certificate's name owns its number; the first name that uses a number owns it."""
        if badge.shown is None:
            return True
        place, name = (badge.role, badge.number), badge.shown.name
        with self._changed:
            if place not in self._owners and sum(owner == name for owner in self._owners.values()) >= MOST_NUMBERS:
                return False
            return self._owners.setdefault(place, name) == name

    def _hold(self, duplex: Duplex, heard: Knock, end: float) -> None:
        """Read the first frame, and keep the connection until the one for tensors comes."""
        with self._changed:
            self._wait(lambda: self._came is not None, end)
        admit(duplex, heard, self._trust, end)
        half = _Half(heard.badge, duplex, duplex.read(self._hello_bytes, end))
        with self._changed:
            if heard.token in self._halves:
                raise PairError("this pair already exists")
            self._halves[heard.token] = half
            self._changed.notify_all()
            try:
                self._wait(lambda: self._halves.get(heard.token) is not half, end)
            except PairError:
                if self._halves.get(heard.token) is half:
                    del self._halves[heard.token]
                    raise

    def _join(self, duplex: Duplex, heard: Knock, end: float) -> None:
        """Handle the second connection of a pair, which is then complete."""
        with self._changed:
            self._wait(lambda: heard.token in self._halves, end)
            half = self._halves[heard.token]
            if half.badge != heard.badge:
                raise NotAdmitted("it asks for the tensors of another process")
            admit(duplex, heard, self._trust, end)
            del self._halves[heard.token]
            for ours in (duplex, half.duplex):
                self._door.forget(ours)
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
        """Wait until ``ready()``; the lock is held."""
        self._changed.wait_for(lambda: self._door.closed or ready(), max(0.0, end - time.monotonic()))
        if self._door.closed or not ready():
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
