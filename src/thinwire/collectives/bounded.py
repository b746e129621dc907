"""Calls that may wait for ever, with a limit: those of a store whose host is frozen or cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
