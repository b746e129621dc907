"""Bytes on the wire, read from the counters of the interface in the rank's own network namespace."""

from __future__ import annotations

import os
from pathlib import Path


def interface() -> str | None:
    """Return the interface that Gloo was told to use; None if it is the loopback or was not set."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return name if name and name != "lo" and transmitted_bytes(name) is not None else None


def transmitted_bytes(name: str) -> int | None:
    """Return the bytes sent through an interface so far, headers included.

    ``/proc/self/net/dev`` shows the process's namespace; ``/sys/class/net`` shows that of whoever mounted it.
    """
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines[2:]:
        label, _, counters = line.partition(":")
        if label.strip() == name:
            return int(counters.split()[8])
    return None


def is_node_leader() -> bool:
    """Return whether this rank reads the counter for its node (ranks of a node share one interface)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
