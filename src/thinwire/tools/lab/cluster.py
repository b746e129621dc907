"""The shape of an emulated cluster: workers, nodes, their links; rates and delays in the syntax of ``tc``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from thinwire.core.words import counted

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z/]*)")
SLOWEST = 100 * 10**3
FASTEST = 10**12
LONGEST_DELAY = 10.0
CONGESTION_CONTROLS = ("cubic", "bbr", "reno")
"""What TCP may be asked to use on the links."""
_LARGEST_PACKET = 65536
_MOST_NODES = 1000  # a Linux bridge has 1023 ports


class LabError(ValueError):
    """The lab cannot do what was requested; the message is one sentence for the user."""


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate such as ``100mbit`` or ``2.5gbit``; also bit, kbit and tbit.

    Raises:
        LabError: the text is not a rate, or is outside 100kbit to 1tbit.
    """
    if "," in text and all(one.strip().lower().endswith("bit") for one in text.split(",")):
        raise LabError(f"link rate {text!r} is several, and here all links have the same one: give the slowest")
    match = _QUANTITY.fullmatch(text.strip().lower())
    number, unit = match.groups() if match else ("", "")
    if unit.endswith("bps"):
        meant = unit.removesuffix("bps") + "bit"
        raise LabError(
            f"link rate {text!r} is ambiguous ('bps' means bytes in tc, bits elsewhere): use {number}{meant}"
        )
    if unit not in _BITS:
        raise LabError(f"link rate {text!r} is not a number with bit, kbit, mbit, gbit or tbit: use 100mbit or 2.5gbit")
    rate = int(Decimal(number) * _BITS[unit])
    check_rate(rate, text)
    return rate


def check_rate(rate: int, text: str | None = None) -> None:
    if not SLOWEST <= rate <= FASTEST:
        raise LabError(
            f"link rate {text or format_rate(rate)!r} is outside {format_rate(SLOWEST)} to {format_rate(FASTEST)}: "
            "use for example 1gbit, or unlimited"
        )


def format_rate(rate: int | None) -> str:
    """Format bits per second as ``tc`` does (``1gbit``), so that `parse_rate` can read it; None gives ``unlimited``."""
    if rate is None:
        return "unlimited"
    for unit in ("tbit", "gbit", "mbit", "kbit"):
        value = Decimal(rate) / _BITS[unit]
        if value >= 1 and value == round(value, 3):
            return f"{value.normalize():f}{unit}"
    return f"{rate}bit"


def parse_delay(text: str) -> float:
    """Return the seconds of a delay such as ``200us``, ``1ms`` or ``0.05s``.

    Raises:
        LabError: the text is not a delay, or longer than ten seconds.
    """
    match = _QUANTITY.fullmatch(text.strip().lower())
    number, unit = match.groups() if match else ("", "")
    if number and Decimal(number) == 0 and not unit:
        return 0.0
    if unit not in _SECONDS:
        raise LabError(f"delay {text!r} is not a number with us, ms or s: use for example 1ms")
    seconds = float(Decimal(number) * _SECONDS[unit])
    if seconds > LONGEST_DELAY:
        raise LabError(f"delay {text!r} is longer than {LONGEST_DELAY:.0f}s: use for example 1ms")
    return seconds


def parse_loss(text: str) -> float:
    """Return the share of packets in a loss such as ``0.1%``.

    Raises:
        LabError: the text is not a percentage, or is 100 % or more.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%|0", text.strip())
    share = float(Decimal(match[1] or "0") / 100) if match else 1.0
    if share >= 1:
        raise LabError(f"loss {text!r} is not a percentage from 0% to below 100%: use for example 0.1%")
    return share


@dataclass(frozen=True)
class LinkSpec:
    """A node's link to the switch, the same in both directions.

    The bucket holds one millisecond of the rate. That is enough for a timer that wakes late on a busy machine, and too
    little for a small message to pass at memory speed. The queue behind it holds 50 ms, or twice what the link carries
    in a round trip if that is more, so that TCP fills the link with almost no loss of its own. Offloaded packets are
    limited to half a bucket: larger ones would be split inside the discipline, which costs much CPU time.

    Attributes:
        rate: bits per second; None means unlimited.
        delay_seconds: one-way delay from this node to any other, applied where the node sends.
        jitter_seconds: the delay of each packet is drawn from this much less to this much more, without a change of
            order: a packet waits for those before it.
        loss: share of the packets that this node sends which are lost.
    """

    rate: int | None = None
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self.rate)
        if not 0 <= self.delay_seconds <= LONGEST_DELAY:
            raise LabError(
                f"delay of {self.delay_seconds} s is outside 0 to {LONGEST_DELAY:.0f} s: use for example 1ms"
            )
        if not 0 <= self.jitter_seconds <= self.delay_seconds:
            delay = format_seconds(self.delay_seconds)
            raise LabError(
                f"jitter of {format_seconds(self.jitter_seconds)} is outside 0 to the delay, {delay}: "
                + (f"use at most {delay}" if self.delay_seconds else "give a delay too, such as --delay 25ms")
            )
        if not 0 <= self.loss < 1:
            raise LabError(f"loss of {self.loss:%} is outside 0% to below 100%: use for example 0.1%")

    @property
    def long(self) -> bool:
        """Whether packets take time or get lost, for which the link needs netem or the lab's relay."""
        return bool(self.delay_seconds or self.loss)

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket: what can pass at once after a pause."""
        return max(8192, min(16 << 20, (self.rate or 0) // 8000))

    @property
    def queue_bytes(self) -> int:
        """What can wait behind the bucket before packets are dropped."""
        seconds = max(0.05, 2 * 2 * self.delay_seconds)
        return self.burst_bytes + max(256 << 10, min(1 << 30, int((self.rate or 0) * seconds / 8)))

    @property
    def packet_bytes(self) -> int:
        """Largest offloaded packet that a sender on this link may pass to its interface."""
        return min(_LARGEST_PACKET, self.burst_bytes // 2) if self.rate else _LARGEST_PACKET

    def egress_of_node(self, device: str) -> list[str]:
        if not self.long:
            return self.egress_of_switch(device)
        words = f"qdisc add dev {device} root handle 1: netem limit 1000000"
        if self.delay_seconds:
            words += f" delay {max(1, round(self.delay_seconds * 1e6))}us"
        if self.jitter_seconds:  # only with a rate, which may be any, does netem keep the order of packets
            words += f" {max(1, round(self.jitter_seconds * 1e6))}us rate {FASTEST}bit"
        lines = [words + (f" loss {self.loss * 100:.7f}%" if self.loss else "")]
        return lines + [f"qdisc add dev {device} parent 1: handle 2: {self._bucket()}"] * (self.rate is not None)

    def egress_of_switch(self, device: str) -> list[str]:
        return [] if self.rate is None else [f"qdisc add dev {device} root {self._bucket()}"]

    def _bucket(self) -> str:
        return f"tbf rate {self.rate}bit burst {self.burst_bytes} limit {self.queue_bytes}"


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:g}ms"


@dataclass(frozen=True)
class Cluster:
    """An emulated cluster, valid by construction; ``links``, ``delays``, ...: one for all nodes, or one per node.

    Attributes:
        workers: total number of ranks.
        ranks_per_node: ranks that share a node, and so its link.
        links: bits per second; None means unlimited.
        delays: seconds of one-way delay from a node to any other, applied where it sends.
        jitters: seconds by which the delay of a packet may be shorter or longer.
        losses: share of the packets sent by a node which are lost.
        congestion: TCP's congestion control on the links; None: cubic, or reno where there is no cubic, and thinwire
            may ask for another.
    """

    workers: int
    ranks_per_node: int = 1
    links: tuple[int | None, ...] = (None,)
    delays: tuple[float, ...] = (0.0,)
    jitters: tuple[float, ...] = (0.0,)
    losses: tuple[float, ...] = (0.0,)
    congestion: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.ranks_per_node < 1:
            what = "workers" if self.workers < 1 else "ranks per node"
            raise LabError(f"{what} must be at least 1: use for example --workers 4 --ranks-per-node 1")
        if self.workers % self.ranks_per_node:
            raise LabError(
                f"{self.workers} workers are not a multiple of {self.ranks_per_node} ranks per node: "
                f"use for example --workers {math.ceil(self.workers / self.ranks_per_node) * self.ranks_per_node}"
            )
        if self.nodes > _MOST_NODES:
            raise LabError(
                f"{self.nodes} nodes are more than the {_MOST_NODES} that one bridge carries: use --ranks-per-node"
            )
        for name, example in (("links", "1gbit"), ("delays", "25ms"), ("jitters", "2ms"), ("losses", "0.1%")):
            if (count := len(getattr(self, name))) not in (1, self.nodes):
                several = ",".join([example] * min(self.nodes, 4)) + (",..." if self.nodes > 4 else "")
                raise LabError(
                    f"{count} {name} for {self.nodes} nodes: give one for all, or one per node such as {several}"
                )
        if self.congestion not in (None, *CONGESTION_CONTROLS):
            known = " or ".join([", ".join(CONGESTION_CONTROLS[:-1]), CONGESTION_CONTROLS[-1]])
            raise LabError(f"congestion control {self.congestion!r} is unknown: use {known}")
        for node in range(self.nodes):
            self.link(node)  # refuses an impossible rate or delay

    @classmethod
    def parse(
        cls,
        workers: int,
        ranks_per_node: int = 1,
        link: str | None = None,
        delay: str | float | None = None,
        jitter: str | None = None,
        loss: str | None = None,
        congestion: str | None = None,
    ) -> Cluster:
        """Parse a cluster from command-line arguments; each of a link's may be several, one per node, after commas.

        Args:
            workers: total number of ranks.
            ranks_per_node: ranks that share a node.
            link: ``1gbit``; ``unlimited``, ``none`` or None for no limit.
            delay: ``25ms``, or seconds as a number.
            jitter: ``2ms``.
            loss: ``0.1%``.
            congestion: ``cubic``, ``bbr`` or ``reno``.

        Raises:
            LabError: with one sentence on what is wrong.
        """
        links = tuple(
            None if word.lower() in ("unlimited", "none") else parse_rate(word) for word in _words(link, "unlimited")
        )
        delays = (float(delay),) if isinstance(delay, (int, float)) else tuple(map(parse_delay, _words(delay)))
        jitters, losses = tuple(map(parse_delay, _words(jitter))), tuple(map(parse_loss, _words(loss)))
        return cls(workers, ranks_per_node, links, delays, jitters, losses, congestion)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.workers // self.ranks_per_node

    def link(self, node: int) -> LinkSpec:
        """Return the link between this node and the switch."""
        delay, jitter, loss = (one[node if len(one) > 1 else 0] for one in (self.delays, self.jitters, self.losses))
        return LinkSpec(self.links[node if len(self.links) > 1 else 0], delay, jitter, loss)

    @property
    def wire(self) -> str:
        """The links in words, such as ``100mbit, delay 25ms, loss 0.1%, bbr``."""
        words = [",".join(map(format_rate, self.links))]
        for name, several in (("delay", self.delays), ("jitter", self.jitters)):
            words += [f"{name} {','.join(map(format_seconds, several))}"] * any(several)
        words += [f"loss {','.join(f'{100 * loss:g}%' for loss in self.losses)}"] * any(self.losses)
        return ", ".join(words + ([self.congestion] if self.congestion else []))

    def describe(self) -> str:
        """Return a short description, such as ``4 workers on 2 nodes, 1gbit``."""
        ranks, nodes = counted(self.workers, "worker"), counted(self.nodes, "node")
        return f"{ranks} on {nodes}, {self.wire.removesuffix(f', {self.congestion}')}"


def _words(text: str | None, none: str = "0") -> list[str]:
    return [word.strip() for word in (none if text is None else text).split(",")]
