"""Which interface Gloo and NCCL will use on a machine, and why: their rules as functions of its facts.

Gloo (torch's ``ProcessGroupGloo``): ``GLOO_SOCKET_IFNAME`` names interfaces, and the first address of each is used;
otherwise the first address of the host's own name to which a socket can be bound; otherwise 127.0.0.1.

NCCL (``src/misc/socket.cc``): ``NCCL_SOCKET_IFNAME`` lists prefixes; after ``^`` those to exclude, after ``=`` whole
names. Otherwise names that begin with ``ib``; otherwise those that begin with none of ``docker``, ``lo``, ``virbr``;
otherwise those, in this order.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.predict.measure import network
from thinwire.predict.measure.facts import Facts, Interface

_LAST = ("docker", "lo", "virbr")


@dataclass(frozen=True)
class Choice:
    """What a backend will use.

    Attributes:
        backend: "gloo" or "nccl".
        interfaces: names; empty if there is none, and ``problem`` says why.
        address: address of the first interface, on which it listens.
        why: the rule that led to it.
        problem: why it cannot start.
    """

    backend: str
    interfaces: tuple[str, ...] = ()
    address: str = ""
    why: str = ""
    problem: str = ""

    @property
    def title(self) -> str:
        """The backend's name in a sentence."""
        return {"gloo": "Gloo", "nccl": "NCCL"}.get(self.backend, self.backend)

    @property
    def loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return is_loopback(self.address)


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the machine itself."""
    return address.startswith("127.") or address in ("::1", "localhost")


def gloo_choice(facts: Facts) -> Choice:
    """Return where Gloo will listen."""
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return _named(facts, named)
    host = facts.hostname
    if host.bound:
        found = facts.interface_of(host.bound[0])
        why = f"this machine's name, {host.name}, leads to {host.bound[0]}"
        return Choice("gloo", (found.name,) if found else (), host.bound[0], why)
    lo = facts.interface_of("127.0.0.1")
    what = f"leads only to other machines ({', '.join(host.addresses)})" if host.addresses else "has no address"
    return Choice("gloo", (lo.name,) if lo else (), "127.0.0.1", f"this machine's name, {host.name}, {what}")


def _named(facts: Facts, named: str) -> Choice:
    """Choose by ``GLOO_SOCKET_IFNAME``."""
    why = f"GLOO_SOCKET_IFNAME={named}"
    names = tuple(named.split(","))
    found = [facts.interface(name) for name in names]
    for name, one in zip(names, found):
        if one is None:
            return Choice("gloo", why=why, problem=f"there is no interface {name!r}")
        if not one.addresses:
            return Choice("gloo", why=why, problem=f"the interface {name} has no address")
    assert found[0] is not None
    return Choice("gloo", names, found[0].addresses[0], why)


def nccl_choice(facts: Facts) -> Choice:
    """Return where NCCL's sockets will listen (between GPUs it may use InfiniBand or shared memory)."""
    usable = [one for one in facts.interfaces if one.up and _addresses(facts, one)]
    named = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    if len(named) > 1:
        found, why = _matching(usable, named), f"NCCL_SOCKET_IFNAME={named}"
        if not found:
            problem = "no interface that is up and has an address matches it"
            return Choice("nccl", why=why, problem=problem)
        return _chosen(facts, found, why)
    if found := _matching(usable, "ib"):
        return _chosen(facts, found, "names with ib come first")
    if found := _matching(usable, "^" + ",".join(_LAST)):
        return _chosen(facts, found, f"up, with an address, and not one of {', '.join(_LAST)}")
    for prefix in _LAST:
        if found := _matching(usable, prefix):
            return _chosen(facts, found, "there is no other")
    return Choice("nccl", why="NCCL_SOCKET_IFNAME is not set", problem="no interface is up and has an address")


def _chosen(facts: Facts, found: Sequence[Interface], why: str) -> Choice:
    names = tuple(one.name for one in found)
    return Choice("nccl", names, _addresses(facts, found[0])[0], why)


def _addresses(facts: Facts, one: Interface) -> list[str]:
    """Return the addresses that NCCL may use, by ``NCCL_SOCKET_FAMILY``."""
    family = facts.environment.get("NCCL_SOCKET_FAMILY")
    wanted = {"AF_INET": (False,), "AF_INET6": (True,)}.get(family or "", (False, True))
    return [a for a in one.addresses if (":" in a) in wanted and a != "::1"]


def _matching(interfaces: Sequence[Interface], listed: str) -> list[Interface]:
    """Return the interfaces that a list in NCCL's syntax selects."""
    unwanted, exact = listed.startswith("^"), listed.lstrip("^").startswith("=")
    words = [word.split(":")[0] for word in listed.lstrip("^").lstrip("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [one for one in interfaces if fits(one.name) != unwanted]


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
