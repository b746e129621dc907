"""The start of a rank: tie its life to the lab's, set the names of the nodes, then become the command.

Run as a script in an isolated interpreter: ``child.py PARENT DIRECTORY HOSTS CORES COMMAND...``; it imports nothing
from thinwire.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MS_BIND = 4096
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None)


def set_hosts(text: str) -> None:
    """Replace /etc/hosts in this process's own mount namespace, best effort: no name server answers in a node.

    The file lives in a tmpfs mounted over /tmp for a moment, so nothing of it outlives the process.
    """
    if _LIBC.mount(b"tw", b"/tmp", b"tmpfs", 0, None):
        return
    with open("/tmp/hosts", "w") as file:
        file.write(text)
    _LIBC.mount(b"/tmp/hosts", b"/etc/hosts", None, _MS_BIND, None)
    _LIBC.umount2(b"/tmp", _MNT_DETACH)


def main(parent: int, directory: str, hosts: str, cores: str, command: list[str]) -> int:
    """Do all of this; HOSTS is empty if mounts and network are the machine's. Return 126 or 127 without a command."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the tie was set up
        return 128 + int(signal.SIGKILL)
    # Signals that Python ignores at start would stay ignored in the command.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    if cores:
        with contextlib.suppress(OSError):  # the cores may have been taken away meanwhile
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if hosts:
        set_hosts(hosts)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:]))
