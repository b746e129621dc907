"""What of K-FAC few change: whose plan it follows, its statistics; and options that change while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.pricing.costs import Costs
from thinwire.systems.kfac.assignment import PlanMaker
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.published import named

Damping = float | Callable[[int], float]
Interval = int | Callable[[int], int]
Number = TypeVar("Number", int, float)
METHODS = ("inverse", "inverse_pi", "eigen")


@dataclass(frozen=True)
class Variant:
    """The options of :class:`~thinwire.kfac.KFAC` that few need.

    The published SPD-KFAC is ``Variant("spd-published", scaling="authors", warm_start="identity")``.

    Attributes:
        schedule: whose plans, by name: "spd" (what is cheapest), or one of :mod:`thinwire.kfac.published`: "dkfac",
            "mpd", "spd-published", "kaisa:<fraction>", "dp".
        wire_dtype: of the statistics that are sent, "fp32" (as they are) or "bf16".
        factor_decay: weight of the old factor in the running average, or "warmup".
        fisher: "empirical": gradients of the loss; "sampled": of targets sampled from the model, see
            ``KFAC.fisher_backward``.
        scaling: "reference", "authors" or "kaisa", see :mod:`thinwire.kfac.factors`.
        tokens: whether each position of a linear layer's input is a row ("expand"), or each example ("reduce"); None:
            "reduce" with ``scaling="authors"``, otherwise "expand".
        warm_start: "identity" begins with A = G = I, as published; None: begins with the first statistics.
        max_dim: layers with a larger factor are left to the optimizer.
        auto_step: ``step`` is called before the optimizers' steps; False: you call it.
        plan: a pinned plan, or what makes one from ``costs``, and once more from measured times; None: the schedule's.
        costs: as from ``thinwire probe`` and ``thinwire kfac calibrate``; None: measured, in some seconds, if the plan
            needs them.
        scaler: the ``GradScaler`` in use; None: the one that ``attach`` was given.

    Raises:
        ValueError: a value is unknown; the message lists the choices.
    """

    schedule: str = "spd"
    wire_dtype: str = "fp32"
    factor_decay: float | str = 0.95
    fisher: str = "empirical"
    scaling: str = "reference"
    tokens: str | None = None
    warm_start: str | None = None
    max_dim: int = 8192
    auto_step: bool = True
    plan: KFACPlan | PlanMaker | None = None
    costs: Costs | None = None
    scaler: Any = None

    def __post_init__(self) -> None:
        named(self.schedule)
        check_choice("wire_dtype", self.wire_dtype, ("fp32", "bf16"))
        check_choice("fisher", self.fisher, ("empirical", "sampled"))
        check_choice("scaling", self.scaling, ("reference", "authors", "kaisa"))
        if self.factor_decay != "warmup":
            if isinstance(self.factor_decay, str):
                raise ValueError(f"factor_decay={self.factor_decay!r} must be a number from 0 to 1, or 'warmup'")
            check_number("factor_decay", self.factor_decay, least=0, most=1)
        check_choice("tokens", self.tokens, (None, "expand", "reduce"))
        check_choice("warm_start", self.warm_start, (None, "identity"))
        check_count("max_dim", self.max_dim)

    @property
    def maker(self) -> PlanMaker:
        """What makes plans, unless one is pinned."""
        return named(self.schedule) if self.plan is None or isinstance(self.plan, KFACPlan) else self.plan

    @property
    def positions(self) -> str:
        """``tokens`` as set, otherwise as usual with the scaling."""
        return self.tokens or ("reduce" if self.scaling == "authors" else "expand")


def stepped(first: Number, factor: float, at: Sequence[int]) -> Callable[[int], Number]:
    """Return a function: ``first``, times ``factor`` from each step in ``at`` on; rounded if ``first`` is an integer.

    Example:
        >>> damping = stepped(0.008, 0.5, at=(1000, 2000))
        >>> [damping(step) for step in (0, 999, 1000, 5000)]
        [0.008, 0.008, 0.004, 0.002]
        >>> inv_update_steps = stepped(10, 10, at=(500,))
        >>> [inv_update_steps(step) for step in (499, 500)]
        [10, 100]
    """
    check_number("first", first, above=0)
    check_number("factor", factor, above=0)

    def value(step: int) -> Number:
        found = first * factor ** sum(step >= one for one in at)
        return max(1, round(found)) if isinstance(first, int) else found

    return value
