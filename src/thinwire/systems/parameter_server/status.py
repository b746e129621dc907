"""What a server is doing, as one record: versions, staleness, and a row per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.systems.parameter_server.effects import Apply
from thinwire.systems.parameter_server.server import Server


@dataclass(frozen=True)
class NodeStatus:
    node: int
    member: int
    alive: int  # workers
    seen: int  # iteration number
    behind: int  # versions from the oldest base at work there to the server's version; -1: idle
    step_seconds: float  # of one of its workers
    up_bytes: int  # since it joined
    down_bytes: int
    cut: int = 0  # of its contributions that were longer than ``robust`` allows


@dataclass(frozen=True)
class ShardStatus:
    """The status of a shard: whether it has its weights, and the bytes from and to all nodes."""

    index: int
    there: bool
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True)
class Status:
    """What a server is doing.

    Attributes:
        version: number of updates applied. seconds: since this process began to serve.
        gradients: number applied. mean_staleness, max_staleness: in versions, of those applied since the start.
        counters: see :class:`Server`. up_bytes, down_bytes: of all nodes. loss: mean of what the workers last reported.
        shards: of the model; empty if the server holds all weights.
    """

    version: int
    seconds: float
    gradients: int
    mean_staleness: float
    max_staleness: int
    up_bytes: int
    down_bytes: int
    loss: float | None
    counters: dict[str, int] = field(default_factory=dict)
    nodes: tuple[NodeStatus, ...] = ()
    shards: tuple[ShardStatus, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Ages:
    count: int = 0
    total: int = 0
    most: int = 0

    def add(self, effect: Apply) -> None:
        for part in effect.contributions:
            for row in part.rows:
                tau = effect.version - row.base
                self.count, self.total, self.most = self.count + 1, self.total + tau, max(self.most, tau)


def status_of(
    machine: Server,
    ages: Ages,
    traffic: Mapping[int, tuple[int, int]],
    past: Sequence[int],
    seconds: float,
    shards: tuple[ShardStatus, ...] = (),
    cut: Mapping[int, int] | None = None,
) -> Status:
    """``traffic``: member -> bytes from it and to it; ``past``: the same for all members that have gone."""
    rows, members = [], list(machine.members.values())
    for member in members:
        up, down = traffic.get(member.number, (0, 0))
        oldest = min(member.low, member.buf_low)
        behind = machine.version - oldest if oldest <= machine.version else -1
        cuts = (cut or {}).get(member.number, 0)
        rows.append(
            NodeStatus(
                member.node, member.number, member.alive, member.seen, behind, member.step_us / 1e6, up, down, cuts
            )
        )
    rows.sort(key=lambda row: row.node)
    told = machine.settings.sync_every is None  # a loop of a user's says nothing of its loss
    samples = [(m.loss_sum, m.seen - m.dropped) for m in members if told and m.seen > m.dropped]
    total = sum(count for _, count in samples)
    return Status(
        version=machine.version,
        seconds=seconds,
        gradients=machine.counters["applied"],
        mean_staleness=ages.total / ages.count if ages.count else 0.0,
        max_staleness=ages.most,
        up_bytes=past[0] + sum(row.up_bytes for row in rows),
        down_bytes=past[1] + sum(row.down_bytes for row in rows),
        loss=sum(loss for loss, _ in samples) / total if total else None,
        counters=dict(machine.counters),
        nodes=tuple(rows),
        shards=shards,
    )
