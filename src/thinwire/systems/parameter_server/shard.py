"""A shard process: a slice of the weights with its optimizer, its connections to the leaders and its checkpoints."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.systems.link.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import Badge
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.meeting import Meeting, split_address
from thinwire.systems.link.pair import Pair
from thinwire.systems.link.secret import find_trust, is_loopback
from thinwire.systems.link.tls import Credentials
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server.connection import Connection
from thinwire.systems.parameter_server.layout import Layout
from thinwire.systems.parameter_server.line import shard_count
from thinwire.systems.parameter_server.messages import FRAME, PROTOCOL, Ping, Refused, Stop, decode, encode
from thinwire.systems.parameter_server.outer import Outer, default_outer, fingerprint
from thinwire.systems.parameter_server.packing import most_bytes
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.shard_messages import NO_INDEX, SHARD_REASONS, SHARD_TAKEN, Enlist, Ticket
from thinwire.systems.parameter_server.slice_keeper import SliceKeeper
from thinwire.systems.parameter_server.visitors import Visitors
from thinwire.systems.parameter_server.worker import ServerLost

_FIRST_SECONDS = 60.0


class ShardRefused(RuntimeError):
    """The server refuses this shard."""


class Shard:
    """Holds slice ``index`` of a served model's weights. It decides nothing: the server says what to add and when.

    If the server dies, a shard waits for the next server at the same address, as nodes do.

    Args:
        server: ``host:port`` of the server, which was started with ``shards``.
        index: number of the slice, from 0.
        outer: makes the optimizer, as the server's; by default that of the settings. It must treat each element
            separately, as SGD and Adam do: a shard cannot compute norms over all weights.
        read_outer: makes ``outer``, if that is not given, from the text that the server publishes (``outer_text``).
        checkpoint_dir: for checkpoints; needed if the server has one.
        port: where leaders find this shard; 0 chooses a free one.
        host: the address to listen at; one that other machines reach needs keys, a secret, or ``insecure``. Connections
            to the server also start from it, because leaders are sent to the address from which the shard connected.
        secret: the server's; by default that of ``THINWIRE_SECRET_FILE``.
        keys: directory of this shard's identity, if the server uses keys.
        insecure: let in everybody who reaches the port.
        leases: give up after that many leases without a server.

    Raises:
        ValueError: the address or the directory is invalid.
    """

    def __init__(
        self,
        server: str,
        index: int,
        *,
        outer: Outer | None = None,
        read_outer: Callable[[str], Outer | None] | None = None,
        checkpoint_dir: str | Path | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        secret: str | bytes | None = None,
        keys: str | Path | Credentials | None = None,
        insecure: bool = False,
        leases: float = 6.0,
    ) -> None:
        there, _ = split_address(server)
        if checkpoint_dir is not None:
            checkpoints.prepare(checkpoint_dir)
        self.server, self.index, self._host = server, index, host
        self._outer, self._read_outer, self._directory, self._leases = outer, read_outer, checkpoint_dir, leases
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._line: Connection | None = None
        self._taken_at: float | None = None
        self.keeper: SliceKeeper | None = None
        self.visitors = Visitors(lambda what, who, value: self._inbox.put((what, who, value)))
        self._over = threading.Event()
        self._badge = Badge("shard", index, find_trust(secret, keys))
        anywhere = host in ("", "0.0.0.0", "::") or (is_loopback(host) and not is_loopback(there))
        self._source = None if anywhere else host
        self._listener = Listener(port, host, roles=("node",), trust=self._badge.trust, insecure=insecure)
        self._listener.serve(self._came, FRAME.size)

    def run(self) -> int:
        """Serve until the end of the training. Return the version of the final weights.

        If ``close`` is called meanwhile, from any thread, return the version that this shard holds; -1: it has none.

        Raises:
            ServerLost: the server has gone and did not come back.
            ShardRefused: the server refuses this shard.
            ValueError: the server has no such shard, its nodes could not reach this one, or the checkpoint to continue
                from is missing.
        """
        beat = threading.Thread(target=self._beat, name="thinwire-shard-beat", daemon=True)
        beat.start()
        found = False
        try:
            while line := self._enlist(found):
                found = True
                version = self._serve(line)
                if version is not None:
                    return version
                line.join(2.0)
            return -1 if self.keeper is None else self.keeper.version
        finally:
            self.close()

    def close(self) -> None:
        self._over.set()
        self._inbox.put(("closed", None, None))
        self._listener.close()
        if self._line is not None:
            self._line.close()
            self._line.join(2.0)
        self.visitors.close(2.0)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- the server -----------------------------------------------------------------------------------------------

    def _enlist(self, known: bool) -> Connection | None:
        """Connect to the server, waiting for it if necessary; None: this shard was closed meanwhile."""
        since = time.monotonic()
        lease = 10.0 if self.keeper is None else self.keeper.settings.lease_seconds
        patience = self._leases * lease if known else _FIRST_SECONDS
        while not self._over.is_set():
            try:
                meeting = Meeting(self.server, self._badge, min(10.0, 2 * lease), self._source)
                keeper = self._keeper_for(meeting)
                number = fingerprint(keeper.outer, keeper.layout.dtype)
                keeps = self._directory is not None
                pair = meeting.connect(encode(Enlist(self.index, self._listener.port, PROTOCOL, keeps, number)))
                break
            except PairError as error:
                if isinstance(error, NotAdmitted) and not known:  # later, another program may have the port
                    raise ShardRefused(str(error)) from error
                if time.monotonic() - since > patience:
                    advice = "" if known else ": start `thinwire ps server --shards K` there, or correct the address"
                    raise ServerLost(f"no server at {self.server} for {patience:g} s: {error}{advice}") from error
                self._over.wait(min(0.5, lease / 4))
        else:
            return None
        self.keeper, lease = keeper, keeper.settings.lease_seconds
        most = most_bytes(keeper.settings, keeper.layout)
        self.visitors.seconds, self.visitors.most_bytes = lease, most
        box: list[Connection] = []
        box.append(
            Connection(
                pair,
                channels=1,
                seconds=lease,
                most_bytes=most,
                deliver=lambda message: self._inbox.put(("word", box[0], message)),
                closed=lambda reason: self._inbox.put(("lost", box[0], reason)),
            )
        )
        self._line = box[0]
        return box[0].start()

    def _keeper_for(self, meeting: Meeting) -> SliceKeeper:
        """Return the keeper that the server's notes ask for, still without weights."""
        if is_loopback(self._host) and not is_loopback(meeting.found_at):
            raise ValueError(
                f"nodes of the server at {self.server} could not reach this shard at {self._host}: give it --host, or "
                "host=, with this machine's address in that network"
            )
        count = shard_count(meeting)
        if not count:
            raise ValueError(f"the server at {self.server} holds its weights whole: start it with --shards")
        if not 0 <= self.index < count:
            raise ValueError(f"{SHARD_REASONS[NO_INDEX].format(index=self.index)}: it has 0 to {count - 1}")
        settings, full = Settings.from_json(meeting.note("settings")), int(meeting.note("nodes"))
        outer = self._outer or (self._read_outer(meeting.note("outer")) if self._read_outer else None)
        outer = outer or default_outer(settings, full)
        layout = Layout.from_json(meeting.note("layout"))
        return SliceKeeper(settings, layout, outer, self.index, count, full, self._directory)

    def _beat(self) -> None:
        """Send signs of life, in a separate thread, so that an optimizer step does not look like silence."""
        while not self._over.wait(0.1 if self.keeper is None else self.keeper.settings.lease_seconds / 3):
            if self._line is not None:
                self._line.post(Ping())

    # --- the loop -------------------------------------------------------------------------------------------------

    def _serve(self, line: Connection) -> int | None:
        """Serve one connection.

        Return the version when training has ended or this shard was closed, None when the server has gone.
        """
        assert self.keeper is not None
        keeper, visitors = self.keeper, self.visitors
        while True:
            what, who, value = self._inbox.get()
            if what == "closed":
                return keeper.version
            if what not in ("word", "lost"):
                answers = visitors.on(what, who, value, keeper)
            elif who is not line:
                continue  # it belongs to an earlier server
            elif what == "lost":
                visitors.close(0.0)
                return None
            elif isinstance(value, Stop):
                line.finish()
                line.join(2.0)
                return keeper.version
            elif isinstance(value, Refused):
                text, lease = SHARD_REASONS.get(value.reason, SHARD_REASONS[NO_INDEX]), keeper.settings.lease_seconds
                self._taken_at = self._taken_at or time.monotonic()
                if value.reason != SHARD_TAKEN or time.monotonic() - self._taken_at > lease:
                    raise ShardRefused(text.format(index=self.index))
                line.close()
                # the shard with this index may be dead: the server knows when its lease has ended
                self._over.wait(min(0.5, lease / 4))
                return None
            else:
                self._taken_at = None
                answers = [*keeper.on(value), *visitors.obey(value, keeper)]
            for answer in answers:
                line.post(answer)

    def _came(self, pair: Pair, first: bytes) -> None:
        message, _, _ = decode(first)
        if isinstance(message, Ticket) and message.number > 0:
            self.visitors.came(pair, message.number)
        else:
            raise ValueError("it does not begin as a node does")
