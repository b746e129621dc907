"""The network card that a backend of torch.distributed will use on this machine, as far as can be told."""

from __future__ import annotations

import os
import platform

from thinwire.measure.doctor import network
from thinwire.measure.doctor.facts import Facts
from thinwire.measure.doctor.sockets import gloo_choice, nccl_choice


def card(backend: str) -> tuple[str, int | None]:
    """Return its name and the megabits per second that its driver reports; ("", None) if unknown."""
    names = {key: value for key, value in os.environ.items() if key.startswith(("GLOO_", "NCCL_"))}
    facts = Facts("", "", "", interfaces=network.interfaces(), environment=names)
    if backend == "nccl":
        choice = nccl_choice(facts)
    else:
        if not names.get("GLOO_SOCKET_IFNAME"):
            facts = Facts("", "", "", interfaces=facts.interfaces, hostname=network.look_up(platform.node()))
        choice = gloo_choice(facts)
    found = facts.interface(choice.interfaces[0]) if choice.interfaces else None
    return (found.name, found.mbits) if found else ("", None)
