"""Wait until Gloo's threads are idle before Python exits; otherwise even a successful run may end with an abort.

The thread that drops the last reference to an op needs the interpreter's lock for that. If it is a thread of Gloo while
Python is exiting, it is ended inside a destructor, and the process aborts with "terminate called without an active
exception" (any torch program; seen in 2 of 100 that ended right after a small collective). Python 3.14 has fixed it.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from pathlib import Path

_CHECK_SECONDS = 0.01  # sleeping without the lock, so that a thread that waits for it gets it
_QUIET_CHECKS = 4  # a thread that was woken may still be shown as asleep until it has a core
MOST_SECONDS = 2.0


def states_of_gloo() -> list[str]:
    """Return the kernel's state of each thread of Gloo: ``S`` asleep, ``R`` running or waiting for a core."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


@atexit.register
def wait_until_quiet() -> None:
    """Wait until all of Gloo's threads sleep, or the time limit is reached."""
    deadline, quiet = time.monotonic() + MOST_SECONDS, 0
    while quiet < _QUIET_CHECKS and time.monotonic() < deadline and (states := states_of_gloo()):
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_CHECK_SECONDS)
