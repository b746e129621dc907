"""The options of :class:`~thinwire.kfac.KFAC`, with their checks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from thinwire.core.checks import check_choice, check_count
from thinwire.systems.kfac.factors import SCALINGS, TOKENS
from thinwire.systems.kfac.scheduled import Damping, Interval, check_positive, interval_at

FISHERS = ("empirical", "sampled")


@dataclass(frozen=True)
class Options:
    """What is computed and when; :class:`~thinwire.kfac.schedules.Choices` says what is sent. See ``KFAC``.

    Raises:
        ValueError: a value is out of range; the message names the option, the value and the choices.
    """

    damping: Damping = 0.03
    factor_decay: float | str = 0.95
    kl_clip: float | None = 1e-3
    factor_update_steps: Interval = 10
    inv_update_steps: Interval = 100
    fisher: str = "empirical"
    scaling: str = "reference"
    tokens: str | None = None
    warm_start: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.damping):
            check_positive("damping", self.damping)
        number = isinstance(self.factor_decay, (int, float)) and not isinstance(self.factor_decay, bool)
        if self.factor_decay != "warmup" and not (number and 0 <= self.factor_decay <= 1):  # type: ignore[operator]
            raise ValueError(f"factor_decay={self.factor_decay!r} must be a number from 0 to 1, or 'warmup'")
        if self.kl_clip is not None:
            check_positive("kl_clip", self.kl_clip)
        for name in ("factor_update_steps", "inv_update_steps"):
            if not callable(every := getattr(self, name)):
                check_count(name, every, 1)
        check_choice("fisher", self.fisher, FISHERS)
        check_choice("scaling", self.scaling, SCALINGS)
        check_choice("tokens", self.tokens, (None, *TOKENS))
        check_choice("warm_start", self.warm_start, (None, "identity"))
        factors, inverses = self.factor_update_steps, self.inv_update_steps
        if isinstance(factors, int) and isinstance(inverses, int) and inverses % factors:
            warnings.warn(
                f"inv_update_steps={inverses} is not a multiple of factor_update_steps={factors}: some inverses will "
                f"be made from factors that are older than necessary",
                stacklevel=4,
            )

    @property
    def positions(self) -> str:
        """How positions of an example count: as set, otherwise as usual with the scaling."""
        return self.tokens or ("reduce" if self.scaling == "authors" else "expand")

    def damping_at(self, step: int) -> float:
        """Return the damping of a step."""
        if not callable(self.damping):
            return float(self.damping)
        return check_positive(f"damping({step})", self.damping(step))

    def factor_steps_at(self, step: int) -> int:
        """Return the steps between new statistics, at a step."""
        return interval_at("factor_update_steps", self.factor_update_steps, step)

    def inv_steps_at(self, step: int) -> int:
        """Return the steps between inversions, at a step."""
        return interval_at("inv_update_steps", self.inv_update_steps, step)

    def facts(self) -> dict[str, Any]:
        """Return the options on which the ranks, and a resumed run, must agree."""
        return {
            "scaling": self.scaling,
            "tokens": self.positions,
            "fisher": self.fisher,
            "factor_decay": self.factor_decay,
            "factor_update_steps": self.factor_steps_at(0),
            "inv_update_steps": self.inv_steps_at(0),
            "kl_clip": self.kl_clip,
        }
