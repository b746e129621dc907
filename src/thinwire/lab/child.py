"""The first moment of a rank: tie its life to the lab's, learn the names of the nodes, then become the command.

Run as a script in an isolated interpreter, ``child.py PARENT DIRECTORY HOSTS CORES COMMAND...``; imports nothing of
thinwire.
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
    """Put `text` in the place of /etc/hosts, in this process's own mount namespace alone; best effort.

    Without it each look-up of an address asks a name server that no node can reach. The file lives in a tmpfs that is
    mounted for a moment over /tmp, so nothing of it outlives the process.
    """
    if _LIBC.mount(b"tw", b"/tmp", b"tmpfs", 0, None):
        return
    with open("/tmp/hosts", "w") as file:
        file.write(text)
    _LIBC.mount(b"/tmp/hosts", b"/etc/hosts", None, _MS_BIND, None)
    _LIBC.umount2(b"/tmp", _MNT_DETACH)


def main(parent: int, directory: str, hosts: str, cores: str, command: list[str]) -> int:
    """Do the above; HOSTS is empty where mounts and network are the machine's. Returns 126 or 127: no command."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent was gone before the tie was made
        return 128 + int(signal.SIGKILL)
    # What Python ignores at start would stay ignored in the command.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    if cores:
        with contextlib.suppress(OSError):  # they may have been taken away meanwhile
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
