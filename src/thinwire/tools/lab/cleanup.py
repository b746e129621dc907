"""Names of the lab's namespaces, and removal of those whose owner is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from pathlib import Path

from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.shell import Shell

_FOLDER = Path("/run/netns")
NAME = re.compile(r"tw(\d+)-(\d+)-\d+-\w+")
_serial = itertools.count()


def new_prefix() -> str:
    """Return a prefix ``tw<pid>-<start>-<serial>-`` that no other lab uses; the start time tells reused ids apart."""
    return f"tw{os.getpid()}-{_start_ticks(os.getpid())}-{next(_serial)}-"


def _start_ticks(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def clean(*, all: bool = False) -> list[str]:
    """Remove what killed runs left behind: their namespaces, links and any process still inside.

    Runs in a user namespace leave nothing behind: the kernel removes it with its last process.

    Args:
        all: also remove those of runs whose process is still alive.

    Returns:
        The names of the removed namespaces.

    Raises:
        LabError: some cannot be removed, for lack of rights.
    """
    names = sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []
    removed = []
    for name in names:
        match = NAME.fullmatch(name)
        if match and (all or _start_ticks(int(match[1])) != int(match[2])):
            try:
                remove(Shell(), name)
            except LabError:
                if (_FOLDER / name).exists():  # otherwise its owner removed it first
                    raise
            removed.append(name)
    return removed


def remove(shell: Shell, name: str) -> None:
    """Remove one namespace; first kill processes still inside it, or it would live on without a name."""
    for _ in range(40):
        inside = [int(word) for word in shell.run("ip", "netns", "pids", name).split()]
        if not inside:
            break
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                _kill(pid, name)
        time.sleep(0.05)
    shell.run("ip", "netns", "delete", name)


def _kill(pid: int, name: str) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        raise LabError(f"no permission to end process {pid} in namespace {name}: run as root") from None
