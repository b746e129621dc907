"""What of K-FAC few change: which published variant it follows, how its messages are planned; options that change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.pricing.costs import Costs
from thinwire.systems.kfac.plan import TRANSPORTS, KFACPlan

Damping = float | Callable[[int], float]
Interval = int | Callable[[int], int]
Number = TypeVar("Number", int, float)
METHODS = ("inverse", "inverse_pi", "eigen")
_COMMS = ("auto", *TRANSPORTS)
_WORDS = {
    "schedule": (r"dkfac|mpd|spd|dp|kaisa:(1(\.0*)?|0?\.\d+|1/[1-9]\d*)", "dkfac, mpd, spd, kaisa:<fraction>, dp"),
    "planner": (r"optimal|spd|layer|one|fixed:\d+(\.\d+)?MB", "optimal, spd, fixed:<MiB>MB, layer, one"),
    "inverse_rule": (r"cost|all|none|threshold:\d+", "cost, threshold:<side>, all, none"),
    "inverse_weight": ("cost|d|d2|d3", "cost, d, d2, d3"),
    "inverse_comm": ("|".join(_COMMS), ", ".join(_COMMS)),
    "wire_dtype": ("fp32|bf16", "fp32, bf16"),
    "fisher": ("empirical|sampled", "empirical, sampled"),
    "scaling": ("reference|authors|kaisa", "reference, authors, kaisa"),
}  # option -> its pattern, its values in words


@dataclass(frozen=True)
class Variant:
    """The options of :class:`~thinwire.kfac.KFAC` that reproduce published variants, or that few need.

    The published SPD-KFAC is ``Variant(planner="spd", inverse_rule="threshold:1400", inverse_weight="d",
    inverse_comm="broadcast", scaling="authors", warm_start="identity")``.

    Attributes:
        schedule: "spd", "dkfac", "mpd", "kaisa:<fraction>" or "dp", see :mod:`thinwire.kfac.schedules`.
        planner: how "spd" fuses statistics: "optimal", "spd" (the published rule), "fixed:<MiB>MB", "layer", "one".
        inverse_rule: what every rank inverts for itself: "cost", "threshold:<side>" (as published), "all", "none".
        inverse_weight: how owners are balanced: by "cost", or by the factor's side: "d", "d2", "d3".
        inverse_comm: "broadcast", "owner_fused" or "allgather"; "auto": the cheapest.
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
        plan: a pinned plan; None: one is made from ``costs``, and once more from measured times.
        costs: as from ``thinwire probe`` and ``thinwire kfac calibrate``; None: measured, in some seconds, if the plan
            needs them.
        scaler: the ``GradScaler`` in use; None: the one that ``attach`` was given.

    Raises:
        ValueError: a value is unknown; the message lists the choices.
    """

    schedule: str = "spd"
    planner: str = "optimal"
    inverse_rule: str = "cost"
    inverse_weight: str = "cost"
    inverse_comm: str = "auto"
    wire_dtype: str = "fp32"
    factor_decay: float | str = 0.95
    fisher: str = "empirical"
    scaling: str = "reference"
    tokens: str | None = None
    warm_start: str | None = None
    max_dim: int = 8192
    auto_step: bool = True
    plan: KFACPlan | None = None
    costs: Costs | None = None
    scaler: Any = None

    def __post_init__(self) -> None:
        for name, (pattern, words) in _WORDS.items():
            value = getattr(self, name)
            if not (isinstance(value, str) and re.fullmatch(pattern, value)):
                raise ValueError(f"{name}={value!r} is unknown; use one of {words}")
        if self.factor_decay != "warmup":
            if isinstance(self.factor_decay, str):
                raise ValueError(f"factor_decay={self.factor_decay!r} must be a number from 0 to 1, or 'warmup'")
            check_number("factor_decay", self.factor_decay, least=0, most=1)
        check_choice("tokens", self.tokens, (None, "expand", "reduce"))
        check_choice("warm_start", self.warm_start, (None, "identity"))
        check_count("max_dim", self.max_dim)

    @property
    def positions(self) -> str:
        """``tokens`` as set, otherwise as usual with the scaling."""
        return self.tokens or ("reduce" if self.scaling == "authors" else "expand")

    def workers(self, world: int) -> int:
        """Return the number of ranks that precondition each layer."""
        if self.schedule == "dp":
            return 1
        if not self.schedule.startswith("kaisa:"):
            return world
        above, _, below = self.schedule.removeprefix("kaisa:").partition("/")
        workers = world * float(above) / float(below or 1)
        if workers < 1 or abs(workers - round(workers)) > 1e-6 or world % round(workers):
            valid = ", ".join(
                f"kaisa:{w}/{world}" if w < world else "kaisa:1" for w in range(1, world + 1) if world % w == 0
            )
            raise ValueError(f"schedule={self.schedule!r} does not divide {world} ranks into equal groups; use {valid}")
        return round(workers)

    @property
    def prices_factors(self) -> bool:
        return self.schedule == "spd" and self.planner in ("optimal", "spd")

    @property
    def prices_inverses(self) -> bool:
        choosing = self.schedule == "spd" and "cost" in (self.inverse_rule, self.inverse_weight)
        return choosing or (self.schedule not in ("dkfac", "mpd", "dp") and self.inverse_comm == "auto")


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
