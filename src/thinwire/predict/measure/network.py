"""The machine's network: interfaces, routes, names, TCP settings, and which interface Gloo and NCCL will use.

Gloo (torch's ``ProcessGroupGloo``): ``GLOO_SOCKET_IFNAME`` names interfaces, and the first address of each is used;
otherwise the first address of the host's own name to which a socket can be bound; otherwise 127.0.0.1.

NCCL (``src/misc/socket.cc``): ``NCCL_SOCKET_IFNAME`` lists prefixes; after ``^`` those to exclude, after ``=`` whole
names. Otherwise names that begin with ``ib``; otherwise those that begin with none of ``docker``, ``lo``, ``virbr``;
otherwise those, in this order.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from thinwire.predict.measure.facts import Facts, Interface, Name

_LOOKUP_SECONDS = 20.0
_SYSFS, _SYSCTL = Path("/sys/class/net"), Path("/proc/sys/net")
_SETTINGS = (
    "core/rmem_max",
    "core/wmem_max",
    "ipv4/tcp_rmem",
    "ipv4/tcp_wmem",
    "ipv4/tcp_congestion_control",
    "ipv4/tcp_allowed_congestion_control",
    "ipv4/ip_local_port_range",
)


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces with their addresses, in the order in which Gloo and NCCL see them."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    counters = psutil.net_io_counters(pernic=True)
    inet = socket.AF_INET, socket.AF_INET6
    found = []
    for name in (name for _, name in socket.if_nameindex() if name in states):
        state, counted, folder = states[name], counters.get(name), _SYSFS / name
        known = sorted((one for one in addresses.get(name, ()) if one.family in inet), key=lambda one: one.family)
        found.append(
            Interface(
                name=name,
                up=state.isup,
                kind="loopback" if "loopback" in state.flags.split(",") else _kind(folder),
                addresses=tuple(one.address.partition("%")[0] for one in known),
                mbits=state.speed or None,
                mtu=state.mtu,
                packets=counted.packets_sent + counted.packets_recv if counted else 0,
                errors=counted.errin + counted.errout if counted else 0,
                drops=counted.dropin + counted.dropout if counted else 0,
            )
        )
    return tuple(found)


def _kind(folder: Path) -> str:
    if (folder / "wireless").exists():
        return "wireless"
    if (folder / "bridge").exists():
        return "bridge"
    if (folder / "tun_flags").exists():
        return "tunnel"
    if not folder.exists() or any((folder / sign).exists() for sign in ("device", "bonding")):
        return "ethernet"
    return "ethernet" if "DEVTYPE=vlan" in _text(folder / "uevent") else "virtual"


def default_route() -> str | None:
    for line in _text(Path("/proc/net/route")).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            return fields[0]
    for line in _text(Path("/proc/net/ipv6_route")).splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[1] == "00" and fields[9] != "lo":
            return fields[9]
    return None


def look_up(name: str) -> Name:
    began = time.perf_counter()
    answer: list[Name] = []
    thread = threading.Thread(target=lambda: answer.append(_resolved(name)), daemon=True)
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    seconds = time.perf_counter() - began
    if not answer:
        return Name(name, seconds=seconds, error=f"no answer within {_LOOKUP_SECONDS:g} s")
    return Name(name, answer[0].addresses, answer[0].bound, seconds, answer[0].error)


def _resolved(name: str) -> Name:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Name(name, error=getattr(error, "strerror", None) or str(error))
    addresses: dict[str, bool] = {}
    for family, kind, protocol, _, address in found:
        addresses.setdefault(str(address[0]).split("%")[0], _binds(family, kind, protocol, address))
    return Name(name, tuple(addresses), tuple(a for a, bound in addresses.items() if bound))


def _binds(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, kind, protocol) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True


def tcp_settings() -> dict[str, str]:
    found = {path.rpartition("/")[2]: " ".join(_text(_SYSCTL / path).split()) for path in _SETTINGS}
    return {name: value for name, value in found.items() if value}


def tcp_segments() -> tuple[int, int]:
    """Return the segments sent since the machine started, and those sent again."""
    rows = [line.split()[1:] for line in _text(Path("/proc/net/snmp")).splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2:
        return 0, 0
    counts = dict(zip(*rows))
    return int(counts.get("OutSegs", 0)), int(counts.get("RetransSegs", 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_LAST = ("docker", "lo", "virbr")


@dataclass(frozen=True)
class Choice:
    """What a backend will use.

    Attributes:
        interfaces: names; empty if there is none, and ``problem`` says why.
        address: address of the first interface, on which it listens.
        why: the rule that led to it.
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
    return address.startswith("127.") or address in ("::1", "localhost")


def gloo_choice(facts: Facts) -> Choice:
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
    unwanted, exact = listed.startswith("^"), listed.lstrip("^").startswith("=")
    words = [word.split(":")[0] for word in listed.lstrip("^").lstrip("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [one for one in interfaces if fits(one.name) != unwanted]


def card(backend: str) -> tuple[str, int | None]:
    """Return its name and the megabits per second that its driver reports; ("", None) if unknown."""
    names = {key: value for key, value in os.environ.items() if key.startswith(("GLOO_", "NCCL_"))}
    facts = Facts("", "", "", interfaces=interfaces(), environment=names)
    if backend == "nccl":
        choice = nccl_choice(facts)
    else:
        if not names.get("GLOO_SOCKET_IFNAME"):
            facts = Facts("", "", "", interfaces=facts.interfaces, hostname=look_up(platform.node()))
        choice = gloo_choice(facts)
    found = facts.interface(choice.interfaces[0]) if choice.interfaces else None
    return (found.name, found.mbits) if found else ("", None)
