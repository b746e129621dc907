"""The parameter server on real sockets and Gloo groups: the same bits as synchronous SGD, faults, checkpoints."""

import contextlib
import threading
import time

import pytest
import torch
from parameter_cluster import (
    Cluster,
    flat,
    held_out,
    impatient,
    in_thread,
    introductions,
    loss,
    model,
    part_of,
    sgd,
    started,
    synchronous,
    wait_until,
)

from spawned import free_port
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.systems.link import actor as actor_module
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import Caller, Listener
from thinwire.systems.link.peer import Peer
from thinwire.systems.parameter_server import Layout, Node, Service, Worker
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import node as node_module
from thinwire.systems.parameter_server.errors import NodeRefused, ServerLost
from thinwire.systems.parameter_server.layout import LayoutMismatch
from thinwire.systems.parameter_server.messages import Enter, Fence, Hello, Stop, Welcome, decode, encode
from thinwire.systems.parameter_server.node import reach
from thinwire.systems.parameter_server.presets import bsp, inhad

pytestmark = pytest.mark.dist


def test_s_0_is_synchronous_sgd_bit_for_bit():
    cluster = Cluster(bsp(start_nodes=2, deterministic=True), 2, 2, delays=[0.0, 0.01], updates=15)
    status = cluster.join()
    assert torch.equal(flat(cluster.model), synchronous(2, 2, 15))
    assert status.max_staleness == 0
    assert status.gradients == 60


SETTINGS = {
    "inhad": inhad(2, start_nodes=2),
    "topk": inhad(2, start_nodes=2, compress_up="topk", compress_down="topk", density=0.2),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_trains(settings):
    cluster = Cluster(settings, 2, 2, delays=[0.002, 0.008], outer=sgd(lr=0.1), updates=60)
    before = held_out(model())
    status = cluster.join()
    after = held_out(cluster.model)
    assert after < 0.9 * before
    assert settings.max_staleness is None or status.max_staleness <= settings.max_staleness
    assert status.version == 60


def test_compression_sends_fewer_bytes():
    sent = {}
    for kind in (None, "int8", "topk"):
        settings = inhad(2, start_nodes=1, compress_up=kind, compress_down=kind, density=0.01)
        status = Cluster(settings, 1, updates=12, width=4000).join()
        sent[kind] = status.up_bytes + status.down_bytes  # one sum an update, of however many gradients
    assert sent["int8"] < 0.45 * sent[None]  # the first weights go whole, and the last
    assert sent["topk"] < 0.25 * sent[None]


def test_gradients_that_are_not_finite_are_dropped_and_stop_nothing():
    cluster = Cluster(bsp(start_nodes=2), 2, spoil=lambda number: number % 3 == 1, updates=12)
    status = cluster.join()
    assert torch.isfinite(flat(cluster.model)).all()
    assert status.counters["empty"] > 0
    assert status.gradients == 2 * 8


def test_a_worker_that_leaves_does_not_hold_up_the_others(monkeypatch):
    made = introductions(monkeypatch)
    cluster = Cluster(bsp(start_nodes=2, lease_seconds=15.0), 2, 2, delays=[0.02, 0.02])
    wait_until(lambda: cluster.service.machine.version >= 10)
    seen = len(made)
    next(peer for first, peer in made if first == Enter(1)).wire.close()  # it comes back by itself
    while len(made) < seen + 2:  # both ends
        time.sleep(0.01)
    cluster.stop_after(20)
    status = cluster.join()
    assert status.counters["joined"] == 2  # the node has stayed
    assert {first for first, _ in made[seen:]} == {Enter(1)}


def test_a_node_may_join_and_another_leave_while_training_goes_on():
    cluster = Cluster(bsp(start_nodes=2, lease_seconds=6.0), 2, delays=[0.01, 0.01])
    machine = cluster.service.machine
    cluster.add(5, delay=0.01)
    wait_until(lambda: machine.counters["joined"] >= 3 and machine.version >= 20)
    gone = cluster.nodes.pop(1)
    gone.failure = ServerLost("ended by the test")
    gone.close()
    cluster.stop_after(20)
    with contextlib.suppress(ServerLost):
        cluster.join()
    status = cluster.status
    assert status.counters["joined"] == 3
    assert torch.isfinite(flat(cluster.model)).all()


def test_a_service_that_has_run_is_closed_and_saves_nothing_again(tmp_path):
    cluster = Cluster(bsp(), 1, updates=6, checkpoint_every=5, checkpoint_dir=tmp_path)
    cluster.join()
    written = checkpoints.kept_in(tmp_path).found()
    assert written
    for path in written.values():
        path.unlink()
    with cluster.service, cluster.nodes[0]:
        pass
    assert not checkpoints.kept_in(tmp_path).found()


def test_another_model_is_refused_by_name():
    cluster = Cluster(inhad(start_nodes=2), 1, updates=5)
    worker = Worker(model(width=7), *part_of(0, 0), cluster.nodes[0].address, 0)
    with pytest.raises(LayoutMismatch, match=r"0\.weight \[7, 4\], the server's has 0\.weight \[6, 4\]"):
        worker.run()
    wait_until(lambda: cluster.service.machine.members)
    cluster.service.stop()
    cluster.join()


def test_a_lost_server_ends_node_and_workers_with_a_sentence(monkeypatch):
    cluster = Cluster(inhad(), 1, apart=True)
    wait_until(lambda: cluster.version >= 5)
    monkeypatch.setattr(actor_module, "time", impatient())
    cluster.kill()
    with pytest.raises(ServerLost, match=r"no server at .* for 60 s"):
        cluster.join()


def test_a_second_node_with_a_number_at_work_is_refused_and_the_first_goes_on():
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.01])
    wait_until(lambda: cluster.service.machine.version >= 5)
    second = Node(cluster.address, 0, 1)
    worker = Worker(model(), *part_of(0, 0), second.address, 0)  # of another process: it cannot ask its node
    with pytest.raises(ServerLost, match="given up"):
        worker.run()
    with pytest.raises(NodeRefused, match="node 0 is at work in another process"):
        second.wait(0)
    second.close()
    cluster.stop_after(20)
    counters = cluster.join().counters
    assert (counters["joined"], counters["refused"]) == (1, 1)


def test_a_worker_that_comes_after_the_end_takes_the_last_weights(caplog):
    service = Service(model(), inhad(), host="127.0.0.1", outer=sgd(), updates=10)
    serving = started(service.run)
    node = Node(f"127.0.0.1:{service.port}", 0, 2)
    Worker(model(), *part_of(0, 0), node.address, 0).run()
    assert node.wait(60.0)
    seen_off = started(node.wait_for_stragglers, 60.0)
    late = Worker(model(99), *part_of(0, 1), node.address, 1)
    stats = late.run()
    assert (stats.submissions, stats.version) == (0, 10)
    assert "after training had ended" in caplog.text
    seen_off.join(30.0)
    assert not seen_off.is_alive()  # nobody else is to come
    node.close()
    serving.join(60.0)  # only now the model is written
    assert torch.equal(flat(late.model), flat(service.model))


def test_a_node_whose_server_never_was(monkeypatch):
    monkeypatch.setattr(actor_module, "time", impatient())
    with pytest.raises(ServerLost, match="--server"):
        Node(f"127.0.0.1:{free_port()}", 0, 1)


def test_a_node_that_is_closed_while_it_joins_leaves_no_member_behind(monkeypatch):
    cluster = Cluster(bsp(start_nodes=2, lease_seconds=1000.0), 0, updates=5)
    joined, closed = threading.Event(), threading.Event()

    def reach_slowly(*words):
        found = reach(*words)
        joined.set()
        closed.wait(60.0)
        return found

    monkeypatch.setattr(node_module, "reach", reach_slowly)
    cluster.add(0)
    assert joined.wait(60.0)
    closer = started(cluster.nodes[0].close)
    assert cluster.nodes[0].wait(60.0)  # it is over; close waits for the thread that joins
    closed.set()
    closer.join(60.0)
    while cluster.service.machine.members or not cluster.service.machine.counters["joined"]:  # less than a lease
        time.sleep(0.01)
    cluster.service.stop()


def refusal_of(node):
    """What whoever waits for the node is told, in time."""
    failures = []
    in_thread(failures, node.wait).join(10.0)
    assert failures, "its workers and who asks it wait for ever"
    assert isinstance(failures[0], NodeRefused)
    return str(failures[0])


def test_a_node_that_is_refused_while_a_worker_leaves_ends_all_the_same(monkeypatch):
    refused, post = threading.Event(), Peer.post
    service = Service(model(), bsp(start_nodes=2), host="127.0.0.1", outer=sgd())

    def reaching(*words):
        assert refused.wait(60.0)
        raise NotAdmitted("refused by the test")

    def posting(peer, message):
        if isinstance(message, Stop) and workers:
            workers.pop().close()  # in the middle of telling them all; half a second, or until its leader knows
            end = time.monotonic() + 0.5
            while len(node.leader.alive) == 2 and time.monotonic() < end:
                time.sleep(0.01)
        post(peer, message)

    monkeypatch.setattr(node_module, "reach", reaching)
    node = Node(f"127.0.0.1:{service.port}", 0, 2)
    workers = [Caller(node.address, PeerIdentity("worker", k)).connect(encode(Enter(k))) for k in range(2)]
    first = workers.pop(0)
    wait_until(lambda: len(node.leader.alive) >= 2)
    monkeypatch.setattr(Peer, "post", posting)
    refused.set()
    assert "refused by the test" in refusal_of(node)
    first.close()
    node.close()
    service.close()


def test_a_node_that_cannot_even_call_its_server_ends_with_the_reason(monkeypatch):
    """Its keys were taken away meanwhile, for example: the way to a shard reads them again."""
    service = Service(model(), bsp(start_nodes=2), host="127.0.0.1", outer=sgd())

    def reaching(*words):
        raise ValueError("certificate: /gone/identity.crt is not a file")

    monkeypatch.setattr(node_module, "reach", reaching)
    with Node(f"127.0.0.1:{service.port}", 0, 1) as node:
        first = Caller(node.address, PeerIdentity("worker", 0)).connect(encode(Enter(0)))
        assert "is not a file" in refusal_of(node)
        first.close()
    service.close()


def test_a_worker_that_ends_with_an_error_is_missed_at_once():
    """Its process may live on, in a notebook say: not only a lease later may the others go on without it."""
    service = Service(model(), bsp(start_nodes=1, lease_seconds=1000.0), host="127.0.0.1", outer=sgd())
    serving = started(service.run)

    def broken(number):
        raise RuntimeError("no such batch")

    with Node(f"127.0.0.1:{service.port}", 0, 1) as node:
        with pytest.raises(RuntimeError, match="no such batch"):
            Worker(model(), broken, loss, node.address, 0).run()
        end = time.monotonic() + 10.0
        while node.leader.alive:
            assert time.monotonic() < end, "its leader waits for it"
            time.sleep(0.01)
    service.stop()
    serving.join(60.0)


def test_who_waits_for_anothers_number_hears_that_the_server_ends():
    service = Service(model(), bsp(start_nodes=2, lease_seconds=1000.0), host="127.0.0.1", outer=sgd())
    serving = started(service.run)
    caller, layout = Caller(f"127.0.0.1:{service.port}", PeerIdentity("node", 0)), Layout.of(model()).number
    member = caller.connect(encode(Hello(0, 1, layout, instance=1)))
    assert isinstance(decode(member.receive_frame(FRAME.size, 60.0))[0], Welcome)
    waiting = caller.connect(encode(Hello(0, 1, layout, instance=2)))
    assert isinstance(decode(member.receive_frame(FRAME.size, 60.0))[0], Fence)  # is it alive? It does not say
    service.stop()
    serving.join(60.0)
    with pytest.raises(PairError, match="has closed"):
        waiting.receive_frame(FRAME.size, 5.0)
    for pair in (member, waiting):
        pair.close()


def test_a_node_waits_for_its_server_while_somebody_else_has_the_port(monkeypatch):
    port, refused = free_port(), threading.Event()
    cluster = Cluster(inhad(), 1, apart=True, port=port)
    wait_until(lambda: cluster.version >= 3)

    def reaching(*words):
        try:
            return reach(*words)
        except NotAdmitted:
            refused.set()
            raise

    monkeypatch.setattr(node_module, "reach", reaching)
    cluster.kill()
    other = Listener(port, roles=("worker",))
    assert refused.wait(60.0)
    assert not cluster.nodes[0].wait(0.5)
    other.close()
    cluster.serve(Service(model(), inhad(), host="127.0.0.1", port=port, outer=sgd(), updates=5))
    assert cluster.join().counters["joined"] == 1
