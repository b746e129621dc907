"""Before Python ends, Gloo's threads come to rest: else a run in which all went well may end with an abort.

Who drops the last reference to an op does it with the interpreter's lock. Where that is a thread of Gloo and Python is
ending by then, the thread is ended inside a destructor, and the process says "terminate called without an active
exception" (any torch program; seen in 2 of 100 that ended right after a small collective). Python 3.14 has mended it.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from pathlib import Path

_CHECK_SECONDS = 0.01  # without the lock, so that whoever waits for it has it
_QUIET_CHECKS = 4  # one that has been woken may be called asleep until it has a core
MOST_SECONDS = 2.0


def states_of_gloo() -> list[str]:
    """What the kernel says of each of its threads: ``S`` asleep, ``R`` running or waiting for a core."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


@atexit.register
def wait_until_quiet() -> None:
    """Wait until all of Gloo's threads sleep, or long enough."""
    deadline, quiet = time.monotonic() + MOST_SECONDS, 0
    while quiet < _QUIET_CHECKS and time.monotonic() < deadline and (states := states_of_gloo()):
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_CHECK_SECONDS)
