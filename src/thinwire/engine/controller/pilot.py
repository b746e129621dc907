"""Change plans during training: once to the first step's order of arrival, then as measurements say.

Rank 0 decides, and all ranks follow its decision, so that jitter on one rank cannot lead to different plans.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from thinwire.core.collectives.exchange import Lane
from thinwire.core.methods.registry import method as named
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import Method, Plan
from thinwire.engine.buckets import Buckets, Step
from thinwire.engine.controller.network import NetworkPrices
from thinwire.engine.controller.planning import AgreedTimes, PlanPrices, rebuild
from thinwire.engine.executors.events import ExchangeTimes
from thinwire.engine.parameters import ManagedParameter
from thinwire.engine.ranks.agreement import gather_bytes
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.schedules.coupled import Coupled
from thinwire.predict.choose.worth import WorthOf
from thinwire.predict.measure.kernels import Stopwatch
from thinwire.predict.tune import FusionTuner, distinct, grid

SETTLE_STEPS, PROFILE_STEPS, WATCH_STEPS = 2, 8, 100
LOSSY_SETTLE_STEPS, LOSSY_PROFILE_STEPS = 1, 3
"""If lossy methods are allowed: they differ by more than noise, and each exact step here may cost several of theirs."""
TOLERANCE = 0.15
DISCARDED, MEASURED = 2, 5
"""Step intervals of a trial: the first do not count, and of the others the median does."""
_TRIAL_STEPS = DISCARDED + MEASURED + 1  # an interval ends where the next forward begins
_UNKNOWN_SECONDS = 0.1  # assumed for a step whose forward was not seen
logger = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Decision:
    """What all ranks do next. ``method`` None: keep the present one."""

    plan: Plan
    seconds: float
    method: Method | None = None
    why: tuple[str, ...] = ()


class PlanController:
    """Makes the plan of one attached model once, from the first step."""

    timings: Timings | None = None  # None: nothing is measured
    costs: Costs | None = None
    _schedule: Coupled

    def __init__(self, *, pinned: bool) -> None:
        self.rebuilt = pinned  # the plan follows the first step, or is the user's
        self.why: tuple[str, ...] = ()
        self.waiting: Decision | None = None  # followed before the next backward

    def bind(self, buckets: Buckets, schedule: Coupled) -> None:
        self._buckets, self._schedule = buckets, schedule
        if not self.rebuilt or self.timings is not None:
            comm = buckets.session.comm
            comm.executor.watch = ExchangeTimes(Stopwatch(comm.device))

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one that measurements led to, or nothing was to be measured."""
        return self.rebuilt

    def after_step(self, step: Step | None, backward_seconds: float) -> Decision | None:
        """Return what to do next; ``step`` None: ignore its order of arrival. All ranks call it; it may communicate."""
        if self.rebuilt or step is None:
            return None
        self.rebuilt = True
        session, managed = self._buckets.session, self._buckets.managed
        unseen = [m.index for m in reversed(managed) if not step.seen[m.index]]
        order = self._schedule.order() or [*step.arrival, *unseen]
        measured = self.timings is not None
        plan = rebuild(session.method, managed, session.comm, order, unseen, backward_seconds, measured=measured)
        if not measured:
            session.comm.executor.watch = None
        return None if plan == self._buckets.plan else Decision(plan, 0.0)


@dataclass
class _Marks:
    """One step: start of its forward, gradients from first to last, end of its backward."""

    start: Any
    arrivals: dict[int, Any]
    end: Any = None
    paused: float = 0.0  # seconds after the step that were spent on measuring


class Timings:
    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)
        self._steps: list[_Marks] = []
        self._open: _Marks | None = None

    def __len__(self) -> int:
        return max(0, len(self._steps) - 1)

    def clear(self) -> None:
        self._steps, self._open = [], None

    def forward(self) -> None:
        self._open = _Marks(self.stopwatch.mark(), {})

    def arrived(self, index: int) -> None:
        if self._open is not None:
            self._open.arrivals[index] = self.stopwatch.mark()

    def ended(self) -> None:
        if self._open is not None and self._open.arrivals:
            self._open.end = self.stopwatch.mark()
            self._steps.append(self._open)
        self._open = None

    def pause(self, seconds: float) -> None:
        if self._steps:
            self._steps[-1].paused += seconds

    def intervals(self) -> list[float]:
        self.stopwatch.settle()
        return [self.stopwatch.between(a.start, b.start) - a.paused for a, b in pairwise(self._steps)]

    def agreed(self, managed: Sequence[ManagedParameter], lane: Lane, device: torch.device) -> AgreedTimes:
        """Return the medians, for each the slowest rank's. All ranks call it."""
        mine = self._medians(len(managed))
        rows = [json.loads(raw) for raw in gather_bytes(json.dumps(mine).encode(), lane, device)]
        forward, outside, step, *offsets = (max(column) for column in zip(*rows))
        order = sorted((i for i, t in enumerate(offsets) if t >= 0), key=lambda i: (offsets[i], -i))
        tensors, before = [], 0.0
        for i in order:
            tensors.append(TensorTime(managed[i].name, managed[i].shape, offsets[i] - before))
            before = offsets[i]
        tensors += [TensorTime(m.name, m.shape, 0.0) for m in reversed(managed) if offsets[m.index] < 0]
        itemsize = managed[0].parameter.element_size()
        profile = ModelProfile("model", tuple(tensors), forward, (), itemsize, "measured here", f"{len(self)} steps")
        return AgreedTimes(profile, outside, step)

    def _medians(self, count: int) -> list[float]:
        """Return forward, outside, step, and per parameter the time after the first gradient; -1 if it had none."""
        self.stopwatch.settle()
        between, steps = self.stopwatch.between, self._steps
        first = [next(iter(s.arrivals.values())) for s in steps]
        forward = statistics.median(between(s.start, f) for s, f in zip(steps, first))
        outside = statistics.median(between(a.end, b.start) - a.paused for a, b in pairwise(steps))
        step = statistics.median(self.intervals())
        offsets = []
        for i in range(count):
            times = [between(f, s.arrivals[i]) for s, f in zip(steps, first) if i in s.arrivals]
            offsets.append(max(0.0, statistics.median(times)) if times else -1.0)
        return [max(0.0, forward), max(0.0, outside), max(0.0, step), *offsets]


class MeasuredPlans(PlanController):
    """Measures the first steps, plans, then watches whether the prediction holds."""

    def __init__(
        self,
        communicator: Communicator,
        manage: Callable[[Method], list[ManagedParameter]],
        *,
        auto: bool,
        worth: WorthOf | None,
        adaptive: bool,
        network: NetworkPrices,
        pinned: bool = False,
    ) -> None:
        super().__init__(pinned=pinned)
        self._comm, self._manage = communicator, manage
        self._auto, self._worth, self._adaptive = auto, worth, adaptive  # worth None: only exact methods
        self.timings: Timings = Timings(communicator.device)
        self.network = network
        self.predicted: float | None = None
        self._left: int | None = SETTLE_STEPS if worth is None else LOSSY_SETTLE_STEPS
        self._profiling = False
        self.warned = False
        self.decisions = 0

    @property
    def costs(self) -> Costs | None:  # type: ignore[override]
        return self.network.costs

    @property
    def settled(self) -> bool:
        return self.rebuilt and self.waiting is None and self.predicted is not None

    @property
    def _profile_steps(self) -> int:
        return PROFILE_STEPS if self._worth is None else LOSSY_PROFILE_STEPS

    def after_step(self, step: Step | None, backward_seconds: float) -> Decision | None:
        self.timings.ended()
        if not self.rebuilt and step is not None:
            return super().after_step(step, backward_seconds)
        session = self._buckets.session
        decision = self._measure(session.method, session.dense)
        if self.costs is not None:
            session.comm.executor.watch = None
        if decision is not None and self._buckets.pauses:  # this step's updates are not made yet
            self.waiting, decision = decision, None
        return decision

    def _measure(self, method: Method, dense: Method) -> Decision | None:
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
            self._comm.backend, self._comm.topology, self._manage, dense, self.costs, measurement,
            self._comm.side_stream(), self._worth,
        )  # fmt: skip

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if self._comm.rank == 0:
            logger.log(level, "%s", line)


class TunedPlans(MeasuredPlans):
    """``fusion="tune"``: tries plans around the planner's optimum, each for a few steps, and keeps the fastest."""

    _trying = False
    _tuner: FusionTuner  # on rank 0 only, like the next two
    _plans: dict[float, Plan]  # by fusion limit in MiB
    trials = 0

    def _measure(self, method: Method, dense: Method) -> Decision | None:
        if not self._trying:
            decision = super()._measure(method, dense)
            if decision is not None:
                self._trying, self.predicted = True, None
                self._restart(_TRIAL_STEPS, profiling=False)
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
            self._restart(_TRIAL_STEPS, profiling=False)
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


def _limit(plan: Plan, managed: Sequence[ManagedParameter]) -> float:
    """Return the fusion limit that a plan stands for: MiB of gradients per bucket, over compressed buckets if any."""
    size = {m.name: m.parameter.numel() * m.parameter.element_size() for m in managed}
    buckets = [bucket for bucket in plan.phases[0] if not bucket.dense] or plan.phases[0]
    return max(1, sum(size[name] for bucket in buckets for name in bucket.names)) / len(buckets) / (1 << 20)
