"""The same algorithm in another form: DiLoCo through the parameter server."""

import torch
from local_ranks import Ranks

from thinwire.engine.local import Local, Nesterov
from thinwire.systems.parameter_server import simulate
from thinwire.systems.parameter_server.presets import diloco

SIZE, STEPS, ROUNDS, D = 3, 4, 5, 10


def gradient(theta, rank, worker, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return 0.3 * theta + torch.randn(D, generator=draw, dtype=torch.float64)


def start():
    return torch.linspace(0, 2, D, dtype=torch.float64)


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def test_rounds_by_all_reduce_are_those_of_the_server():
    world = Ranks(Local(STEPS, outer=Nesterov(0.7, 0.9)), [{"theta": start()} for _ in range(SIZE)])
    for step in range(ROUNDS * STEPS):
        for rank, own in enumerate(world.weights):
            own["theta"].sub_(0.1 * gradient(own["theta"], rank, 0, step))
        world.step()
    settings = diloco(STEPS, start_nodes=SIZE)
    trace = simulate(settings, nodes=SIZE, updates=ROUNDS, step_seconds=lambda n, w, s, rng: 1.0 + n, outer=nesterov,
                     parameters=start(), gradient=gradient,
                     inner=lambda params: torch.optim.SGD(params, lr=0.1))  # fmt: skip
    torch.testing.assert_close(world.weights[0]["theta"], trace.parameters, rtol=1e-12, atol=1e-12)
