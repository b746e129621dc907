"""Costs of exchanges and compute on this cluster: measured curves, and formulas for what was not measured.

The formulas are those of rings, of Gloo's algorithms and of NCCL's trees: a cost is ``startups * a + copies * bytes *
b``, with a = seconds per message on the link and b = seconds per byte. ``bytes`` is the size of ONE rank's message as
``program.trace`` gives it: for AllReduce the tensor, for ReduceScatter the whole [W*k] input, for AllToAll the whole
[W, ...] input, for AllGather the part that this rank contributes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

from thinwire.core.checks import check_choice, check_number
from thinwire.core.pricing.wire_model import turns
from thinwire.core.program.ops import Scope
from thinwire.core.records import Record

KINDS = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Exchange")
"""The operations that can be priced, named as in ``program.ops``."""


def startups(kind: str, members: int) -> int:
    others = members - 1
    if kind == "AllReduce":
        return 2 * others
    if kind in ("ReduceScatter", "AllGather", "AllToAll"):
        return others
    if kind == "Broadcast":  # a binomial tree
        return math.ceil(math.log2(members))
    if kind == "Exchange":
        return min(1, others)
    raise ValueError(f"{kind!r} is not an operation; use one of {', '.join(KINDS)}")


def copies(kind: str, members: int, sharing: int = 1) -> float:
    """Return how many times the message's bytes cross the busiest link, of a card that ``sharing`` ranks share.

    One edge of a ring leaves each machine, however many ranks that has; in an all-to-all, every pair of ranks on two
    machines sends across.
    """
    others = members - 1
    if kind == "AllReduce":
        return 2 * others / members
    if kind == "ReduceScatter":
        return others / members
    if kind == "AllToAll":
        if members <= sharing:  # all on one machine
            return others / members
        return sharing * (members - sharing) / members
    if kind == "AllGather":
        return others
    if kind == "Broadcast":
        return math.ceil(math.log2(members))
    if kind == "Exchange":
        return min(1, others)
    raise ValueError(f"{kind!r} is not an operation; use one of {', '.join(KINDS)}")


def tree(a: float, b: float, members: int) -> tuple[float, float]:
    """Return start-up seconds and seconds per byte of an all-reduce along trees that share the links: up, then down.

    Every rank sends the message twice, cut into pieces that are pipelined (:class:`RingOrTree`).
    """
    return 2 * math.ceil(math.log2(members)) * a, 2 * b


Provenance: TypeAlias = Literal["measured here", "measured elsewhere", "assumed"]


@dataclass(frozen=True)
class Linear:
    """A start-up time plus a rate.

    Attributes:
        startup_seconds: time of a message of any size.
        seconds_per_byte: time of one byte. (Compute curves may count elements or FLOPs instead: ``Costs.compute``.)
        source: provenance in free text.
        travel_seconds: of the start-up, while it is on the wire and others may already be sent.
    """

    startup_seconds: float
    seconds_per_byte: float
    provenance: Provenance = "assumed"
    source: str = ""
    travel_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_number("startup_seconds", self.startup_seconds, least=0)
        check_number("seconds_per_byte", self.seconds_per_byte, least=0)
        check_choice("provenance", self.provenance, get_args(Provenance))

    def __call__(self, size: float) -> float:
        return self.startup_seconds + self.seconds_per_byte * size

    def stretched(self, startup: float, rest: float, source: str) -> Linear:
        """Return a guess: the start-up times one factor, the rest times another."""
        travels = self.travel_seconds * startup
        return Linear(self.startup_seconds * startup, self.seconds_per_byte * rest, "assumed", source, travels)


@dataclass(frozen=True)
class Table:
    """Measured points with straight lines between them: constant below the first, the last slope beyond the last.

    Attributes:
        points: (bytes, seconds), bytes ascending.
    """

    points: tuple[tuple[float, float], ...]
    provenance: Provenance = "assumed"
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        if not self.points:
            raise ValueError("points must not be empty")
        for i, (size, seconds) in enumerate(self.points):
            check_number(f"points[{i}] bytes", size, least=0)
            check_number(f"points[{i}] seconds", seconds, least=0)
            if i and size <= self.points[i - 1][0]:
                raise ValueError(f"points[{i}]: bytes must ascend, {size:g} follows {self.points[i - 1][0]:g}")
        check_choice("provenance", self.provenance, get_args(Provenance))

    def __call__(self, size: float) -> float:
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        i = min(bisect.bisect_left(points, (size,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        if size > x1:  # a falling last segment is noise; extrapolated, it would become negative
            return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (size - x1)
        return y0 + (y1 - y0) * ((size - x0) / (x1 - x0))

    @property
    def travel_seconds(self) -> float:
        """Of a message, the time on the wire, while others may be sent: of a long wire, all of the smallest message."""
        return self.points[0][1] if self.points[0][1] >= _LONG_SECONDS else 0.0

    def stretched(self, startup: float, rest: float, source: str) -> Table:
        """Return a guess: the first point's time, as start-up, times one factor, the rest times another."""
        first = self.points[0][1]
        points = tuple((x, max(0.0, first * startup + (y - first) * rest)) for x, y in self.points)
        return Table(points, "assumed", source)


@dataclass(frozen=True)
class RingOrTree:
    """The cheaper of ring and tree (as if nothing waited for a piece), between which NCCL chooses by size.

    A tree passes pieces on. With pieces of n bytes, S bytes to send and D steps from the leaves to the root and back,
    there are D + S / n steps, each with a start-up and a piece. With the best n they take (sqrt(D a) + sqrt(S b))^2.
    """

    ring: Linear
    tree: Linear

    @property
    def provenance(self) -> Provenance:
        return self.ring.provenance

    @property
    def source(self) -> str:
        return self.ring.source

    def __call__(self, size: float) -> float:
        rest = self.tree.seconds_per_byte * size
        return min(self.ring(size), (math.sqrt(self.tree.startup_seconds) + math.sqrt(rest)) ** 2)

    def stretched(self, startup: float, rest: float, source: str) -> RingOrTree:
        return RingOrTree(self.ring.stretched(startup, rest, source), self.tree.stretched(startup, rest, source))


_LONG_SECONDS = 0.004  # that the smallest message takes only on a long wire

Curve: TypeAlias = Linear | Table | RingOrTree


Key = tuple[str, str, int]
"""(operation, scope, members), for example ("AllReduce", "world", 16)."""

_SCOPES = tuple(scope.value for scope in Scope)
_NOTHING = Linear(0.0, 0.0, "assumed", "a group of one sends nothing")


@dataclass(frozen=True)
class Costs(Record):
    """Cost curves by name. Plain data that is printed, hashed, broadcast and pinned.

    Attributes:
        exchanges: (operation, scope, members) -> seconds as a function of one rank's message bytes, see
            :func:`copies`.
        compute: name -> seconds. "select": of fp32 elements; "memory": of bytes read or written; "multiply" and
            "orthogonalise": of FLOPs; "thin": a product with few columns, of the large matrix's elements; other names
            as defined by whoever writes them. Read ``seconds_per_byte`` accordingly.
        cpu_share: operation -> CPU seconds, by message bytes, that are taken from compute (Gloo); absent: none.
    """

    called: ClassVar[str] = "a file of thinwire costs"

    exchanges: Mapping[Key, Curve]
    compute: Mapping[str, Curve] = field(default_factory=dict)
    cpu_share: Mapping[str, Linear] = field(default_factory=dict)
    _scaled: dict[Key, Curve] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind, scope, members in self.exchanges:
            if kind not in KINDS or scope not in _SCOPES or members < 1:
                raise ValueError(
                    f"exchanges: ({kind!r}, {scope!r}, {members}) is not of the form (operation, scope, members)"
                )
        for kind in self.cpu_share:
            if kind not in KINDS:
                raise ValueError(f"cpu_share: {kind!r} is not an operation; use one of {', '.join(KINDS)}")
        for name in ("exchanges", "compute", "cpu_share"):  # own copies, in one order
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))

    def __hash__(self) -> int:
        return hash(self.to_json())

    def lookup(self, kind: str, scope: Scope | str, members: int) -> Curve:
        """Return the curve of an operation, with its provenance.

        An operation that was not measured is scaled by the formulas from the nearest curve (same scope first, then same
        operation, then the closest number of members) and marked "assumed".

        Raises:
            LookupError: there is nothing to scale from.
        """
        place = scope.value if isinstance(scope, Scope) else scope
        key = (kind, place, members)
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not an operation; use one of {', '.join(KINDS)}")
        if members <= 1:
            return _NOTHING
        if key in self.exchanges:
            return self.exchanges[key]
        if key not in self._scaled:
            self._scaled[key] = self._from_nearest(key)
        return self._scaled[key]

    def _from_nearest(self, key: Key) -> Curve:
        kind, place, members = key
        known = [other for other in self.exchanges if other[2] > 1]
        if not known:
            raise LookupError(
                f"no curve from which to price {kind} in a {place} of {members}: the costs hold no exchange"
            )
        near = min(known, key=lambda k: (k[1] != place, k[0] != kind, abs(math.log(k[2] / members)), k[2], k))
        source = "scaled from {} in a {} of {}".format(*near)
        startup = startups(kind, members) / startups(near[0], near[2])
        rest = copies(kind, members) / copies(near[0], near[2])
        curve = self.exchanges[near]
        if not isinstance(curve, RingOrTree):
            return curve.stretched(startup, rest, source)
        ring = curve.ring.stretched(startup, rest, source)
        if kind != "AllReduce":
            return ring
        depth = tree(1.0, 1.0, members)[0] / tree(1.0, 1.0, near[2])[0]
        return RingOrTree(ring, curve.tree.stretched(depth, 1.0, source))

    def seconds(self, kind: str, scope: Scope | str, members: int, message_bytes: float, share: float = 1.0) -> float:
        """Return the time of one exchange; ``message_bytes`` is one rank's, as ``program.trace`` gives it.

        ``share``: fraction of a node's ranks that cross at once; the curves assume all of them on one network card.
        """
        curve = self.lookup(kind, scope, members)
        return (curve if share == 1.0 else curve.stretched(1.0, share, curve.source))(message_bytes)

    def travel_seconds(self, kind: str, scope: Scope | str, members: int) -> float:
        """Return how much of an exchange's time leaves the link free for others."""
        curve = self.lookup(kind, scope, members)
        return (curve.ring if isinstance(curve, RingOrTree) else curve).travel_seconds

    def compute_seconds(self, name: str, amount: float) -> float:
        """Return the time of a computation (``amount`` in the curve's unit), or raise ``LookupError``."""
        if name not in self.compute:
            raise LookupError(f"the costs hold no curve {name!r}, only {', '.join(self.compute) or 'none'}")
        return self.compute[name](amount)

    def cpu_seconds(self, kind: str, message_bytes: float) -> float:
        """Return the CPU seconds that an exchange takes from compute."""
        share = self.cpu_share.get(kind)
        return share(message_bytes) if share else 0.0

    @classmethod
    def of_link(
        cls,
        bits_per_second: float,
        latency_seconds: float,
        workers: int,
        ranks_per_node: int = 1,
        *,
        efficiency: float = 0.94,
        node_bits_per_second: float = 40e9,
        node_latency_seconds: float = 20e-6,
        trees: bool = False,
        delay_seconds: float = 0.0,
        compute: Mapping[str, Curve] | None = None,
        cpu_share: Mapping[str, Linear] | None = None,
    ) -> Costs:
        """Build assumed costs from a link's data sheet, with the ring formulas.

        Args:
            bits_per_second: line rate of one machine's network card; its ranks share it.
            latency_seconds: start-up of one message.
            efficiency: share of the line rate that the payload gets.
            node_bits_per_second, node_latency_seconds: between ranks of one machine.
            trees: sums may also use trees where that is cheaper, as in NCCL; Gloo always uses rings.
            delay_seconds: what a message takes beyond its start-up from one machine to another; one way.
            compute: compute curves; None means ``assumed_compute()``.

        Raises:
            ValueError: a number out of range, or workers that do not fill the machines.
        """
        for name, value in (("bits_per_second", bits_per_second), ("node_bits_per_second", node_bits_per_second)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency must be in (0, 1], not {efficiency}")
        check_number("latency_seconds", latency_seconds, least=0)
        check_number("node_latency_seconds", node_latency_seconds, least=0)
        check_number("delay_seconds", delay_seconds, least=0)
        if workers < 1 or ranks_per_node < 1 or workers % ranks_per_node:
            raise ValueError(f"{workers} workers cannot be placed {ranks_per_node} per node")
        outer, inner = 8 / (bits_per_second * efficiency), 8 / node_bits_per_second
        if workers == ranks_per_node:
            world = (node_latency_seconds, inner)
        else:  # a ring is as fast as its slowest edge
            world = (latency_seconds, outer if ranks_per_node == 1 else max(outer, inner))
        # Members, start-up, seconds per byte, ranks that share the card. One group per local rank crosses at a time.
        groups = {
            "world": (workers, *world, ranks_per_node),
            "node": (ranks_per_node, node_latency_seconds, inner, ranks_per_node),
            "cross": (workers // ranks_per_node, latency_seconds, outer * ranks_per_node, 1),
        }
        way = "ring and tree formulas" if trees else "ring formulas"
        source = f"{bits_per_second / 1e9:g} Gbit/s at {efficiency:.0%}, {latency_seconds * 1e6:g} us, {way}"
        if delay_seconds:
            source += f", {delay_seconds * 1e3:g} ms from machine to machine"
        exchanges: dict[Key, Curve] = {}
        for scope, (members, a, b, sharing) in groups.items():
            for kind in KINDS if members > 1 else ():
                rest = b * copies(kind, members, sharing)
                begins, far = startups(kind, members), 0.0
                if scope != "node" and workers > ranks_per_node:
                    far = delay_seconds * (begins if trees else turns(kind, members, begins))
                # What is on the wire keeps NCCL's next exchange waiting, not that of Gloo's ranks.
                ring = Linear(a * begins + far, rest, "assumed", source, 0.0 if trees else far)
                along = Linear(*tree(a + delay_seconds * (scope != "node"), b, members), "assumed", source)
                both = trees and kind == "AllReduce"
                exchanges[kind, scope, members] = RingOrTree(ring, along) if both else ring
        return cls(exchanges, assumed_compute() if compute is None else compute, cpu_share or {})


def assumed_compute(memory_bytes_per_second: float = 10e9, flops: float = 1e11) -> dict[str, Curve]:
    """Return compute curves from a device's data sheet; the defaults are those of a few CPU cores.

    Selection counts as 8 passes over fp32 elements plus a start-up of 60 us; orthogonalisation runs at a tenth of the
    FLOP/s.
    """
    for name, value in (("memory_bytes_per_second", memory_bytes_per_second), ("flops", flops)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")
    rates = f"{memory_bytes_per_second / 1e9:g} GB/s, {flops / 1e9:g} GFLOP/s"
    return {
        "memory": Linear(0.0, 1 / memory_bytes_per_second, "assumed", rates),
        "select": Linear(60e-6, 32 / memory_bytes_per_second, "assumed", f"8 passes at {rates}"),
        "multiply": Linear(0.0, 1 / flops, "assumed", rates),
        "thin": Linear(0.0, 4 / memory_bytes_per_second, "assumed", f"one pass at {rates}"),
        "orthogonalise": Linear(0.0, 10 / flops, "assumed", f"a tenth of {rates}"),
    }
