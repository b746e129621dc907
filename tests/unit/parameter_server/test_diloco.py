"""DiLoCo by all-reduce: parameter averaging where it must be, equal to the preset's form, and in fragments."""

import pytest
import torch

from thinwire.parameter_server import DiLoCo, simulate
from thinwire.parameter_server.diloco import nesterov
from thinwire.parameter_server.presets import diloco
from thinwire.parameter_server.submit import LocalSteps
from thinwire.program import Topology
from thinwire.program.lockstep import run_lockstep

SIZE, STEPS, D = 3, 4, 10


def gradient(theta, rank, worker, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return 0.3 * theta + torch.randn(D, generator=draw, dtype=torch.float64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.linspace(0, 1, 4, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64))

    def flat(self):
        return torch.cat([self.a, self.b]).detach()


class Ranks:
    """As much of a GradientSync as is used, for a rank that collects its programs."""

    topology = Topology(SIZE)

    def __init__(self):
        self.programs, self.services = [], self

    def run(self, program):
        self.programs.append(program)


def train(outer, rounds, fragments=1, lr=0.1):
    models = [Model() for _ in range(SIZE)]
    outers = [DiLoCo(m, sync_every=STEPS, outer=outer, fragments=fragments) for m in models]
    syncs = [Ranks() for _ in range(SIZE)]
    exchanged = []
    for step in range(rounds * STEPS):
        for rank, model in enumerate(models):
            g = gradient(model.flat(), rank, 0, step)
            with torch.no_grad():
                model.a -= lr * g[:4]
                model.b -= lr * g[4:]
            outers[rank].step(syncs[rank])
        if syncs[0].programs:
            exchanged.append(step)
            run_lockstep([sync.programs.pop() for sync in syncs], Topology(SIZE))
    return models, exchanged


def test_rate_1_without_momentum_averages_parameters():
    models, exchanged = train(lambda params: torch.optim.SGD(params, 1.0), 3)
    theta = Model().flat()
    for outer in range(3):
        ends = []
        for rank in range(SIZE):
            x = theta
            for i in range(STEPS):
                x = x - 0.1 * gradient(x, rank, 0, outer * STEPS + i)
            ends.append(x)
        theta = sum(ends) / SIZE
    for model in models:
        torch.testing.assert_close(model.flat(), theta, rtol=1e-12, atol=1e-12)
    assert exchanged == [3, 7, 11]


def test_both_forms_agree():
    models, _ = train(nesterov, 5)
    settings = diloco(STEPS, start_nodes=SIZE, local_update=LocalSteps(STEPS, "sgd", 0.1))
    trace = simulate(settings, nodes=SIZE, updates=5, step_seconds=lambda n, w, s, rng: 1.0 + n, outer=nesterov,
                     parameters=Model().flat(), gradient=gradient)  # fmt: skip
    torch.testing.assert_close(models[0].flat(), trace.parameters, rtol=1e-12, atol=1e-12)


def test_fragments_take_turns_and_each_is_averaged_when_it_is_due():
    models, exchanged = train(lambda params: torch.optim.SGD(params, 1.0), 2, fragments=2)
    assert exchanged == [1, 3, 5, 7]
    assert all(torch.equal(model.b, models[0].b) for model in models)  # exchanged last
    assert not torch.equal(models[0].a, models[1].a)  # two steps of its own since


def test_refusals():
    with pytest.raises(ValueError, match="multiple of fragments"):
        DiLoCo(Model(), sync_every=5, fragments=2)
    with pytest.raises(ValueError, match="only 2 trainable"):
        DiLoCo(Model(), sync_every=6, fragments=3)
    with pytest.raises(ValueError, match="below sync_every / fragments = 3"):
        DiLoCo(Model(), sync_every=6, fragments=2, fragment_sync_delay=3)
    with pytest.raises(ValueError, match="from 0 to 1"):
        DiLoCo(Model(), sync_every=6, fragment_update_alpha=1.5)
