"""A rank with local steps, as a framework's checkpoint sees it: with its own model and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from thinwire.adapters.ddp_group import any_rank
from thinwire.core.program import State
from thinwire.engine.local_sync import LocalSync
from thinwire.engine.state import local_persistence


class LocalRank:
    """The rank of one LocalSync. Its state is that of ``LocalSync`` plus ``own/<rank>``: weights and optimizer states.

    Args:
        sync: the LocalSync of this rank.
        group: DDP's process group; None: there is one rank.

    Attributes:
        sync: as above.
    """

    def __init__(self, sync: LocalSync, group: dist.ProcessGroup | None) -> None:
        self.sync, self._group = sync, group
        self._lent: ExitStack | None = None

    @property
    def state(self) -> State:
        return self.sync.services.state

    @property
    def process_group(self) -> dist.ProcessGroup:
        """DDP's process group."""
        assert self._group is not None
        return self._group

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raises the flag; equal on all ranks."""
        return flag if self._group is None else any_rank(flag, self._group)

    def lend(self) -> None:
        """Put the outer weights into the model until ``take_back``. Idempotent."""
        if self._lent is None:
            self._lent = ExitStack()
            self._lent.enter_context(self.sync.outer_weights())

    def take_back(self) -> None:
        """Put this rank's own weights back, if others are lent."""
        if self._lent is not None:
            lent, self._lent = self._lent, None
            lent.close()

    def outer(self) -> ExitStack:
        """Return a context in which the model has the outer weights."""
        stack = ExitStack()
        if self._lent is None:
            self.lend()
            stack.callback(self.take_back)
        return stack

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's complete state."""
        return self.sync.state_dict() | {f"own/{self.state.rank}": self.own()}

    def own(self) -> dict[str, Any]:
        """Return weights and optimizer states."""
        assert self._lent is None
        services = self.sync.services
        return {"model": services.model.state_dict(), "optimizers": [o.state_dict() for o in services.optimizers]}

    def put(self, own: Mapping[str, Any]) -> None:
        """Load what ``own`` returned."""
        services = self.sync.services
        services.model.load_state_dict(own["model"])
        for optimizer, one in zip(services.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(one)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's state, or the union of all ranks'; on another number of ranks, begin again.

        Raises:
            ValueError: it is not such a state, or does not fit.
        """
        state, rank = dict(saved), self.state.rank
        same = int(state.get("world_size", 0)) == self.state.size
        if same and f"own/{rank}" in state:
            state["rank"] = rank
        fitting = local_persistence.fitting(self.sync, state)
        self.put(state[f"own/{rank if same else 0}"])
        fitting.restore()
