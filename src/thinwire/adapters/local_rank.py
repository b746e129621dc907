"""A rank under local steps, as a framework's checkpoint sees it: with the model and the optimizers that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from thinwire.adapters.ddp_group import any_rank
from thinwire.engine.local_sync import LocalSync
from thinwire.engine.state import local_persistence
from thinwire.program import State


class LocalRank:
    """Of one LocalSync. Its state is that of ``LocalSync``, and ``own/<rank>``: weights and the optimizers' states.

    Args:
        sync: of this rank.
        group: that of DDP; None: there is one rank.

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
        """DDP's."""
        assert self._group is not None
        return self._group

    def agree(self, flag: bool) -> bool:
        """Whether any rank raises the flag; equal on all ranks."""
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
        """The outer weights are in the model inside this context."""
        stack = ExitStack()
        if self._lent is None:
            self.lend()
            stack.callback(self.take_back)
        return stack

    def state_dict(self) -> dict[str, Any]:
        """All of this rank."""
        return self.sync.state_dict() | {f"own/{self.state.rank}": self.own()}

    def own(self) -> dict[str, Any]:
        """Weights and the optimizers' states."""
        assert self._lent is None
        services = self.sync.services
        return {"model": services.model.state_dict(), "optimizers": [o.state_dict() for o in services.optimizers]}

    def put(self, own: Mapping[str, Any]) -> None:
        """Take over what ``own`` has returned."""
        services = self.sync.services
        services.model.load_state_dict(own["model"])
        for optimizer, one in zip(services.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(one)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over this rank's state, or the union of all ranks'; on another number of ranks, begin again.

        Raises:
            ValueError: it is no such state, or does not fit.
        """
        state, rank = dict(saved), self.state.rank
        same = int(state.get("world_size", 0)) == self.state.size
        if same and f"own/{rank}" in state:
            state["rank"] = rank
        fitting = local_persistence.fitting(self.sync, state)
        self.put(state[f"own/{rank if same else 0}"])
        fitting.restore()
