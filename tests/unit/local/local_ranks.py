"""Local steps of several ranks in one process, driven as the engine drives them."""

from thinwire.local.rounds import Rounds
from thinwire.program import Topology
from thinwire.program.lockstep import run_lockstep


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
                fragment.merge(rounds.count)

    def outer(self, rank=0):
        """The outer weights by name."""
        return {
            name: anchor
            for fragment in self.rounds[rank].fragments
            for name, anchor in zip(fragment.parameters, fragment.anchors)
        }
