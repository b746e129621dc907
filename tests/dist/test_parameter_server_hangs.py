"""A process that hangs while its heartbeat thread lives is named in a warning, and not given up."""

import threading

import pytest
import torch
from parameter_cluster import Cluster, in_thread, loss, model, part_of, wait_until

from thinwire.systems.parameter_server import Node, Service, Worker
from thinwire.systems.parameter_server.presets import bsp

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def heard(caplog, words):
    """Wait until they are said; return the whole."""
    wait_until(lambda: words in caplog.text)
    return next(message for message in caplog.messages if words in message)


def hanging(batches):
    """Batches of which the third comes late; what tells that it is asked for, and what lets it come."""
    hangs, goes_on = threading.Event(), threading.Event()

    def batch(number):
        if number == 3:
            hangs.set()
            goes_on.wait(150.0)
        return batches(number)

    return batch, hangs, goes_on


def test_a_worker_that_is_long_about_its_gradient_is_named(caplog, monkeypatch):
    monkeypatch.setattr("thinwire.systems.parameter_server.node.LONG_LEASES", 0.2)
    batch, hangs, goes_on = hanging(part_of(0, 1)[0])
    failures = []
    service = Service(model(), bsp(start_nodes=1, lease_seconds=6.0), host="127.0.0.1", updates=8)
    serving = in_thread(failures, service.run)
    with Node(f"127.0.0.1:{service.port}", 0, 2) as node:
        workers = [
            in_thread(failures, Worker(model(), batches, loss, node.address, number).run)
            for number, batches in enumerate((part_of(0, 0)[0], batch))
        ]
        assert hangs.wait(60.0)
        heard(caplog, "worker 1 is alive but has handed in nothing for")
        goes_on.set()
        for thread in (*workers, serving):
            thread.join(60.0)
    assert not failures
    assert service.machine.version == 8


def test_the_other_nodes_go_on_without_one_whose_worker_hangs(caplog):
    batch, hangs, goes_on = hanging(part_of(1, 0)[0])
    failures = []
    service = Service(model(), bsp(start_nodes=2, lease_seconds=3.0), host="127.0.0.1", updates=40)
    serving = in_thread(failures, service.run)
    address = f"127.0.0.1:{service.port}"
    with Node(address, 0, 1) as first, Node(address, 1, 1) as second:
        workers = [
            in_thread(failures, Worker(model(), batches, loss, node.address, 0).run)
            for node, batches in ((first, part_of(0, 0)[0]), (second, batch))
        ]
        assert hangs.wait(60.0)
        heard(caplog, "node 1 lives and makes no progress: training goes on without it until it does")
        serving.join(60.0)
        assert service.machine.version == 40
        goes_on.set()
        for thread in workers:
            thread.join(60.0)
    assert not failures


class Blocks(torch.optim.SGD):
    """The fourth step of the first shard that makes it takes until the test says so."""

    lock, goes_on = threading.Lock(), threading.Event()
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 4 and self.lock.acquire(blocking=False):
            self.goes_on.wait(150.0)
        return super().step(closure)


def test_a_shard_that_is_long_about_an_update_is_named(caplog):
    cluster = Cluster(bsp(start_nodes=1, lease_seconds=4.0), 1, shards=2, updates=8,
                      outer=lambda params: Blocks(params, lr=0.05))  # fmt: skip
    told = heard(caplog, "no version 4 from shard ")
    slow = [shard.index for shard in cluster.shards if shard.slice.version == 3]
    assert told == f"no version 4 from shard {slow[0]} after 4 s, despite signs of life"
    Blocks.goes_on.set()
    assert cluster.join().version == 8


def test_a_server_that_is_long_about_something_is_named_by_its_nodes(caplog):
    busy, goes_on = threading.Event(), threading.Event()

    def on_update(version, theta):
        if version == 3:
            busy.set()
            goes_on.wait(150.0)

    cluster = Cluster(bsp(start_nodes=1, lease_seconds=3.0), 1, updates=8, on_update=on_update)
    assert busy.wait(60.0)
    assert "silent" in heard(caplog, "node 0 has lost its server (")
    goes_on.set()
    assert cluster.join().version == 8
