"""Put a limit on calls that may wait for ever, such as those to a store whose host is frozen or cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own for Gloo


def seconds_of(timeout: timedelta | None) -> float:
    """Return the seconds after which a message fails; None: torch's limit."""
    return (timeout or _DEFAULT_TIMEOUT).total_seconds()


def bounded(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call returns, or raise what it raises; it runs in another thread.

    Raises:
        TimeoutError: it took longer; the thread is left running.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="thinwire-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
