"""With which rights the lab may create namespaces: as root, in a user namespace, or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator

from thinwire.tools.lab.cleanup import new_prefix, remove
from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.shell import Shell, tool

_MODES = ("root", "user", "loopback")
# `ip netns` keeps names in /run/netns. `cat` holds the namespaces open for as long as the lab holds its standard input.
_HOLD = """
[ -d /run/netns ] && mount -t tmpfs tw /run/netns || { mount -t tmpfs tw /run && mkdir /run/netns; } || exit
echo ready
exec cat
"""


def available() -> str:
    """Return the rights with which namespaces can be made: "root", "user" or "loopback" (none), after a real trial."""
    return find_mode()[0]


def find_mode() -> tuple[str, str]:
    """Return the mode of `available`, and why a better one is not available."""
    forced = os.environ.get("THINWIRE_LAB_MODE") or None
    if forced not in (None, *_MODES):
        raise LabError(f"THINWIRE_LAB_MODE={forced!r} is not one of {', '.join(_MODES)}: unset it")
    return _try_modes(forced)


@functools.cache
def _try_modes(forced: str | None) -> tuple[str, str]:
    if forced == "loopback":
        return forced, "THINWIRE_LAB_MODE=loopback"
    reason = ""
    for mode in ("root", "user") if forced is None else (forced,):
        if mode == "root" and os.geteuid() != 0:
            reason = "not root"
            continue
        try:
            with open_shell(mode) as shell:
                _trial(shell)
        except (LabError, OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        else:
            return mode, ""
    return "loopback", reason


def _trial(shell: Shell) -> None:
    name = new_prefix() + "trial"
    try:
        shell.run("ip", "netns", "add", name)
        shell.batch("ip", name, ["link add tw0 type veth peer name tw1", "link add tw2 type bridge"])
        shell.batch("tc", name, ["qdisc add dev tw0 root tbf rate 1mbit burst 8192 limit 65536"])
        subprocess.run(
            shell.inside(name, [tool("true")]), check=True, capture_output=True, timeout=30, start_new_session=True
        )
    finally:
        with contextlib.suppress(LabError):
            remove(shell, name)


@contextlib.contextmanager
def open_shell(mode: str) -> Iterator[Shell]:
    """Open a shell that may create namespaces; in mode "user" everything it made disappears when it is closed."""
    if mode == "root":
        yield Shell()
        return
    command = [tool("unshare"), "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _HOLD]
    holder = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder.stdin, holder.stdout, holder.stderr:
        try:
            if holder.stdout.readline() != b"ready\n":
                complaint = holder.stderr.read().decode(errors="replace").strip().splitlines()
                raise LabError("no user namespace: " + (complaint[-1] if complaint else "the kernel refuses it"))
            target = ("--target", str(holder.pid), "--user", "--mount", "--net")
            yield Shell((tool("nsenter"), "--preserve-credentials", *target))
        finally:
            holder.kill()
            holder.wait()
