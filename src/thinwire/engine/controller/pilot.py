"""Make plans during training: measure the first steps, plan, then watch whether the prediction holds.

Rank 0 decides, and all ranks follow its decision, so that jitter on one rank cannot lead to different plans.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.core.methods.registry import method as named
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.plans import needs_measurement
from thinwire.core.program import Method, Plan
from thinwire.engine.controller.network import NetworkPrices
from thinwire.engine.controller.prices import PlanPrices
from thinwire.engine.controller.timings import AgreedTimes, Timings
from thinwire.engine.parameters import Managed
from thinwire.engine.ranks.communicator import Communicator
from thinwire.predict.choose.worth import WorthOf

logger = logging.getLogger("thinwire")

SETTLE_STEPS, PROFILE_STEPS, WATCH_STEPS = 2, 8, 100
LOSSY_SETTLE_STEPS, LOSSY_PROFILE_STEPS = 1, 3
"""If lossy methods are allowed: they differ by more than noise, and each exact step here may cost several of theirs."""

TOLERANCE = 0.15
_UNKNOWN_SECONDS = 0.1  # assumed for a step whose forward was not seen


@dataclass(frozen=True)
class Decision:
    """What all ranks do next. ``method`` None: keep the present one."""

    plan: Plan
    seconds: float
    method: Method | None = None
    why: tuple[str, ...] = ()


class Pilot:
    """The pilot of one GradientSync.

    Args:
        communicator: for agreement.
        manage: returns the managed parameters under a method.
        auto: whether to choose the method too.
        worth: what a step of lossy methods is worth, by which ``auto`` may choose one; None: it may not.
        adaptive: whether to plan again if measured and predicted times differ.
        network: prices of exchanges and compute.
    """

    def __init__(
        self,
        communicator: Communicator,
        manage: Callable[[Method], list[Managed]],
        *,
        auto: bool,
        worth: WorthOf | None,
        adaptive: bool,
        network: NetworkPrices,
    ) -> None:
        self._comm, self._manage = communicator, manage
        self._auto, self._worth, self._adaptive = auto, worth, adaptive
        self.timings = Timings(communicator.device)
        self.network = network
        self.predicted: float | None = None
        self._left: int | None = SETTLE_STEPS if worth is None else LOSSY_SETTLE_STEPS
        self._profiling = False
        self.warned = False
        self.decisions = 0

    @property
    def costs(self) -> Costs | None:
        """The costs; None: not known yet."""
        return self.network.costs

    @property
    def _profile_steps(self) -> int:
        return PROFILE_STEPS if self._worth is None else LOSSY_PROFILE_STEPS

    def after_step(self, method: Method, dense: Method) -> Decision | None:
        """Measure, and decide when it is time. All ranks call it after each synchronised backward; may communicate."""
        if self._left is None:
            return None
        if self._profiling:
            began = time.perf_counter()
            self.network.advance()
            self.timings.pause(time.perf_counter() - began)
        if self._left > 0:
            self._left -= 1
            if self._left:
                return None
        if not self._profiling and self.predicted is None:
            self.network.begin(statistics.median(self.timings.intervals() or [_UNKNOWN_SECONDS]), self._profile_steps)
            self._restart(self._profile_steps, profiling=True)
            return None
        if len(self.timings) == 0:  # accumulation only, or forwards that were not seen
            self._left = 1
            return None
        measurement = self.timings.agreed(self._manage(method), self._comm.control, self._comm.device)
        if self._profiling:
            decision = self._decide(measurement, method, dense)
            self.predicted = decision.seconds
            self.decisions += 1
            self._restart(WATCH_STEPS, profiling=False)
            return decision
        self._compare(measurement.step_seconds)
        return None

    def _restart(self, steps: int | None, profiling: bool) -> None:
        self._left, self._profiling = steps, profiling
        self.timings.clear()

    def _compare(self, measured: float) -> None:
        assert self.predicted is not None
        off = abs(measured / self.predicted - 1) > TOLERANCE if self.predicted > 0 else False
        if off and self._adaptive:
            self._say(f"a step takes {measured:.4g} s, {self.predicted:.4g} s were predicted: planning again")
            self._restart(self._profile_steps, profiling=True)
            return
        if off and not self.warned:
            self.warned = True
            self._say(
                f"a step takes {measured:.4g} s, {self.predicted:.4g} s were predicted; "
                'plan="adaptive" would plan again',
                logging.WARNING,
            )
        self._restart(WATCH_STEPS if self._adaptive else None, profiling=False)

    def _decide(self, measurement: AgreedTimes, method: Method, dense: Method) -> Decision:
        self.network.finish()
        text = b""
        if self._comm.rank == 0:
            prices = self._prices(measurement, dense)
            made = prices.best() if self._auto else prices.planned(method)
            made["why"] += [self.network.why] if self.network.why else []
            text = json.dumps(made).encode()
        chosen = json.loads(self._comm.gather(text)[0])
        for line in chosen["why"]:
            self._say(line)
        other = named(chosen["method"], **chosen["options"]) if chosen["method"] else None
        return Decision(Plan.from_json(chosen["plan"]), chosen["seconds"], other, tuple(chosen["why"]))

    def _prices(self, measurement: AgreedTimes, dense: Method) -> PlanPrices:
        assert self.costs is not None
        return PlanPrices(
            self._comm.backend, self._comm.members.topology, self._manage, dense, self.costs, measurement,
            self._comm.side_stream(), self._worth,
        )  # fmt: skip

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if self._comm.rank == 0:
            logger.log(level, "%s", line)


def wanted(method: Method, pinned: Plan | None, adaptive: bool, auto: bool) -> bool:
    """Return whether there is anything to measure."""
    return auto or adaptive or (pinned is None and needs_measurement(method))
