"""Whether the interface in use is as good as it could be: losses, rate, packet size, TCP buffers."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.tools.doctor.findings import NOTE, WARNING, Finding, Setting

_BROKEN, _DROPPED = 1e-3, 1e-2  # of the packets; the kernel also counts unwanted packets as dropped
_AGAIN = 1e-2  # of the segments
_COUNTED = 10_000  # packets: with fewer, a share means nothing
_BUFFER = 4 << 20  # bytes: fills 1 Gbit/s over 32 ms, 10 Gbit/s over 3 ms


def quality(setting: Setting) -> Iterator[Finding]:
    """Yield all findings of this file."""
    facts, one = setting.facts, setting.interface
    if one is not None and one.kind != "loopback":
        if one.packets >= _COUNTED and (one.errors > _BROKEN * one.packets or one.drops > _DROPPED * one.packets):
            yield Finding(
                WARNING,
                "losses",
                f"{one.name} has lost {one.errors + one.drops} of {one.packets} packets ({one.errors} errors, "
                f"{one.drops} "
                "dropped); TCP slows down at each loss.",
                f"Errors: change cable, port or driver. Drops: enlarge the rings (`ethtool -G {one.name}`), look at "
                "the load.",
            )
        if one.kind == "wireless":
            yield Finding(
                WARNING,
                "wireless",
                f"{one.name} is a wireless interface: its rate varies, and all its stations share it.",
                "Use a cable; if there is none, plan with half the rate that `thinwire probe` finds.",
            )
        if one.mbits is not None and one.mbits <= 100 and one.kind == "ethernet":
            yield Finding(
                WARNING,
                "slow-link",
                f"{one.name} runs at {one.mbits} Mbit/s, most likely less than its card can do.",
                "Look at the cable and at the switch's port; `ethtool` lists what both ends offer.",
            )
        if one.mbits is not None and one.mbits >= 10_000 and one.mtu is not None and one.mtu <= 1500:
            yield Finding(
                NOTE,
                "small-packets",
                f"{one.name} runs at {one.mbits} Mbit/s with packets of {one.mtu} bytes: the processor works harder "
                "than it needs to.",
                f"If all machines and switches allow it: `ip link set {one.name} mtu 9000`; measure with `thinwire "
                "probe`.",
            )
    if facts.segments >= _COUNTED and facts.retransmitted > _AGAIN * facts.segments:
        yield Finding(
            WARNING,
            "retransmissions",
            f"TCP has sent {facts.retransmitted} of {facts.segments} segments twice since this machine started: "
            "packets are lost on the way.",
            "Look for a port or link that is overloaded or broken, between this machine and those it talks to.",
        )
    small = [name for name in ("tcp_rmem", "tcp_wmem") if 0 < _largest(facts.tcp.get(name, "")) < _BUFFER]
    if small:
        values = ", ".join(f"net.ipv4.{name} ends at {_largest(facts.tcp[name])}" for name in small)
        settings = " ".join(f'net.ipv4.{name}="4096 131072 {4 * _BUFFER}"' for name in small)
        yield Finding(
            NOTE,
            "small-buffers",
            f"TCP's buffers are small ({values} bytes): on links that are fast and long one connection cannot fill "
            "them.",
            f"`sysctl -w {settings}`; compare with `thinwire probe`.",
        )


def _largest(triple: str) -> int:
    """Return the last number of such a setting."""
    last = (triple.split() or [""])[-1]
    return int(last) if last.isdecimal() else 0
