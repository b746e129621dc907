"""A process with peers: what happens to it, one thing after another; and how it finds those that it needs."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.systems.link.peer import Peer

logger = logging.getLogger("thinwire")

Event = tuple[str, Any, Any]
"""What has happened, to whom or by whom, and what comes with it."""
_Found = TypeVar("_Found")


class Actor(AbstractContextManager["Actor"]):
    """Handles what it is told by one thread; a simulation tells and handles in its own time (``clock``)."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._old: list[Peer] = []

    def tell(self, what: str, who: Any = None, value: Any = None) -> None:
        """Say what has happened, from any thread."""
        self._events.put((what, who, value))

    def handle(self, what: str, who: Any, value: Any) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Do what is due by the clock."""

    def warn(self, text: str, *words: Any) -> None:
        """Tell the user."""
        logger.warning(text, *words)

    def next_event(self, seconds: float | None = 0.1) -> Event | None:
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=seconds)
        return None

    def run_until(self, over: Callable[[], bool], tick_seconds: float) -> None:
        next_tick = 0.0
        while not over():
            if (event := self.next_event(tick_seconds)) is not None:
                self.handle(*event)
            if self.clock() >= next_tick:
                while self._events.qsize():  # what has come first, so that its senders do not count as silent
                    self.handle(*self._events.get())
                self.tick()
                next_tick = self.clock() + tick_seconds

    def retire(self, *peers: Peer, finish: bool = False) -> None:
        """Close peers, now or (``finish``) once all that was posted has been sent; ``join`` waits for their threads."""
        self._old = [*(peer for peer in self._old if not peer.ended), *peers]
        for peer in peers:
            peer.finish() if finish else peer.close()

    def join(self, seconds: float, least: float = 0.0) -> None:
        """Wait up to ``seconds`` for the threads of retired peers, but at least ``least`` seconds for each."""
        end = time.monotonic() + seconds
        for peer in self._old:
            peer.join(max(least, end - time.monotonic()))

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, *_: Any) -> None:
        self.close()


class NotYet(PairError):
    """Who was found is not ready; there is no limit to how long that may take."""


class Over(RuntimeError):
    """Nobody looks any more."""


def find(
    look: Callable[[], _Found], seconds: float, pause: float, over: threading.Event | None = None, known: bool = False
) -> _Found:
    """Look again and again until it succeeds, but only ``seconds`` after it first failed.

    Raises:
        NotAdmitted: at once, unless whom it looks for is ``known``: then another program may have the port meanwhile.
        Over: ``over`` was set meanwhile.
        PairError: it took too long.
    """
    lost_at: float | None = None
    over = over or threading.Event()
    while True:
        try:
            return look()
        except NotYet:
            lost_at = None
        except PairError as error:
            if isinstance(error, NotAdmitted) and not known:
                raise
            if lost_at is None:
                lost_at = time.monotonic()
                logger.warning("thinwire: %s; trying again for %g s", error, seconds)
            if time.monotonic() - lost_at > seconds:
                raise PairError(str(error)) from error
        if over.wait(pause):
            raise Over
