"""Calls that may wait for ever, with a limit: those of a store whose host is frozen or cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own for Gloo


def seconds_of(timeout: timedelta | None) -> float:
    """After how long a message fails; None: torch's limit."""
    return (timeout or _DEFAULT_TIMEOUT).total_seconds()


def bounded(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises, made in another thread.

    Raises:
        TimeoutError: it took longer; the thread is left behind.
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
