"""Simulate every candidate, rank them by time to a loss, and recommend one; the answer may be dense.

Among methods that reach a loss equally soon, the simpler one is taken, by the same rule for predicted and raced times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from thinwire.core.methods.cast import Cast
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import KINDS, Costs, Provenance
from thinwire.core.pricing.profiles import ModelProfile
from thinwire.core.program import Method, Scope, Topology
from thinwire.core.words import milliseconds, with_steps
from thinwire.predict.choose.result import Entry, Ranking
from thinwire.predict.choose.worth import Worth, WorthOf, resolved, shipped
from thinwire.predict.timeline import Timeline, bound_by, simulate
from thinwire.predict.timeline.local_steps import PLAIN, OneWorker, Periodic, is_plain
from thinwire.predict.timeline.programs import Place
from thinwire.predict.timeline.result import COMPUTE, EXCHANGE_CPU, METHOD, Event, union_seconds
from thinwire.predict.timeline.simulate import network_free

TIE = 0.10
"""Relative delay in time to a loss, by the median and the maximum, up to which a method counts as equally fast."""

PAYS = 1.2
"""Worth of all workers, in workers alone, below which one alone is recommended."""


class Rival(Protocol):
    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds: minimum, median and maximum over seeds; infinite if a seed did not reach the loss."""

    @property
    def apart(self) -> bool:
        """Whether workers train apart between exchanges."""

    @property
    def bytes_sent(self) -> float:
        """Bytes sent per step."""


_Rival = TypeVar("_Rival", bound=Rival)


def overlap(one: Rival, other: Rival) -> bool:
    return one.times[0] <= other.times[2] and other.times[0] <= one.times[2]


def as_soon(one: Rival, first: Rival) -> bool:
    """Return whether the seeds overlap with those of ``first``, and median and maximum are at most 10 % later."""
    return overlap(one, first) and all(a <= (1 + TIE) * b for a, b in zip(one.times[1:], first.times[1:]))


def simplest(first: _Rival, tied: Sequence[_Rival]) -> _Rival:
    """Among methods as fast as ``first``, prefer those that keep workers together, then the one that sends the most."""
    return min((first, *tied), key=lambda one: (one.apart, -one.bytes_sent))


UNCERTAINTY: Mapping[Provenance, float] = {"measured here": 0.10, "measured elsewhere": 0.25, "assumed": 0.40}
"""Relative error of a price, by its provenance: rules of thumb, not confidence intervals."""


def spread_costs(costs: Costs, topology: Topology, sign: int) -> Costs:
    """Return prices at one end of their uncertainty: -1 cheap, 1 expensive; what is scaled counts as assumed."""

    def end(curve: Any) -> Any:
        factor = 1 + sign * UNCERTAINTY[curve.provenance]
        return curve.stretched(factor, factor, "end of a band")

    exchanges = {
        (kind, scope.value, members): end(costs.lookup(kind, scope, members))
        for scope, members in Place(topology).members.items()
        for kind in (KINDS if members > 1 else ())
    }
    compute = {name: end(curve) for name, curve in costs.compute.items()}
    return replace(
        costs, exchanges=exchanges, compute=compute, cpu_share={k: end(c) for k, c in costs.cpu_share.items()}
    )


def measured_share(timeline: Timeline, profile: ModelProfile, topology: Topology, costs: Costs) -> float:
    """Return the fraction of the step whose price was measured here; method work if every compute curve was.

    Each moment counts once: for forward and backward if they run, else for methods' work, else for the exchange in
    flight.
    """
    members = Place(topology).members
    method = bool(costs.compute) and all(c.provenance == "measured here" for c in costs.compute.values())
    taken = all(line.provenance == "measured here" for line in costs.cpu_share.values())

    def measured(event: Event) -> bool:
        if event.lane == COMPUTE:
            return profile.provenance == "measured here"
        if event.lane == METHOD:
            return taken if event.name == EXCHANGE_CPU else method
        scope = Scope(event.lane.removeprefix("link "))
        return costs.lookup(event.name, scope, members[scope]).provenance == "measured here"

    ranks: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for event in timeline.events:
        place = {COMPUTE: 0, METHOD: 1}.get(event.lane, 2)
        ranks.setdefault((place, measured(event)), []).append((event.start_seconds, event.end_seconds))
    covered: list[tuple[float, float]] = []
    share = before = 0.0
    for (_, counts), intervals in sorted(ranks.items()):  # unmeasured ones first
        covered += intervals
        after = union_seconds(covered)
        share += (after - before) if counts else 0.0
        before = after
    return share / before if before else 0.0


Candidates = Sequence[tuple[str, Method]]
"""(label, method) pairs."""

GAIN = 0.05
"""Gain that 16 bits, or another schedule, must reach to be recommended."""

LOSSY_GAIN = 0.10
"""Gain in time to a loss that a lossy method must reach over the fastest dense form, with its worst step count."""


@dataclass(frozen=True)
class SimulatedMethod:
    label: str
    method: Method
    timeline: Timeline
    worth: Worth

    @property
    def exact(self) -> bool:
        return self.method.exact

    @property
    def dense(self) -> bool:
        return _dense(self.method)

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def bytes_sent(self) -> int:
        return self.timeline.bytes_sent

    @property
    def apart(self) -> bool:
        return isinstance(self.method, Periodic)

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds for the fewest, the median and the most steps measured for one step of plain averaging."""
        return self.seconds * self.worth.low, self.loss_seconds, self.most_loss_seconds

    @property
    def loss_seconds(self) -> float:
        """Seconds of the steps that replace one step of plain averaging; infinite if that was never measured."""
        return self.seconds * self.worth.middle

    @property
    def most_loss_seconds(self) -> float:
        return self.seconds * self.worth.high


@dataclass(frozen=True)
class Recommendation:
    """The conclusion from the simulated candidates; ``dense``: the fastest dense form."""

    best: SimulatedMethod
    best_exact: SimulatedMethod
    dense: SimulatedMethod
    sentence: str


def choose(
    candidates: Candidates,
    model_profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    *,
    backend: str = "gloo",
    shared_compute: bool = True,
    slowdown: Sequence[float] | None = None,
    lossy: bool = True,
    worth: WorthOf | None = None,
) -> Ranking:
    """Predict each candidate's step and its time to a loss, and recommend one.

    Dense fp32 and dense 16-bit are always priced, requested or not. A lossy method is recommended only if it reaches a
    loss more than 10 % sooner than the fastest dense form, with the most steps that it has needed anywhere, and would
    still do so if start-ups of messages cost nothing; otherwise sending less gains nothing. Among lossy methods that
    are equally fast, the simpler one is recommended (:func:`simplest`). Among the dense forms, 16 bits are recommended
    only if they gain 5 %. One worker alone and DDP that accumulates are listed too; ``Ranking.answer`` may be of them.

    The band is the same step with every price 10 % lower or higher if it was measured here, 25 % if measured elsewhere,
    40 % if assumed. For compute the profile's provenance counts, for exchanges that of the curve at this number of
    ranks (scaled from another number: assumed). All prices move together: the band does not cover what depends on their
    ratio.

    Args:
        candidates: (label, method) pairs; labels are unique.
        backend, shared_compute, slowdown: see ``simulate``; times of one worker alone are the fastest's.
        lossy: if False, lossy candidates are listed as left out and never recommended.
        worth: steps that each method needs for one exact step; None: the table in the package.

    Returns:
        The ranking; ``left_out`` names candidates that do not work on this cluster or whose price is missing.

    Raises:
        ValueError: no (label, method) pair, a duplicate label, or a model or backend that cannot be simulated.
        LookupError: the costs hold no exchange, or no price for dense.
    """
    where: dict[str, Any] = {"backend": backend, "shared_compute": shared_compute}
    where |= {"slowdown": slowdown} if slowdown else {}
    points, left_out = price(candidates, model_profile, topology, costs, where, lossy=lossy, worth=worth)
    verdict = judge(points, topology, without_startups(model_profile, topology, costs, where), lossy=lossy)
    off = UNCERTAINTY[model_profile.provenance]
    ends = [(model_profile.scaled(1 + s * off), spread_costs(costs, topology, s)) for s in (-1, 1)]
    alone = alone_seconds(points)
    entries: dict[str, Entry] = {}
    for point in sorted(points, key=lambda p: (not p.exact, p.loss_seconds, p.seconds)):
        plan = point.timeline.plan
        band = [simulate(point.method, m, topology, c, plan=plan, **where).step_seconds for m, c in ends]
        entries[point.label] = Entry(
            label=point.label,
            method=point.method.name,
            options=plain_options(point.method),
            exact=point.exact,
            dense=point.dense,
            step_seconds=point.seconds,
            low_seconds=min(point.seconds, *band),  # a schedule may be slightly shorter at a higher price
            high_seconds=max(point.seconds, *band),
            exposed_seconds=point.timeline.exposed_seconds,
            bytes_sent=point.timeline.bytes_sent,
            bound_by=bound_by(point.method, model_profile, topology, costs, plan=plan, **where),
            every=point.timeline.every,
            steps=_finite(point.worth.middle),
            most_steps=_finite(point.worth.high),
            steps_source=point.worth.source,
            worth=alone / point.loss_seconds if alone and point.worth.known and point.loss_seconds else None,
            measured_share=measured_share(point.timeline, model_profile, topology, costs),
        )
    best, best_exact = entries[verdict.best.label], entries[verdict.best_exact.label]
    found = tuple(entries.values())
    use = entries[answer(points, verdict.best).label]
    left = tuple(left_out)
    return Ranking(model_profile.name, topology.world_size, found, use, best, best_exact, verdict.sentence, left)


def price(
    candidates: Candidates,
    profile: ModelProfile,
    topology: Topology,
    costs: Costs,
    where: Mapping[str, Any],
    *,
    lossy: bool,
    worth: WorthOf | None = None,
) -> tuple[list[SimulatedMethod], list[tuple[str, str]]]:
    """Simulate the candidates and both dense forms; also return (label, reason) of those that cannot be simulated."""
    worth_of = worth or shipped()
    points: list[SimulatedMethod] = []
    left_out: list[tuple[str, str]] = []
    plain = PLAIN if topology.world_size > 1 else {}
    for label, method in {**dict(_complete(candidates)), **plain}.items():
        dense = _dense(method)
        if not (lossy or dense or method.exact or is_plain(method)):
            continue
        try:
            ran = resolved(method, profile, topology, costs, worth=worth_of, **where)
            timeline = simulate(ran, profile, topology, costs, **where)
            value = worth_of(ran, profile.elements, topology.world_size)
            points.append(SimulatedMethod(label, ran, timeline, value))
        except (LookupError, ValueError) as error:
            if dense:
                raise
            left_out.append((label, str(error.args[0] if error.args else error)))
    return points, left_out


def alone_seconds(points: Sequence[SimulatedMethod]) -> float | None:
    """Return the time of one worker alone to a loss, if it is known."""
    return next((p.loss_seconds for p in points if isinstance(p.method, OneWorker) and p.worth.known), None)


def answer(points: Sequence[SimulatedMethod], best: SimulatedMethod) -> SimulatedMethod:
    """Return the recommended method; what needs none, if even at worst that is sooner; or alone, if nothing pays."""
    plain = [point for point in points if is_plain(point.method)]
    first = min(plain, key=lambda point: point.most_loss_seconds, default=best)
    use = first if first.most_loss_seconds < best.loss_seconds else best
    pays = (alone_seconds(plain) or math.inf) >= PAYS * use.loss_seconds
    return use if pays else next(point for point in plain if isinstance(point.method, OneWorker))


def without_startups(
    profile: ModelProfile, topology: Topology, costs: Costs, where: Mapping[str, Any]
) -> Callable[[SimulatedMethod], float]:
    """Return a function: step seconds of a point, with its plan, on a network where a message costs only its bytes."""
    free = network_free(costs, startup=0, rest=1)

    def seconds(point: SimulatedMethod) -> float:
        plan = point.timeline.plan
        return simulate(point.method, profile, topology, free, plan=plan, **where).step_seconds

    return seconds


def judge(
    points: Sequence[SimulatedMethod],
    topology: Topology,
    bytes_alone: Callable[[SimulatedMethod], float],
    *,
    lossy: bool,
) -> Recommendation:
    """Apply the rule of ``choose``; ``bytes_alone``: see ``without_startups``."""
    best_exact = _best_exact(points)
    if not lossy or topology.world_size == 1:
        said = f"{best_exact.label}: {milliseconds(best_exact.seconds)}, lossy methods not considered"
        if topology.world_size == 1:
            said = "one worker: nothing is sent, nothing is compressed"
        return Recommendation(best_exact, best_exact, best_exact, said)
    dense = min((p for p in points if p.exact or p.dense), key=_seconds)
    kept = dense if dense.seconds < (1 - GAIN) * best_exact.seconds else best_exact
    lossies = [p for p in points if not (p.exact or p.dense or is_plain(p.method))]
    rivals = sorted((p for p in lossies if p.worth.known), key=lambda p: p.loss_seconds)
    if not rivals:
        other = (
            "no other method was asked for" if not lossies else "what a step is worth is not known for any other method"
        )
        return Recommendation(kept, best_exact, dense, f"{kept.label}: {milliseconds(kept.seconds)}, {other}")
    first = rivals[0]
    pair = f"{milliseconds(dense.seconds)} against {_told(first)}"
    if first.loss_seconds >= dense.seconds:
        return Recommendation(kept, best_exact, dense, f"dense is faster here: {pair} ({dense.label}, {first.label})")
    sooner = [p for p in rivals if p.most_loss_seconds < (1 - LOSSY_GAIN) * dense.seconds]
    if not sooner:
        said = f"dense is as fast here: {pair} ({dense.label}, {first.label}); less than {LOSSY_GAIN:.0%} does not pay"
        return Recommendation(kept, best_exact, dense, said)
    limit = (1 - LOSSY_GAIN) * bytes_alone(dense)
    rival = next((p for p in sooner if bytes_alone(p) < limit), None)
    if rival is None:
        said = (
            f"dense is enough here: {pair} ({dense.label}, {first.label}); the gain comes from message start-ups, not "
            "from data that a lossy method leaves out"
        )
        return Recommendation(kept, best_exact, dense, said)
    simple = simplest(rival, [p for p in sooner if as_soon(p, rival) and bytes_alone(p) < limit])
    against = f"{milliseconds(dense.seconds)} for dense ({dense.label})"
    said = f"{simple.label} is faster here: {_told(simple)} against {against}"
    if simple is not rival:
        said += f"; {rival.label} is as fast, {_told(rival)}, but less simple"
    return Recommendation(simple, best_exact, dense, said)


def _told(point: SimulatedMethod) -> str:
    return with_steps(point.seconds, point.worth.middle)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _best_exact(points: Sequence[SimulatedMethod]) -> SimulatedMethod:
    """Return the fastest, but what is simpler if it is nearly as fast: S-SGD as it comes, then with other options.

    Other schedules require more of the training loop.
    """
    fastest = min((p for p in points if p.exact), key=_seconds)
    plain = [p for p in points if type(p.method) is SSGD]
    for simpler in ([p for p in plain if p.method == SSGD()], plain):
        kept = min(simpler, key=_seconds, default=fastest)
        if (1 - GAIN) * kept.seconds <= fastest.seconds:
            return kept
    return fastest


def plain_options(method: Method) -> dict[str, Any]:
    return {
        name: value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in method.options().items()
    }


def _complete(candidates: Candidates) -> list[tuple[str, Method]]:
    complete: list[tuple[str, Method]] = []
    for i, (label, method) in enumerate(candidates):
        if not isinstance(method, Method):
            raise ValueError(f"candidates[{i}] must be a (label, method) pair; {method!r} is not a method")
        if label in dict(complete):
            raise ValueError(f"candidates[{i}]: the label {label!r} is given twice")
        complete.append((label, method))
    for label, dense in (("dense fp32", SSGD()), ("dense 16-bit", Cast())):
        if type(dense) not in {type(method) for _, method in complete}:
            complete.append((label, dense))
    return complete


def _dense(method: Method) -> bool:
    """Return whether it is dense, coupled or not, under its own name; a cast with a residual is compression."""
    return type(method) in (SSGD, Cast) and not method.has_residual


def _seconds(point: SimulatedMethod) -> float:
    return point.seconds
