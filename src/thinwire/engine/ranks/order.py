"""Check that all ranks issue the same ops in the same order, for debugging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from thinwire.core.program import Collective, Scope, Topology


class OrderWatch:
    """Records every op per lane; the order between lanes is free.

    Args:
        topology: of the ranks.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lanes: dict[str, Any] = {}

    def note(self, op: Collective, scope: Scope, round_: int, bucket: int) -> None:
        """Record an op that is issued."""
        lane = self._lanes.setdefault(f"{scope.value}/{round_}", hashlib.blake2b(digest_size=8))
        lane.update(f"{bucket}/{type(op).__name__}/{op.tensor.numel()};".encode())

    def check(self, gather: Callable[[bytes], list[bytes]], step: int) -> None:
        """Raise ``RuntimeError`` unless all ranks have issued the same ops on each lane that they share."""
        mine = {name: digest.hexdigest() for name, digest in sorted(self._lanes.items())}
        everyone = gather(json.dumps(mine).encode())
        if len(set(everyone)) == 1:
            return
        lanes = [json.loads(text) for text in everyone]
        for rank, issued in enumerate(lanes):  # only the ranks of a lane must agree: a node's leader may issue more
            for name in issued:
                members = self._topology.members(Scope(name.split("/")[0]), rank)
                if len({lanes[other].get(name) for other in members}) > 1:
                    raise RuntimeError(f"the ranks have issued different collectives by step {step}")
