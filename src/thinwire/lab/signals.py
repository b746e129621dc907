"""Signals that wait until the lab has cleaned up."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DeferredSignals:
    """Hold back ctrl-C, SIGTERM and SIGHUP inside the context; the first one is raised again on exit.

    So the caller sees the same KeyboardInterrupt or death as without the lab, only later. Python handles signals in the
    main thread only: in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _DEFERRED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self.received is not None:
            signal.raise_signal(self.received)
