"""Local steps of several ranks in one process, driven as the engine drives them."""

import torch

from thinwire.core.program import Topology
from thinwire.core.program.local_world import run_lockstep
from thinwire.engine.local.rounds import Rounds

SHAPES = {"a": (12, 9), "b": (5,), "conv": (6, 4, 2, 2), "s": (), "row": (1, 8)}


class Ranks:
    """Every rank has weights by name, which the caller changes before each :meth:`step`."""

    def __init__(self, settings, weights, *, dense=(), topology=None):
        self.topology = topology or Topology(len(weights))
        self.weights, self.settings = weights, settings
        self.rounds = [Rounds(settings, own, dense, r, self.topology) for r, own in enumerate(weights)]
        self.sent = [0] * len(weights)

    def step(self, lr=0.1):
        """All optimizers have stepped."""
        for rounds in self.rounds:
            rounds.stepped(lr)
        self._merge()
        for group in zip(*(rounds.leaving() for rounds in self.rounds), strict=True):
            programs = [rounds.send(fragment) for rounds, fragment in zip(self.rounds, group)]
            for one in zip(*programs, strict=True):
                sent = run_lockstep(one, self.topology)
                self.sent = [a + b for a, b in zip(self.sent, sent)]
            assert len({fragment.receive() for fragment in group}) == 1
        self._merge()

    def _merge(self):
        for rounds in self.rounds:
            for fragment in rounds.arriving():
                rounds.merge(fragment)

    def outer(self, rank=0):
        """The outer weights by name."""
        return {
            name: anchor
            for fragment in self.rounds[rank].fragments
            for name, anchor in zip(fragment.parameters, fragment.anchors)
        }


def drawn(seed, ranks=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
        for _ in range(ranks)
    ]


def equal(count, seed=0, dtype=torch.float64):
    """The same weights on all ranks."""
    return [{name: x.clone() for name, x in drawn(seed, dtype=dtype)[0].items()} for _ in range(count)]


def walk(world, steps, first=0, scale=0.01):
    """Changes that do not depend on the weights: ``scale`` times a draw of each rank and step."""
    for step in range(first, first + steps):
        for own, change in zip(world.weights, drawn(1000 + step, len(world.weights)), strict=True):
            for name, x in own.items():
                x.sub_(scale * change[name])
        world.step()


def mean_walk(ranks, steps, scale=0.01, seed=0):
    """Where plain data-parallel training is after the same steps."""
    at = equal(1, seed)[0]
    for step in range(steps):
        for change in drawn(1000 + step, ranks):
            for name, x in at.items():
                x.sub_(scale / ranks * change[name])
    return at


def virtual(world):
    """mean x - mean e + (phi - mean s - A over what travels), which only the inner optimizer may move."""
    found = {}
    size = len(world.weights)
    for index in range(len(world.rounds[0].fragments)):
        group = [rounds.fragments[index] for rounds in world.rounds]
        for place, name in enumerate(group[0].parameters):
            at = sum(f.parameters[name] for f in group) / size
            for f in group:
                if name in f.state.residuals:
                    at = at - f.state.extended(name, f.parameters[name].shape) / size
            if group[0].due is not None:
                flying = [f.snapshot() for f in group]
                gone = group[0].anchors[place] - sum(one["sent"][place] for one in flying) / size
                came = flying[0]["mean"][place]
                change = group[0].anchors[place] - came if world.settings.averages else came
                at = at + gone - change
                owed = [f.state.extended(name, change.shape) for f in group if name in f.state.residuals]
                at = at + flying[0]["kept"] * (change + sum(owed) / size)
            found[name] = at
    return found


def close(a, b, tolerance=1e-12):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)
