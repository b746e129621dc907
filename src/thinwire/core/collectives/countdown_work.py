"""Several messages as one piece of work that can be waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class CountdownWork:
    """Ends when all its parts have, or with the first one's error.

    Args:
        parts: number of messages.
        last: called by the thread that moves the last byte, before anyone is told of the end; an error in it becomes
            the work's error.
        failed: called with an error.
    """

    def __init__(
        self, parts: int, last: Callable[[], None] | None = None, failed: Callable[[RuntimeError], None] | None = None
    ) -> None:
        self._left, self._last, self._failed = parts, last, failed
        self._lock, self._gate = threading.Lock(), threading.Lock()
        self._gate.acquire()  # waiting means acquiring it; much cheaper to make than an Event
        self._ended = False
        self._error: RuntimeError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def part_ended(self) -> None:
        """Count one more message that has arrived, or has been handed to the kernel."""
        with self._lock:
            self._left -= 1
            if self._left or self._ended:
                return
        error = None
        if self._last is not None:
            try:
                self._last()
            except Exception as caught:  # the loop's thread must survive it, and waiting threads must get it
                error = (
                    caught if isinstance(caught, RuntimeError) else RuntimeError(f"{type(caught).__name__}: {caught}")
                )
        self._end(error)

    def fail(self, error: RuntimeError) -> None:
        """End the work with an error: one part will never end."""
        self._end(error)

    def _end(self, error: RuntimeError | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._error, self._ended = error, True
            self._gate.release()
            callbacks, self._callbacks = self._callbacks, []
        if error is not None and self._failed is not None:
            self._failed(error)
        for callback in callbacks:
            with contextlib.suppress(RuntimeError):
                callback()

    def wait(self) -> None:
        """Wait until the work has ended. Raise the error of the first part that failed."""
        with self._gate:
            pass
        if self._error is not None:
            raise self._error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back, from another thread or at once, when the work has ended or failed."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()
