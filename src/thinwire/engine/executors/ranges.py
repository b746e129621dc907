"""Ranges ``thinwire::<phase>::<bucket>`` in traces of ``torch.profiler``; without a profiler they cost one look-up.

Phases are the kinds of ops (``AllReduce``, ``AllGather``, ...), from their issue to their completion, and ``segment``:
a stretch of a method's own computation. (A profiler sees only the thread that started it, unless
``profile_all_threads`` is set.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

NAME = "thinwire::{}::{}"
_nothing = nullcontext()


def profiling() -> bool:
    """Return whether a profiler runs in this process."""
    return bool(profiler._is_profiler_enabled)


def span(phase: str, bucket: int | None) -> AbstractContextManager[Any]:
    """Return the range of what the calling thread does inside, for a bucket."""
    return profiler.record_function(NAME.format(phase, bucket)) if profiling() else _nothing


def exchange(kind: str, bucket: int) -> Callable[[], None] | None:
    """Open the range of an exchange; return a function that ends it, from any thread. None: no profiler runs."""
    if not profiling():
        return None
    over: torch.futures.Future[None] = torch.futures.Future()
    with profiler.record_function(NAME.format(kind, bucket)) as range_:
        range_._call_end_callbacks_on_future(over)
    return lambda: over.set_result(None)
