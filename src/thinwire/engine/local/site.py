"""The ranks of one site, over which one copy of a model is sharded; rounds are between sites, shard by shard.

What every rank decides by itself where it holds a whole model, the ranks of a site decide together: whether all values
are finite, and what follows from measured times. Then all shards of a site are sent, merged or dropped together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.exchange import Lane
from thinwire.engine.ranks.agreement import gather_bytes

WHOLE = "whole"
"""The place of a rank that has all of its model."""


class Site:
    """``groups``: of this rank, one along each dimension of the mesh over which its site has sharded the model.

    Without groups this rank is the site, and has the whole model.

    ``changed``: to be called after shards were changed outside a training step: whole weights are gathered anew.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device, changed: Callable[[], None]) -> None:
        self.changed, self.groups = changed, groups
        self._lanes = [Lane(one, tuple(dist.get_process_group_ranks(one)), dist.get_rank(one)) for one in groups]
        self._device = device

    @property
    def place(self) -> str:
        """Return which of its site's shards this rank has, such as ``0of2``."""
        return "x".join(f"{lane.rank}of{lane.size}" for lane in self._lanes) or WHOLE

    @property
    def size(self) -> int:
        return math.prod(lane.size for lane in self._lanes)

    def agree(self, flag: Tensor) -> Tensor:
        """Return whether the flag, a 0-dim bool tensor, is true on all ranks of the site.

        Raises:
            ConnectionError: a rank of the site is gone, and with it a part of the model.
        """
        return self.least(flag.to(torch.int32)).bool()

    def least(self, value: Tensor) -> Tensor:
        """Return the least value of the site's ranks; ``ConnectionError`` as ``agree``."""
        told = value.to(self._device)
        try:
            for lane in self._lanes:
                dist.all_reduce(told, dist.ReduceOp.MIN, group=lane.group)
        except RuntimeError as error:
            raise ConnectionError(
                "another rank of this site has stopped, and a part of the model with it, so this rank stops too: start "
                "all ranks of the site again"
            ) from error
        return told

    def gather(self, rows: list[bytes]) -> list[bytes]:
        """Return the rows of all ranks of the site."""
        for lane in self._lanes:
            told = json.dumps([row.decode("latin-1") for row in rows]).encode()
            rows = [row.encode("latin-1") for one in gather_bytes(told, lane, self._device) for row in json.loads(one)]
        return rows
