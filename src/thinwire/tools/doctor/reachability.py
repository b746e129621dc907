"""Whether other machines can reach the backends: names, addresses, the choice of the interface."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.predict.measure.network import is_loopback
from thinwire.tools.doctor.findings import ERROR, NOTE, WARNING, Finding, Setting

_SLOW_LOOKUP = 1.0  # seconds
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel")


def reachability(setting: Setting) -> Iterator[Finding]:
    """Yield all findings of this file."""
    yield from _cannot_start(setting)
    yield from _loopback(setting)
    yield from _wrong_interface(setting)
    yield from _names(setting)
    yield from _differences(setting)


def _cannot_start(setting: Setting) -> Iterator[Finding]:
    for choice in setting.choices:
        if choice.problem:
            candidates = ", ".join(_others(setting)) or "none here"
            variable = f"{choice.backend.upper()}_SOCKET_IFNAME"
            yield Finding(
                ERROR,
                "interface-missing",
                f"{choice.title} cannot start: {choice.why}, but {choice.problem}.",
                f"Set {variable} to an interface that is up and leads to the other machines ({candidates}), or "
                "unset it.",
            )
    for choice in setting.choices:
        for name in choice.interfaces:
            one = setting.facts.interface(name)
            if one is not None and not one.up:
                yield Finding(
                    setting.on_several(),
                    "interface-down",
                    f"{choice.title} will use {name}, which is down or has no carrier.",
                    f"Switch it on (`ip link set {name} up`) and check the cable, or name another interface in "
                    f"{choice.backend.upper()}_SOCKET_IFNAME.",
                )


def _loopback(setting: Setting) -> Iterator[Finding]:
    others = _others(setting)
    if not others:
        yield Finding(
            setting.on_several(),
            "only-loopback",
            "This machine has no interface that is up and has an address, except the loopback: no other machine can "
            "reach it.",
            "Bring up a network interface; jobs on this machine alone work without one.",
        )
        return
    for choice in setting.choices:
        if choice.problem or not choice.loopback:
            continue
        variable, best = f"{choice.backend.upper()}_SOCKET_IFNAME", others[0]
        if variable in setting.facts.environment:
            yield Finding(
                setting.on_several(),
                "loopback-named",
                f"{choice.why} makes {choice.title} listen on {choice.address}, which no other machine can reach.",
                f"On several machines set {variable}={best}.",
            )
        else:
            yield Finding(
                setting.on_several(),
                "hostname-loopback",
                f"{choice.title} will listen on {choice.address}, which no other machine can reach, because "
                f"{choice.why}.",
                f"On several machines set {variable}={best}, or let the name lead to the address of {best} "
                "(in /etc/hosts; Debian writes 127.0.1.1 there).",
            )


def _wrong_interface(setting: Setting) -> Iterator[Finding]:
    """Report an interface that can be reached but is probably the wrong one."""
    one, facts = setting.interface, setting.facts
    if one is None or one.kind == "loopback":
        return
    choice = setting.nccl or setting.gloo
    variable = f"{choice.backend.upper()}_SOCKET_IFNAME"
    others = [other for name in _others(setting) if (other := facts.interface(name)) and other.name != one.name]
    if one.name.startswith(_VIRTUAL) or one.kind == "bridge":
        better = next((o.name for o in others if o.kind == "ethernet"), "the one that leads to the other machines")
        yield Finding(
            WARNING,
            "virtual-interface",
            f"{choice.title} will use {one.name} ({choice.address}), a bridge or a container's interface, because "
            f"{choice.why}.",
            f"On several machines set {variable}={better}.",
        )
    faster = [o for o in others if o.mbits and one.mbits and o.mbits > one.mbits and o.kind == "ethernet"]
    if faster:
        best = max(faster, key=lambda o: o.mbits or 0)
        yield Finding(
            WARNING,
            "slower-interface",
            f"{choice.title} will use {one.name} at {one.mbits} Mbit/s, while {best.name} has {best.mbits}.",
            f"If {best.name} leads to the other machines too, set {variable}={best.name}.",
        )
    elif (
        others
        and variable not in facts.environment
        and facts.default_route not in (None, one.name)
        and not one.name.startswith("ib")  # InfiniBand is meant for this, and has no default route
    ):
        yield Finding(
            NOTE,
            "not-the-default-route",
            f"{choice.title} will use {one.name}, while {facts.default_route} leads to the rest of the world.",
            f"Make sure that the other machines are behind {one.name}, or set {variable}.",
        )


def _names(setting: Setting) -> Iterator[Finding]:
    host, master = setting.facts.hostname, setting.facts.master
    if host.seconds > _SLOW_LOOKUP:
        yield Finding(
            WARNING,
            "slow-name",
            f"Looking up this machine's own name, {host.name}, took {host.seconds:.1f} s, and every process group "
            "does it.",
            f"Add a line with its address and {host.name} to /etc/hosts.",
        )
    if not host.addresses and not setting.gloo.problem and "GLOO_SOCKET_IFNAME" not in setting.facts.environment:
        yield Finding(
            WARNING,
            "hostname-unknown",
            f"This machine's own name, {host.name}, has no address ({host.error or 'none'}), so Gloo falls back on "
            "127.0.0.1.",
            f"Add a line with its address and {host.name} to /etc/hosts, or set GLOO_SOCKET_IFNAME.",
        )
    if master is None:
        return
    if not master.addresses:
        yield Finding(
            ERROR,
            "master-unknown",
            f"MASTER_ADDR={master.name} has no address ({master.error or 'none'}).",
            "Give rank 0's address as a number, or a name that every machine can look up.",
        )
    elif setting.several and is_loopback(master.addresses[0]):
        yield Finding(
            ERROR,
            "master-loopback",
            f"MASTER_ADDR={master.name} leads to {master.addresses[0]}: on every machine but rank 0's, that is the "
            "machine itself.",
            "Start torchrun with --master-addr (or --rdzv-endpoint) and rank 0's address on the network.",
        )
    if master.seconds > _SLOW_LOOKUP:
        yield Finding(
            WARNING,
            "slow-name",
            f"Looking up MASTER_ADDR={master.name} took {master.seconds:.1f} s.",
            "Give its address as a number, or add it to /etc/hosts.",
        )


def _differences(setting: Setting) -> Iterator[Finding]:
    gloo, nccl = setting.gloo, setting.nccl
    if nccl and not (gloo.problem or nccl.problem) and set(gloo.interfaces) != set(nccl.interfaces[:1]):
        yield Finding(
            NOTE,
            "two-interfaces",
            f"Gloo will use {', '.join(gloo.interfaces) or gloo.address}, NCCL {', '.join(nccl.interfaces)}.",
            "If that is not intended, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the same interface.",
        )
    if ":" in gloo.address and not gloo.loopback:
        yield Finding(
            NOTE,
            "ipv6",
            f"Gloo will listen on an IPv6 address, {gloo.address}, because {gloo.why}.",
            "All machines must reach one another by IPv6; for IPv4 let the name lead to an IPv4 address first.",
        )


def _others(setting: Setting) -> list[str]:
    """Return interfaces that could reach other machines: up, with an address; default route first, Ethernet next."""
    facts = setting.facts
    usable = [one for one in facts.interfaces if one.up and one.addresses and one.kind != "loopback"]
    kinds = ("ethernet", "wireless", "tunnel", "virtual", "bridge")
    usable.sort(key=lambda one: (one.name != facts.default_route, kinds.index(one.kind) if one.kind in kinds else 9))
    return [one.name for one in usable]
