"""The calling side of a connection."""

from __future__ import annotations

import json
import secrets
import time

from thinwire.systems.link.door import HELLO_SECONDS
from thinwire.systems.link.duplex import Duplex, dial
from thinwire.systems.link.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import FRAMES, NOTES, TENSORS, TOKEN_BYTES, Badge, knock
from thinwire.systems.link.listener import NOTES_SIZE
from thinwire.systems.link.pair import Pair

_MOST_NOTES = 1 << 24


class Meeting:
    """A listener's address, and its notes when last read.

    Args:
        address: ``host:port``.
        badge: of this process.
        seconds: the time each connection may take.
        source: the address of this machine to connect from, if it has several; None: the system chooses.

    Attributes:
        found_at: the IP address that the connection reached.

    Raises:
        NotAdmitted: it does not let this process in.
        PairError: nobody listens there now.
        ValueError: the address is not valid.
    """

    def __init__(self, address: str, badge: Badge, seconds: float = HELLO_SECONDS, source: str | None = None) -> None:
        self._host, self._port = split_address(address)
        self._badge, self._seconds, self._source = badge, seconds, source
        self._notes: dict[str, str] = {}
        self.found_at = ""
        self.look()

    def look(self) -> None:
        """Read the notes again."""
        end = time.monotonic() + self._seconds
        try:
            duplex = _call(self._host, self._port, self._badge, NOTES, bytes(TOKEN_BYTES), end, self._source)
        except NotAdmitted:
            raise
        except (OSError, PairError) as error:
            raise PairError(f"nobody listens at {self._host}:{self._port} ({error})") from error
        try:
            (size,) = NOTES_SIZE.unpack(duplex.read(NOTES_SIZE.size, end))
            if size > _MOST_NOTES:
                raise PairError(f"{self._host} has notes of {size} bytes: is it a thinwire server?")
            notes = json.loads(duplex.read(size, end))
            if not isinstance(notes, dict):
                raise PairError(f"{self._host} has no notes: is it a thinwire server?")
            self._notes, self.found_at = notes, duplex.host
        except (RecursionError, ValueError) as error:
            raise PairError(f"{self._host} has no notes: is it a thinwire server?") from error
        finally:
            duplex.close()

    def note(self, key: str) -> str:
        """Return the listener's note for ``key``."""
        if not isinstance(found := self._notes.get(key), str):
            raise PairError(f"{self._host} does not give its {key}: is it a thinwire server?")
        return found

    def connect(self, hello: bytes) -> Pair:
        """Connect, with ``hello`` as the first frame."""
        return connect(self._host, self._port, hello, self._badge, self._seconds, self._source)


def connect(
    host: str, port: int, hello: bytes, badge: Badge, seconds: float = HELLO_SECONDS, source: str | None = None
) -> Pair:
    """Connect to a listener, with ``hello`` as the first frame.

    Raises:
        NotAdmitted: the listener does not let this process in.
        PairError: nobody listens, or the listener does not accept the connection.
    """
    end = time.monotonic() + seconds
    token = secrets.token_bytes(TOKEN_BYTES)
    opened: list[Duplex] = []
    try:
        opened.append(_call(host, port, badge, FRAMES, token, end, source))
        opened[0].write(hello, end)
        opened.append(_call(host, port, badge, TENSORS, token, end, source))
    except (OSError, PairError) as error:
        for duplex in opened:
            duplex.close()
        if isinstance(error, NotAdmitted):
            raise
        raise PairError(f"{host} did not let this process in ({error})") from error
    return Pair(opened[0], opened[1], Badge("listener", 0))


def _call(
    host: str, port: int, badge: Badge, channel: int, token: bytes, end: float, source: str | None = None
) -> Duplex:
    own = None if source is None else (source, 0)
    duplex = dial(host, port, max(0.001, end - time.monotonic()), own)
    try:
        knock(duplex, badge, channel, token, end, host)
    except PairError:
        duplex.close()
        raise
    return duplex


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` into its two values.

    Raises:
        ValueError: the text has another form.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"address {address!r} is not a host:port, such as 10.0.0.1:29400")
    return host, int(port)
