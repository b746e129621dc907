"""``thinwire plan --speeds``: workers that differ in speed: at their own pace, through a server or not, and in step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from thinwire.core.methods.cast import Cast
from thinwire.core.methods.registry import label_of
from thinwire.core.pricing.periods import best_period, mean_step, up_to
from thinwire.core.program import Method, Topology
from thinwire.core.records import plain
from thinwire.predict.choose import Entry, Ranking, choose
from thinwire.predict.choose.rank import GAIN
from thinwire.predict.choose.worth import period_worth, shipped
from thinwire.predict.timeline.local_steps import OneWorker, OwnPace, Periodic, is_plain
from thinwire.tools.bench.words import split_options
from thinwire.tools.cli.plan_inputs import Question


def choose_for(question: Question, *, lossy: bool) -> Ranking:
    where = {**question.where, "worth": question.worth_of}
    return choose(question.candidates, *question.setting, **where, lossy=lossy)


@dataclass(frozen=True)
class RankedSpeeds:
    """All workers, and the fastest ones whose worth is most without the others; None: one of them alone."""

    everyone: tuple[Question, Ranking]
    fastest: tuple[Question, Ranking] | None

    @property
    def adds(self) -> float:
        """What the slow machines add to the worth of the fastest alone: 0.2 is a fifth."""
        return _worth(self.everyone[1]) / (_worth(self.fastest[1]) if self.fastest else 1.0) - 1

    @property
    def used(self) -> tuple[Question, Ranking]:
        """Those to be used: a twentieth must be gained by more, as by another schedule."""
        return self.everyone if self.adds >= GAIN or self.fastest is None else self.fastest

    @property
    def sentence(self) -> str:
        question, ranking = self.everyone
        slow = (ranking.workers - (self.fastest[1].workers if self.fastest else 1)) // question.ranks_per_node
        said = "the slow machine adds" if slow == 1 else f"the {slow} slow machines add"
        share = f"{100 * self.adds:.0f} %" if self.adds >= 0.005 else "nothing"
        return f"{said} {share}" + (f": leave {'it' if slow == 1 else 'them'} out" if self.adds < GAIN else "")

    @property
    def sections(self) -> Mapping[str, tuple[Entry, ...]]:
        """The table: at their own pace, the fastest alone, and in step."""
        ranking = self.everyone[1]
        found = {"at their own pace": tuple(filter(at_own_pace, ranking.entries)), "through a server": self.served}
        if self.fastest:
            fast = self.fastest[1]
            found[f"the {fast.workers} fastest alone"] = tuple(dict.fromkeys((fast.best_exact, fast.best)))
        step = tuple(entry for entry in ranking.lossy if not at_own_pace(entry))
        return {**found, "in step, exact": ranking.exact, "in step, lossy": step}

    @cached_property
    def served(self) -> tuple[Entry, ...]:
        """The best one at their own pace through a server, on whose link changes come in, and 8 bits go out to each."""
        question, ranking = self.everyone
        method_of: dict[str, Any] = dict(question.candidates)
        known = [entry for entry in ranking.entries if entry.steps]
        coded = [entry for entry in known if at_own_pace(entry) and _in_bits(method_of[entry.label].codec)]
        alone = next((entry for entry in known if entry.method == OneWorker.name), None)
        if question.network or not coded or alone is None:
            return ()
        like, own, elements = coded[0], method_of[coded[0].label], question.profile.elements
        up, down = (4 * sum(code.payload([(elements,)], 0)) for code in (own.codec, Cast("int8")))
        travels = 8 * ranking.workers * (up + down) / question.bits_per_second
        travels += 2 * (question.latency_seconds + question.delay_seconds)
        worth, kind = question.worth_of or shipped(), partial(OwnPace, speeds=own.speeds)
        steps = period_worth(worth, own.codec, elements, ranking.workers, own.look, kind)
        every, _ = best_period(alone.step_seconds, travels, steps, delay=0, periods=up_to(own.most, own_pace=True))
        served = replace(own, every=every, delay=0)
        seconds = mean_step(alone.step_seconds * served.stretch, travels, every, 0)
        needs, longer = worth(served, elements, ranking.workers), seconds / like.step_seconds
        if not needs.known:  # only with late merges
            return ()
        options = {"sync_every": every, "codec": str(own.codec.dtype).removeprefix("torch.")}
        entry = replace(
            like, label=label_of(own.name, options), step_seconds=seconds, low_seconds=longer * like.low_seconds,
            high_seconds=longer * like.high_seconds, exposed_seconds=seconds - alone.step_seconds,
            bytes_sent=up // every, bound_by="network bandwidth", every=every, steps=needs.middle,
            most_steps=needs.high, worth=alone.step_seconds * (alone.steps or 0) / (seconds * needs.middle),
        )  # fmt: skip
        return (entry,)

    def to_data(self) -> dict[str, Any]:
        fastest = self.fastest and {"workers": self.fastest[1].workers, "ranking": self.fastest[1].to_data()}
        served = [plain(asdict(entry)) for entry in self.served]
        sentence = {"adds": self.adds, "answer": self.sentence}
        return {"ranking": self.everyone[1].to_data(), "fastest": fastest, "through a server": served, **sentence}


def _worth(ranking: Ranking) -> float:
    """Return the most that they are worth by any method; 1 where one alone is recommended."""
    most = max(entry.worth or 1.0 for entry in ranking.entries)
    return 1.0 if ranking.answer.method == OneWorker.name else most


def _in_bits(codec: Method) -> bool:
    """Return whether a server takes changes in it: in 8, 4, 2 or 1 bits."""
    return isinstance(codec, Cast) and codec.has_residual


def at_own_pace(entry: Entry) -> bool:
    return "speeds" in entry.options


def rank_speeds(question: Question, *, lossy: bool) -> RankedSpeeds:
    """Rank all workers, and the fastest ones up to each speed."""
    speeds, workers = question.speeds, question.topology.world_size
    counts = [count for count in range(2, workers) if speeds[count] < speeds[count - 1]]
    parts = [_fastest(question, count) for count in (*counts, workers)]
    *some, everyone = [(part, choose_for(part, lossy=lossy)) for part in parts]
    return RankedSpeeds(everyone, max(some, key=lambda found: _worth(found[1]), default=None))


def _fastest(question: Question, count: int) -> Question:
    """Return the question of the fastest ones; where they differ in speed, also at their own pace."""
    step = tuple(row for row in question.candidates if split_options(row[0])[1].get("pace") != "own")
    topology = Topology(count, question.ranks_per_node)
    part = replace(question, topology=topology, speeds=question.speeds[:count], candidates=step)
    if part.speeds[-1] == 1:
        return part
    return replace(part, candidates=(*step, *_own_pace(part, question.candidates)))


def _own_pace(question: Question, candidates: tuple[tuple[str, Method], ...]) -> list[tuple[str, Method]]:
    """Return the local steps among the candidates at their own pace, each with its best period, codec and delay."""

    def loss_seconds(own: Any) -> float:
        assert question.worth_of is not None
        steps = question.worth_of(own, question.profile.elements, question.topology.world_size).middle
        return steps * question.simulated(own).step_seconds

    rows = list[tuple[str, Method]]()
    for label, method in candidates:
        if not isinstance(method, Periodic) or is_plain(method) or method.outer:
            continue
        options = {one.name: getattr(method, one.name) for one in fields(method)} | {"speeds": question.speeds}
        periods = up_to(method.most, own_pace=True) if method.every is None else (method.every,)
        try:
            tried = [question.resolved(OwnPace(**options | {"every": every})) for every in periods]
            own: Any = min(tried, key=loss_seconds)
        except (LookupError, ValueError):  # the ranking says why it leaves out the same in step
            continue
        if math.isfinite(loss_seconds(own)) or label in question.named:
            name, told = split_options(label)
            told |= {"pace": "own", "sync_every": own.every}
            told |= {} if method.codec else {"codec": own.code.options()["dtype"]}
            told |= {"fragment_sync_delay": own.travelling} if own.travelling else {}
            rows.append((label_of(name, told), own))
    return rows
