"""What torch's process groups leave open: which backend serves a device, calls without a limit, a clean exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from thinwire.core.program.topology import Topology


def backend_for(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend that the group uses for a device, None if it has none.

    ``dist.get_backend`` returns what ``init_process_group`` was given: "gloo", "cpu:gloo,cuda:nccl" or nothing.
    """
    return backends_of(group).get(device.type)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}


def backends_to_ask_for(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def backend_of_new(group: dist.ProcessGroup | None) -> str | None:
    """Return what ``new_group`` must be given for the backends of ``group``; None if the default group has the same."""
    config = dist.get_backend_config(group)
    return None if config == dist.get_backend_config() else config


T = TypeVar("T")
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own for Gloo


def seconds_of(timeout: timedelta | None) -> float:
    """Return the seconds after which a message fails; None: torch's limit."""
    return (timeout or _DEFAULT_TIMEOUT).total_seconds()


def bounded(seconds: float, call: Callable[[], T]) -> T:
    """Make a call in another thread; raise ``TimeoutError`` if it takes longer, with the thread left running."""
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


def topology_of(world: int) -> Topology:
    """Return LOCAL_WORLD_SIZE ranks per machine if the group is the whole job; else a machine for every rank."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whole = dist.is_available() and dist.is_initialized() and world == dist.get_world_size()
    return Topology(world, local if whole and local > 0 and world % local == 0 else 1)


# Gloo's threads must be idle before Python exits; otherwise even a successful run may end with an abort. The thread
# that drops the last reference to an op needs the interpreter's lock for that. If it is a thread of Gloo while Python
# is exiting, it is ended inside a destructor, and the process aborts with "terminate called without an active
# exception" (any torch program; seen in 2 of 100 that ended right after a small collective). Python 3.14 has fixed it.
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
