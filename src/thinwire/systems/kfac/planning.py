"""The plan of a running K-FAC: the first from costs, a second from measured times."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from thinwire.core.pricing.costs import Costs
from thinwire.engine.sync import GradientSync
from thinwire.systems.kfac.capture import Capture
from thinwire.systems.kfac.measured import agreed_times, measured_costs
from thinwire.systems.kfac.plan import FactorLayer, KFACPlan
from thinwire.systems.kfac.schedules import Choices, make_plan

logger = logging.getLogger("thinwire")


class Planning:
    """Makes the plans of one :class:`KFAC`, equal on all ranks.

    Args:
        ranks: the sync; None: a single process.
        shapes: of the layers.
        choices: how a schedule is planned.

    Attributes:
        again: whether a second plan is still to be made.
    """

    def __init__(self, ranks: GradientSync | None, shapes: tuple[FactorLayer, ...], choices: Choices) -> None:
        self._ranks, self._shapes, self._choices = ranks, shapes, choices
        self._costs = Costs({})
        self.again = False

    def first(
        self, pinned: KFACPlan | None, costs: Costs | None, device: torch.device, facts: Mapping[str, Any]
    ) -> KFACPlan:
        """Return the pinned plan, or one made from costs, measured if needed. Agree on it and on ``facts``.

        Raises:
            ValueError: the plan does not fit the model, or ranks disagree.
        """
        ranks, choices = self._ranks, self._choices
        world = ranks.services.topology.world_size if ranks is not None else 1
        self.again = pinned is None and ranks is not None and choices.prices_factors
        plan = pinned
        if plan is None:
            if ranks is not None and costs is None and (choices.prices_factors or choices.prices_inverses):
                costs = measured_costs(ranks, self._shapes, choices.method)
            self._costs = costs or self._costs
            plan = make_plan(self._shapes, world, choices, self._costs)
        if device.type == "cuda":  # two NCCL communicators must be used in one order on all ranks
            plan = replace(plan, overlap=False)
        plan.check(self._shapes, world, method=choices.method)
        if ranks is not None:
            ranks.services.agree_on({"K-FAC": {"plan": plan.to_json(), **facts}})
        return plan

    def second(self, plan: KFACPlan, capture: Capture) -> KFACPlan:
        """Plan once more, from the times of the second round: other messages, the same owners."""
        self.again = False
        assert self._ranks is not None
        times = agreed_times(self._ranks, capture, len(self._shapes))
        made = make_plan(plan.layers, plan.world_size, self._choices, self._costs, times)
        if self._ranks.services.rank == 0:
            logger.info(
                "thinwire: K-FAC: A in %d messages, G in %d, from measured times",
                len(made.a_buckets),
                len(made.g_buckets),
            )
        return replace(plan, a_buckets=made.a_buckets, g_buckets=made.g_buckets)
