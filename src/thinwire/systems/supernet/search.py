"""Find the best sub-network under a latency limit: evolution with predicted latencies, then measurement.

Method: the evolution of Once-for-all (Cai et al., arXiv 1908.09791, section 3.4). What EASNet used for stereo is not
public.

Differences from theirs: a limit below the smallest network raises an error at once instead of looping forever; the
smallest network is always in the first generation; the best candidates are measured, and the *measured* latency of the
answer is within the limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.core.checks import check_count, check_number
from thinwire.core.program import AllGather, Broadcast, Program
from thinwire.systems.supernet.space import Space, SubNet

Score = Callable[[SubNet], float]
_TRIES = 200  # to find one child within the limit


class Infeasible(ValueError):
    """No sub-network is within the limit."""

    def __init__(self, smallest_ms: float, limit_ms: float, unit: str = "ms") -> None:
        self.smallest_ms, self.limit_ms = smallest_ms, limit_ms
        super().__init__(
            f"no sub-network meets {limit_ms:g} {unit}: the smallest takes {smallest_ms:.3g} {unit}, so ask for at "
            "least that much, or use smaller images or a faster device"
        )


@dataclass(frozen=True)
class Candidate:
    """An evaluated sub-network: higher ``fitness`` is better; milliseconds by the table, and measured if available."""

    sub_net: SubNet
    fitness: float
    predicted_ms: float
    measured_ms: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The answer and how it was found.

    Attributes:
        best: measured, and within the limit.
        candidates: those that were measured, best fitness first. archive: everything that was scored.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    archive: tuple[Candidate, ...]

    def pareto(self) -> list[Candidate]:
        """Return the candidates of the archive that no faster one equals or beats, fastest first."""
        found: list[Candidate] = []
        for c in sorted(self.archive, key=lambda c: (c.predicted_ms, -c.fitness)):
            if not found or c.fitness > found[-1].fitness:
                found.append(c)
        return found


@dataclass(frozen=True)
class Evolution:
    """How to search.

    Attributes:
        population: sub-networks in a generation. generations: after the first.
        parents: share of the population that has children. mutate: probability that a gene gets another value.
        finalists: how many are measured. seed: for all draws; the same on all ranks.
    """

    population: int = 100
    generations: int = 500
    parents: float = 0.25
    mutate: float = 0.1
    finalists: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 0), ("finalists", 1)):
            check_count(name, getattr(self, name), least)
        for name in ("parents", "mutate"):
            check_number(name, getattr(self, name), above=0, most=1)


def search(
    space: Space,
    fitness: Score,
    limit_ms: float,
    predict: Score,
    measured: Score,
    evolution: Evolution = Evolution(),
    *,
    rank: int = 0,
    world: int = 1,
    canonical: Callable[[SubNet], SubNet] = lambda net: net,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    on_generation: Callable[[int, Candidate], None] | None = None,
) -> Program:
    """Return a :class:`SearchResult`, equal on all ranks. A program, for ``sync.services.run`` or ``run_alone``.

    Args:
        space: the sub-networks to choose from.
        fitness: of a sub-network, the higher the better, the same wherever it is computed: minus its end-point error on
            a fixed set after calibration. Ranks share the evaluation of new sub-networks.
        limit_ms: of the latency. predict: by the table. measured: on the device; rank 0's value counts.
        evolution, rank, world, device: how to search, and the group that does.
        canonical: maps equal networks to one of them.
        on_generation: called with its number and the best candidate so far.

    Raises:
        Infeasible: the smallest network is predicted, or every finalist measured, to exceed the limit.
    """
    rng = random.Random(evolution.seed)
    smallest = canonical(space.smallest)
    if predict(smallest) > limit_ms:
        raise Infeasible(predict(smallest), limit_ms)
    archive: dict[SubNet, Candidate] = {}

    def drawn(make: Callable[[], SubNet], otherwise: SubNet) -> SubNet:
        for _ in range(_TRIES):
            net = canonical(make())
            if predict(net) <= limit_ms:
                return net
        return otherwise

    population = [smallest]
    if predict(largest := canonical(space.largest)) <= limit_ms:
        population.append(largest)
    while len(population) < evolution.population:
        population.append(drawn(lambda: space.sample(rng), smallest))
    for generation in range(evolution.generations + 1):
        new = [net for net in dict.fromkeys(population) if net not in archive]
        scores = yield from _scored(new, fitness, rank, world, device)
        archive |= {net: Candidate(net, score, predict(net)) for net, score in zip(new, scores)}
        ranked = sorted((archive[net] for net in dict.fromkeys(population)), key=_order)
        if on_generation is not None:
            on_generation(generation, min(archive.values(), key=_order))
        if generation == evolution.generations:
            break
        parents = [c.sub_net for c in ranked[: max(1, round(evolution.parents * evolution.population))]]
        children = [
            drawn(lambda: mutated(space, rng.choice(parents), rng, evolution.mutate), rng.choice(parents))  # noqa: B023
            for _ in range(evolution.population // 2)
        ]
        while len(children) < evolution.population:
            children.append(drawn(lambda: crossed(rng.choice(parents), rng.choice(parents), rng), rng.choice(parents)))  # noqa: B023
        population = [*parents, *children]
    best = sorted(archive.values(), key=_order)[: evolution.finalists]
    if all(c.sub_net != smallest for c in best):
        best.append(archive[smallest])
    mine = torch.tensor([measured(c.sub_net) if rank == 0 else 0.0 for c in best], dtype=torch.float64)
    times = (yield Broadcast(mine.to(device))).tolist()
    done = [replace(c, measured_ms=ms) for c, ms in zip(best, times)]
    kept = [c for c, ms in zip(done, times) if ms <= limit_ms]
    if not kept:
        raise Infeasible(min(times), limit_ms)
    return SearchResult(min(kept, key=_order), tuple(done), tuple(sorted(archive.values(), key=_order)))


def _order(c: Candidate) -> tuple[float, float, str]:
    return -c.fitness, c.predicted_ms, c.sub_net.hash


def _scored(nets: Sequence[SubNet], fitness: Score, rank: int, world: int, device: torch.device) -> Program:
    """Score every ``world``-th network on each rank, and gather all scores on all ranks."""
    if not nets:
        return []
    longest = -(-len(nets) // world)
    mine = torch.zeros(longest, dtype=torch.float64)
    for place, net in enumerate(nets[rank::world]):
        mine[place] = fitness(net)
    table: Tensor = yield AllGather(mine.to(device))
    rows = table.cpu()
    return [float(rows[i % world, i // world]) for i in range(len(nets))]


def mutated(space: Space, net: SubNet, rng: random.Random, probability: float) -> SubNet:
    """Return a copy in which each gene changes with this probability, and the number of scales with 0.5."""
    fresh = space.sample(rng)
    scales = rng.choice(space.scales) if rng.random() < 0.5 else net.scales
    stages = []
    for s in range(scales):
        old = net.stages[s] if s < net.scales else ()
        depth = len(old) if old and rng.random() >= probability else rng.choice(space.depths)
        stage = []
        for b in range(depth):
            known = b < len(old)
            k = old[b][0] if known and rng.random() >= probability else rng.choice(space.kernels)
            e = old[b][1] if known and rng.random() >= probability else rng.choice(space.expands)
            stage.append((k, e))
        stages.append(tuple(stage))
    refine = net.refine if not space.refine_widths or rng.random() >= probability else fresh.refine
    return SubNet(tuple(stages), refine)


def crossed(a: SubNet, b: SubNet, rng: random.Random) -> SubNet:
    """Take each gene from one of two parents, if both have it; likewise the number of scales and of blocks."""
    scales = rng.choice((a.scales, b.scales))
    stages = []
    for s in range(scales):
        both = [net.stages[s] for net in (a, b) if s < net.scales]
        depth = len(rng.choice(both))
        blocks = []
        for place in range(depth):
            having = [stage[place] for stage in both if place < len(stage)]
            blocks.append((rng.choice(having)[0], rng.choice(having)[1]))
        stages.append(tuple(blocks))
    return SubNet(tuple(stages), rng.choice((a.refine, b.refine)))
