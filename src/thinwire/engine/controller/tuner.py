"""``fusion="tune"``: try plans around the planner's optimum, each for a few steps, and keep the fastest.

A trial consists of ``DISCARDED`` step intervals and the next ``MEASURED``, whose median on the slowest rank counts.
Rank 0 runs the tuner. The choice goes to all ranks, which compare the plan's hash before they put it in force.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from thinwire.core.program import Method, Plan
from thinwire.engine.controller.pilot import WATCH_STEPS, Decision, Pilot
from thinwire.engine.controller.timings import AgreedTimes
from thinwire.engine.parameters import Managed
from thinwire.predict.tune import FusionTuner, distinct, grid

DISCARDED, MEASURED = 2, 5
_STEPS = DISCARDED + MEASURED + 1  # an interval ends where the next forward begins


class Tuner(Pilot):
    """A pilot that continues to measure once it has made its plan. Arguments as for :class:`Pilot`."""

    _trying = False
    _tuner: FusionTuner  # on rank 0 only, like the next two
    _plans: dict[float, Plan]  # by fusion limit in MiB
    trials = 0

    def after_step(self, method: Method, dense: Method) -> Decision | None:
        """Act as the pilot until it has made its plan; then run trial after trial."""
        if not self._trying:
            decision = super().after_step(method, dense)
            if decision is not None:
                self._trying, self.predicted = True, None
                self._restart(_STEPS, profiling=False)
            return decision
        assert self._left is not None
        self._left -= 1
        if self._left:
            return None
        seconds = self._slowest()
        if seconds is None:  # accumulation only, or forwards that were not seen
            self._left = 1
            return None
        return self._take(seconds)

    def _decide(self, measurement: AgreedTimes, method: Method, dense: Method) -> Decision:
        """Return the planner's optimum, from which the search starts."""
        decision = super()._decide(measurement, method, dense)
        if self._comm.rank == 0:
            managed, prices = self._manage(method), self._prices(measurement, dense)
            start, usual = decision.plan, prices.fused(method, "auto")
            middle = _limit(start, managed)
            plans = distinct({middle: start}, [_limit(usual, managed)], lambda _: usual)
            self._plans = distinct(plans, grid(middle), lambda limit: prices.fused(method, limit))
            self._tuner, self.trials = FusionTuner(list(self._plans), middle), 0
        return decision

    def _slowest(self) -> float | None:
        """Return the trial's median step on the slowest rank; None: some rank has seen no step."""
        seen = self.timings.intervals()[DISCARDED:]
        mine = torch.tensor([statistics.median(seen) if seen else -1.0], dtype=torch.float64, device=self._comm.device)
        everyone = self._comm.gather_tensor(mine)
        return None if float(everyone.min()) <= 0 else float(everyone.max())

    def _take(self, seconds: float) -> Decision:
        """Report the trial to rank 0's tuner, and return its next choice, on all ranks."""
        text = json.dumps(self._tell(seconds)).encode() if self._comm.rank == 0 else b""
        chosen = json.loads(self._comm.gather(text)[0])
        plan = Plan.from_json(chosen["plan"])
        self._comm.agree({"plan": plan.hash})
        if chosen["done"]:
            self._trying, self.predicted = False, chosen["seconds"]
            self._restart(WATCH_STEPS if self._adaptive else None, profiling=False)
        else:
            self._restart(_STEPS, profiling=False)
        return Decision(plan, chosen["seconds"], None, tuple(chosen["why"]))

    def _tell(self, seconds: float) -> dict[str, Any]:
        tuner = self._tuner
        self.trials += 1
        tried = tuner.ask()
        tuner.tell(tried, seconds)
        self._say(f"tune: trial {self.trials}: {self._words(tried)}: {seconds:.4g} s a step")
        limit = tuner.best() if tuner.done else tuner.ask()
        why = self._reasons() if tuner.done else (f"tune: trial {self.trials + 1}: {self._words(limit)}",)
        for line in why if tuner.done else ():
            self._say(line)
        known = tuner.seconds(limit if limit in tuner.tried else tried)
        return {"plan": self._plans[limit].to_json(), "seconds": known, "why": why, "done": tuner.done}

    def _reasons(self) -> tuple[str, str]:
        tuner, best = self._tuner, self._tuner.best()
        limits, times = tuner.tried, [tuner.seconds(limit) for limit in tuner.tried]
        tried = (
            f"tune: {len(limits)} plans of {min(limits):.3g} to {max(limits):.3g} MiB in {self.trials} trials: "
            f"{min(times):.4g} to {max(times):.4g} s a step"
        )
        other, start = tuner.challenger, f"the planner's {self._words(tuner.start)}"
        assert other is not None
        if other == tuner.start or tuner.gain(other) <= 0:
            return tried, f"tune: kept {start}: {tuner.seconds(best):.4g} s, none was faster"
        figures = f"{tuner.gain(other):.1%} less than {'it' if best != other else start}, noise {tuner.noise:.1%}"
        if best != other:
            return tried, f"tune: kept {start}: {self._words(other)} took {figures}; twice the noise is required"
        return tried, f"tune: took {self._words(best)}: {tuner.seconds(best):.4g} s, {figures}"

    def _words(self, limit: float) -> str:
        return f"{limit:.3g} MiB, {len(self._plans[limit].phases[0])} buckets"


def _limit(plan: Plan, managed: Sequence[Managed]) -> float:
    """Return the fusion limit that a plan stands for: MiB of gradients per bucket, over compressed buckets if any."""
    size = {m.name: m.parameter.numel() * m.parameter.element_size() for m in managed}
    buckets = [bucket for bucket in plan.phases[0] if not bucket.dense] or plan.phases[0]
    return max(1, sum(size[name] for bucket in buckets for name in bucket.names)) / len(buckets) / (1 << 20)
