"""Find out which ranks are late: after an error, each rank leaves a note in the store.

A rank that leaves no note within five seconds is named. A rank that leaves by itself, for example with an exception in
the user's code, leaves a note too, so that it is not taken for dead. In normal steps there is no traffic to the store.
The process that holds the store may be frozen, so nothing waits for it without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from thinwire.core.collectives.groups import bounded

WAIT_SECONDS = 5.0
_LEAVING_SECONDS = 2.0
_MOST_NAMED = 8

_open: weakref.WeakSet[LateRanks] = weakref.WeakSet()
_connected: tuple[int, weakref.ref[Any], Any] | None = None


def _connection(seconds: float) -> Any:
    """Return the process's own connection for notes: threads block others, and a new one can take 5 s."""
    global _connected
    process, world = os.getpid(), dist.group.WORLD
    if _connected is None or _connected[0] != process or _connected[1]() is not world:
        store: Any = dist.distributed_c10d._get_default_store()
        _connected = process, weakref.ref(world), bounded(seconds, store.clone)
    return _connected[2]


@atexit.register
def _tell_the_end() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for ranks in list(_open):
        if ranks.process == os.getpid():  # otherwise a fork has ended, not the rank
            ranks.leave("has ended its program" if error is None else f"has ended with {in_words(error)}")


def refused(ranks: Sequence[int], place: int, label: str, error: BaseException) -> None:
    """Leave word that this rank does not come to the meeting of this label, if the store answers."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        LateRanks(ranks, place, label, _LEAVING_SECONDS).leave(f"has left attach with {in_words(error)}")


def in_words(error: BaseException) -> str:
    text = str(error).split("\n")[0][:120].rstrip(". ")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class NoFailureNotes:
    """Replaces :class:`LateRanks` if the caller decides which ranks continue, so that no notes are needed."""

    def close(self) -> None: ...

    def leave(self, why: str) -> None: ...

    def come(self) -> None: ...

    def report(self, step: int, bucket: str, where: str) -> str:
        return "the ranks that continue are being chosen"


class LateRanks:
    """The notes of one handle. ``label``: equal on all ranks, different for every handle."""

    def __init__(self, ranks: Sequence[int], place: int, label: str, seconds: float) -> None:
        self._ranks, self._place, self._prefix = ranks, place, f"thinwire/{label}"
        try:
            self._store = _connection(seconds)
        except Exception as error:
            raise RuntimeError(
                f"rank {ranks[place]}: connecting failed: {in_words(error)}. {self._silent()}."
            ) from error
        self._said, self.process, self._seconds, self._met = False, os.getpid(), seconds, 0
        _open.add(self)

    def close(self) -> None:
        self._said = True

    def leave(self, why: str) -> None:
        if not self._said:
            self._said = True
            note = json.dumps({"left": why})

            def write() -> None:
                self._store.set(f"{self._prefix}/{self._place}", note)
                self._store.set(f"{self._prefix}/left", "")

            with contextlib.suppress(RuntimeError, TimeoutError):  # newer Pythons start no thread while they exit
                bounded(_LEAVING_SECONDS, write)

    def come(self) -> None:
        """Wait until all ranks have come here. RuntimeError: one has left a note that it has stopped."""
        self._met += 1
        key, end, pause = f"{self._prefix}/met {self._met}", time.monotonic() + self._seconds, 0.001

        def wait() -> bool:
            nonlocal pause
            come = self._store.add(key, 1)  # a word to the store may take a long wire's round trip
            while come < len(self._ranks):
                left = self._store.check([f"{self._prefix}/left"])
                come = self._store.add(key, 0)
                if left or come >= len(self._ranks):  # a rank may have come, and left after that
                    break
                if time.monotonic() > end:
                    raise TimeoutError(f"not all ranks came within {self._seconds:g} s")
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return bool(come >= len(self._ranks))

        if not bounded(self._seconds + WAIT_SECONDS, wait):
            raise RuntimeError("another rank has given up")

    def report(self, step: int, bucket: str, where: str) -> str:
        self._said = True
        try:
            return bounded(WAIT_SECONDS + 2.0, lambda: self._report(step, bucket, where))
        except Exception:
            return self._silent()

    def _silent(self) -> str:
        return f"rank {self._ranks[0]} (or whoever holds the store) no longer answers: dead, frozen or cut off"

    def _report(self, step: int, bucket: str, where: str) -> str:
        mine = json.dumps({"step": step, "bucket": bucket, "where": where})
        self._store.set(f"{self._prefix}/{self._place}", mine)
        self._store.set(f"{self._prefix}/left", "")  # for those that come later
        missing = self._wait()
        notes = {
            rank: json.loads(self._store.get(f"{self._prefix}/{p}").decode())
            for p, rank in enumerate(self._ranks) if p not in missing
        }  # fmt: skip
        left = [f"rank {rank} {note['left']}" for rank, note in notes.items() if "left" in note]
        if missing:
            named = ", ".join(f"rank {self._ranks[place]}" for place in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} others" if len(missing) > _MOST_NAMED else ""
            left.append(
                f"{named}{more} did not report: dead, late or done already (all ranks need as many batches, or "
                "sync.join(), and the same calls)"
            )
        if left:
            return "; ".join(left)
        places: dict[str, list[int]] = {}
        for rank, note in notes.items():
            places.setdefault(f"step {note['step']}, bucket {note['bucket']}, {note['where']}", []).append(rank)
        if len(places) == 1:
            return "all ranks failed at the same place"
        return "the ranks are at different places: " + "; ".join(f"{place}: ranks {r}" for place, r in places.items())

    def _wait(self) -> list[int]:
        deadline = time.monotonic() + WAIT_SECONDS
        missing = [p for p in range(len(self._ranks)) if p != self._place]
        while missing and time.monotonic() < deadline:
            missing = [p for p in missing if not self._store.check([f"{self._prefix}/{p}"])]
            time.sleep(0.05)
        return missing
