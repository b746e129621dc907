"""Two ways to sum over nodes, as sub-programs: ``total = yield from torus(x, state)``; both own ``x``.

Papers: the three-phase all-reduce of Jia et al.: Highly scalable deep learning training system, arXiv 1807.11205; the
2-D torus of Mikami et al., arXiv 1811.05233. With M bytes and m nodes of n ranks that share one network card, the flat
ring sends 2 (mn - 1) / mn M through each card. The torus sends 2 (m - 1) / m M, in n columns at once; three-phase sends
the same, from one rank of each node.

Differences from the papers: the language has no reduce-to-one, so phase one is an all-reduce, of which only the
leader's copy is used; with one node, or one rank on each node, the sum is one all-reduce over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program import CROSS, NODE, AllGather, AllReduce, Broadcast, ReduceScatter, State, Topology

Exchange = Generator[Any, Tensor, Tensor]
_THRESHOLD = "threshold:"


def three_phase(x: Tensor, state: State) -> Exchange:
    """Sum in the node, then over the nodes' first ranks; then broadcast in the node."""
    x = yield AllReduce(x, NODE)
    if state.topology.local_rank(state.rank) == 0:
        x = yield AllReduce(x, CROSS)
    return (yield Broadcast(x, NODE))


def torus(x: Tensor, state: State) -> Exchange:
    """Reduce-scatter in the node; sum parts over nodes; all-gather in the node. Uneven nodes: ``ValueError``."""
    topology, size, shape = state.topology, x.numel(), x.shape
    if not topology.uniform:
        raise ValueError(
            f"the torus needs the same number of ranks on every node, not {list(topology.layout)}: "
            'use collective="three_phase"'
        )
    shard = yield ReduceScatter(padded(x, topology.layout[0]), NODE)
    shard = yield AllReduce(shard, CROSS)
    everyone = yield AllGather(shard, NODE)
    return everyone.reshape(-1)[:size].view(shape)


def one_level(topology: Topology) -> bool:
    """Return whether there is no hierarchy: one node, or one rank on each node."""
    return topology.nodes == 1 or max(topology.layout) == 1


def padded(x: Tensor, ranks: int) -> Tensor:
    """Return ``x`` as 1-D, padded with zeros to a multiple of ``ranks``; copied only if it must be padded."""
    x, missing = x.reshape(-1), -x.numel() % ranks
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


CHOICES = ("flat", "three_phase", "torus")
"""The sub-programs of a sum, by name; "flat" is one all-reduce."""


def check_collective(collective: Any, *, deterministic: bool = False) -> None:
    """Refuse all but a sub-program, "auto" or "threshold:<MB>"; a hierarchy does not sum in rank order."""
    known = isinstance(collective, str) and (collective in CHOICES or collective == "auto")
    if not known and not (isinstance(collective, str) and _limit_bytes(collective) is not None):
        names = ", ".join(map(repr, CHOICES))
        raise ValueError(f"collective={collective!r} is unknown; use one of {names}, 'auto' or 'threshold:<MB>'")
    if deterministic and collective != "flat":
        raise ValueError(f'deterministic=True adds in rank order, which collective={collective!r} does not: use "flat"')


def collective_of(collective: str, size: int) -> str:
    """Return the sub-program for a message of ``size`` elements.

    "threshold:<MB>" is the published rule: hierarchical up to this size (10^6 bytes, at four per element whatever is
    sent), a flat ring above. "auto" is flat if no plan has decided.
    """
    limit = _limit_bytes(collective)
    if limit is not None:
        return "three_phase" if 4 * size <= limit else "flat"
    return "flat" if collective == "auto" else collective


def over_nodes(collective: str, size: int, topology: Topology) -> Callable[[Tensor, State], Exchange] | None:
    """Return the sub-program by which to sum ``size`` elements; None: one all-reduce does it."""
    way = collective_of(collective, size)
    if way == "flat" or one_level(topology):
        return None
    return torus if way == "torus" else three_phase


def _limit_bytes(collective: str) -> float | None:
    if not collective.startswith(_THRESHOLD):
        return None
    try:
        limit = float(collective.removeprefix(_THRESHOLD)) * 1e6
    except ValueError:
        return None
    return limit if 0 < limit < float("inf") else None
