"""What happens inside a node: ranks that compute each gradient together, and buffers that come back averaged."""

import time

import pytest
import torch
from parameter_cluster import sgd, started

from spawned import run
from thinwire.systems import parameter_server as ps
from thinwire.systems.parameter_server import Layout, Service
from thinwire.systems.parameter_server.layout import BufferLayout

pytestmark = pytest.mark.dist
UPDATES = 12


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def batch(rank, number):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def loss(model, x):
    return (model(x) - x[:, :2]).square().mean()


def serving(**options):
    model = build()
    options = {"outer": sgd(), "updates": UPDATES, **options}
    service = Service(model, ps.presets.bsp(), host="127.0.0.1", **options)
    thread = started(service.run)
    return model, service, thread


def plain(ranks):
    """torch SGD on the mean gradient of some ranks; also rank 0's buffers after each step."""
    models, buffers = [build() for _ in ranks], []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
    for step in range(UPDATES):
        for rank, model in zip(ranks, models):
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
        for together in zip(*(m.parameters() for m in models)):
            mean = sum(p.grad for p in together) / len(ranks)
            for p in together:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        buffers.append(BufferLayout.of(models[0]).flat(models[0]))
    return Layout.of(models[0]).flat(models[0]), buffers


def test_running_means_of_the_server_are_the_average_of_those_of_the_nodes_and_all_have_them_in_the_end(tmp_path):
    served, service, thread = serving(checkpoint_dir=tmp_path)
    model = build()
    ps.run(model, lambda number: batch(0, number), loss, server=f"127.0.0.1:{service.port}")
    thread.join(60)
    theta, buffers = plain([0])
    layout, expected = BufferLayout.of(served), buffers[0]
    for row in buffers[1:]:
        moved = 0.9 * expected + 0.1 * row
        expected = torch.cat([moved[: layout.floats], row[layout.floats :]])
    assert torch.equal(Layout.of(served).flat(served), theta)
    torch.testing.assert_close(layout.flat(served), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(layout.flat(model), layout.flat(served))
    again = Service(build(), ps.presets.bsp(), host="127.0.0.1", outer=sgd(), checkpoint_dir=tmp_path)
    torch.testing.assert_close(again.buffers.value, expected, rtol=1e-12, atol=0)
    again.close()


def together(rank, size, port):
    model = build()
    stats = ps.run(model, lambda number: batch(rank, number), loss, server=f"127.0.0.1:{port}", node_id=0,
                   intra_node="collectives")  # fmt: skip
    buffers = BufferLayout.of(model).flat(model).tolist()
    return Layout.of(model).flat(model).tolist(), buffers, stats.steps, stats.version


def test_ranks_that_compute_together_are_one_worker_with_the_mean_gradient_bit_for_bit():
    served, service, thread = serving()
    results = run(together, 2, service.port)
    thread.join(60)
    theta, _ = plain([0, 1])
    assert torch.equal(Layout.of(served).flat(served), theta)
    for flat, buffers, steps, version in results:
        assert flat == theta.tolist()
        assert buffers == BufferLayout.of(served).flat(served).tolist()
        assert steps >= UPDATES
        assert version == UPDATES
    assert service.machine.counters["applied"] == UPDATES


def leading(rank, size, port):
    def slowly(model, x):
        time.sleep(0.02)  # so that the second worker is there before the end
        return loss(model, x)

    return ps.run(build(), lambda number: batch(rank, number), slowly, server=f"127.0.0.1:{port}").version


def test_ranks_on_their_own_are_workers_of_one_node():
    _, service, thread = serving(updates=60)
    assert run(leading, 2, service.port, init=False) == [60, 60]
    thread.join(60)
    assert service.machine.counters["applied"] > 60  # of both workers, from when the second is there
    assert service.machine.counters["joined"] == 1


def test_an_unknown_way_to_work_together():
    with pytest.raises(ValueError, match="use one of leader, collectives"):
        ps.run(build(), [batch(0, 0)], loss, server="127.0.0.1:1", intra_node="ring")
