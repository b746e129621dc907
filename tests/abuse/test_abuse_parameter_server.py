"""Members, workers and shards that send anything: the server goes on, and an honest node trains to the end."""

import contextlib
import time

import pytest
import torch
from abuse_frames import OF_A_SHARD, OF_A_VISITOR, OF_A_WORKER, hello, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_cluster import (
    Cluster,
    batch_of,
    flat,
    in_thread,
    loss,
    memory,
    model,
    part_of,
    sgd,
    started,
    wait_until,
)

import thinwire as tw
from thinwire.core.errors import PairError
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import Caller, connect
from thinwire.systems.parameter_server import Layout, Node, Service, Shard, Worker, preset
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.outer import fingerprint
from thinwire.systems.parameter_server.presets import bsp

LAYOUT = Layout.of(model()).number
MEMORY = 200e6
seeds = st.integers(0, 2**32)


def send(pair, frames):
    """All of it, or until the other side has had enough; tensors lie ready. Returns how many frames."""
    sent = 0
    with contextlib.suppress(PairError):
        pair.send_tensor(torch.rand(44 * 40), 5.0)
        for frame in frames:
            pair.send_frame(frame)
            sent += 1
    pair.close()
    return sent


class Attacked:
    """A server in a thread, and what has been sent to it."""

    def __init__(self, name):
        self.service = Service(model(), preset(f"{name}:lease_seconds=5"), outer=sgd(), updates=10**9)
        self.address, self.frames, self.failures = f"127.0.0.1:{self.service.port}", 0, []
        self.thread = in_thread(self.failures, self.service.run)

    def by_a_member(self, seed):
        pair = Caller(self.address, PeerIdentity("node", 1)).connect(hello(1, LAYOUT, seed + 1))
        welcome = msg.decode(pair.receive_frame(FRAME.size, 60.0))[0]
        if isinstance(welcome, msg.Welcome):
            near = (welcome.member, 0, 1, 2, self.service.machine.version)
            self.frames += send(pair, stream(seed, near))
        pair.close()
        assert not self.failures, self.failures

    def then_train(self):
        """A node comes as if nothing had been."""
        if self.service.settings.sync_every is not None:
            self._then_train_in_a_loop()
            return
        node = Node(self.address, 0, 1)
        worker = Worker(model(), *part_of(0, 0), node.address, 0, check=lambda: node.wait(0))
        working = started(worker.run)
        wait_until(lambda: worker.stats.submissions >= 10)
        self.service.stop()
        ended((working, self.thread))
        node.close()
        assert not self.failures, self.failures
        assert flat(self.service.model).isfinite().all()

    def _then_train_in_a_loop(self):
        network = model()
        optimizer = sgd()(network.parameters())
        with tw.attach(network, optimizer, "local", server=self.address, node=0) as sync:
            begun = sync.rounds
            for step in range(12 * self.service.settings.sync_every):  # an update of fedbuff is of ten changes
                loss(network, batch_of(0, 0, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert sync.rounds > begun
        self.service.stop()
        ended((self.thread,))
        assert not self.failures, self.failures
        assert flat(self.service.model).isfinite().all()


def attack(name, examples):
    attacked, before = Attacked(name), memory()

    @settings(max_examples=examples, database=None)
    @given(seeds)
    def go(seed):
        attacked.by_a_member(seed)

    go()
    assert memory() - before < MEMORY
    attacked.then_train()
    return attacked.frames


@pytest.mark.parametrize("name", ["inhad", "asp", "bsp"])
def test_whatever_a_member_sends(name):
    assert attack(name, 200) > 200  # how much more is taken before the end of each: as the threads run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["inhad", "asp", "bsp", "ssp", "n_softsync", "fedbuff", "delayed_nesterov", "diloco"])
def test_whatever_a_member_sends_for_long(name):
    assert attack(name, 10_000) > 10_000


def test_whatever_a_visitor_sends_to_a_shard():
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.005], shards=1)
    wait_until(lambda: cluster.service.shards.shards)
    port, before = cluster.service.shards.shards[0].port, memory()

    @settings(max_examples=60, database=None)
    @given(seeds)
    def go(seed):
        (member,) = cluster.service.machine.members or (0,)
        pair = connect("127.0.0.1", port, msg.encode(msg.Ticket(1 + seed)), PeerIdentity("node", 9))
        send(pair, stream(seed, (member, 0, 1), OF_A_VISITOR))

    go()
    assert memory() - before < MEMORY
    cluster.stop_after(20)
    cluster.join()


def test_whatever_a_shard_sends_that_does_not_begin():
    """Before all shards are there, one that sends anything only leaves its place to another."""
    service = Service(model(), bsp(), outer=sgd(), updates=3, shards=2)
    failures = []
    serving = in_thread(failures, service.run)
    first = msg.RegisterShard(0, 1, msg.PROTOCOL, False, fingerprint(sgd(), torch.float32))
    taken = []

    @settings(max_examples=60, database=None)
    @given(seeds)
    def go(seed):
        while service.shards.shards:  # one that comes before its place is free again is refused
            time.sleep(0.001)
        pair = Caller(f"127.0.0.1:{service.port}", PeerIdentity("shard", 0)).connect(msg.encode(first))
        if isinstance(msg.decode(pair.receive_frame(FRAME.size, 60.0))[0], msg.ShardAccepted):
            taken.append(send(pair, stream(seed, (0, 1, 2), OF_A_SHARD)))
        pair.close()
        assert not failures

    go()
    assert len(taken) > 20
    wait_until(lambda: not service.shards.shards)
    shards = [Shard(f"127.0.0.1:{service.port}", index, outer=sgd()) for index in range(2)]
    node = Node(f"127.0.0.1:{service.port}", 0, 1)
    worker = Worker(model(), *part_of(0, 0), node.address, 0, check=lambda: node.wait(0))
    ended([serving, *(started(one.run) for one in (*shards, worker))])
    node.close()
    assert not failures
    assert service.machine.version == 3


def with_an_honest_worker(service, delay):
    """Serve, and let the first worker of a node of two work: the node, and the threads, the worker's first."""
    serving = started(service.run)
    node = Node(f"127.0.0.1:{service.port}", 0, 2)
    honest = Worker(model(), *part_of(0, 0, delay), node.address, 0, check=lambda: node.wait(0))
    working = started(honest.run)
    return node, (working, serving)


def ended(threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("method", "numel"), [("bsp", 1), ("ssp", 88), ("bsp:deterministic=true", 22)])
def test_a_result_of_another_length_ends_the_one_who_sent_it_and_nobody_else(method, numel, caplog):
    service = Service(model(), preset(f"{method}:start_nodes=1:lease_seconds=100"), outer=sgd())
    node, threads = with_an_honest_worker(service, 0.02)
    pair = Caller(node.address, PeerIdentity("worker", 1)).connect(msg.encode(msg.Enter(1)))
    while not isinstance(work := msg.decode(pair.receive_frame(FRAME.size, 60.0))[0], msg.Work):
        pass
    pair.send_frame(msg.encode(msg.Result(work.token, 8, 1.0, 0.01), 0, 4 * numel))
    pair.send_tensor(torch.rand(numel), 60.0)
    with contextlib.suppress(PairError):  # who lives is pinged
        while True:
            pair.receive_frame(FRAME.size, 60.0)
    version = service.machine.version
    while service.machine.version < version + 20:  # without it, at once
        time.sleep(0.01)
    service.stop()
    ended(threads)
    pair.close()
    node.close()
    assert flat(service.model).isfinite().all()
    assert "a bug in thinwire" not in caplog.text


def test_whatever_a_worker_sends_to_its_leader():
    service = Service(model(), bsp(start_nodes=1), outer=sgd(), updates=60)
    node, threads = with_an_honest_worker(service, 0.005)

    @settings(max_examples=60, database=None)
    @given(seeds)
    def go(seed):
        pair = Caller(node.address, PeerIdentity("worker", 1)).connect(msg.encode(msg.Enter(1)))
        send(pair, stream(seed, (1, 0, 2), OF_A_WORKER))

    with contextlib.suppress(PairError):
        go()
    ended(threads)
    node.close()
    assert service.machine.version == 60
