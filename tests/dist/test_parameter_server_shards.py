"""A model in shards over real sockets: the same bits, bytes by shard, faults in the middle, checkpoints, refusals."""

import json
import socket
import sys
import threading

import pytest
import torch
from parameter_cluster import (
    Cluster,
    flat,
    gradient_of,
    held_out,
    impatient,
    in_thread,
    introductions,
    model,
    part_of,
    sgd,
    started,
    synchronous,
    wait_until,
)

from spawned import free_port
from thinwire.core.errors import PairError
from thinwire.systems.link import actor as actor_module
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import INSECURE, PeerIdentity
from thinwire.systems.link.listener import Caller, Listener, connect
from thinwire.systems.link.peer import Peer
from thinwire.systems.parameter_server import Journal, Layout, Node, Service, Shard, Worker, replay
from thinwire.systems.parameter_server import checkpoint as checkpoints
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.errors import ServerLost, ShardLost, ShardRefused
from thinwire.systems.parameter_server.layout import slices
from thinwire.systems.parameter_server.node import Uplink
from thinwire.systems.parameter_server.outer import fingerprint
from thinwire.systems.parameter_server.presets import asp, bsp, fedbuff, inhad
from thinwire.systems.parameter_server.shard import WeightSlice

pytestmark = pytest.mark.dist


def assert_once(path, versions):
    """The journal has this many updates, one after another, and no gradient twice."""
    updates = Journal.read(path).updates
    assert [update.version for update in updates] == list(range(versions))
    keys = [(part.node, row.worker, row.step) for update in updates for part in update.parts for row in part.rows]
    assert len(keys) == len(set(keys))


def held(cluster):
    return [shard.slice.held for shard in cluster.shards]


def test_shards_change_no_bit_and_each_carries_its_part_of_the_bytes(monkeypatch, tmp_path):
    through, made = [], introductions(monkeypatch)
    send = Peer.send_tensor
    monkeypatch.setattr(Peer, "send_tensor", lambda self, x, s: through.append((self, x.nbytes)) or send(self, x, s))
    settings = bsp(start_nodes=2, deterministic=True)
    cluster = Cluster(settings, 2, shards=2, updates=15, outer=sgd(momentum=0.9), journal=tmp_path / "j")
    status = cluster.join()
    theta = synchronous(2, 1, 15, momentum=0.9)
    assert torch.equal(flat(cluster.model), theta)
    assert all(torch.equal(flat(network), theta) for network in cluster.models.values())
    layout = Layout.of(model())
    journal = Journal.read(tmp_path / "j")
    again = replay(journal, layout.flat(model()), gradient_of(model(), layout), sgd(momentum=0.9))
    assert torch.equal(again, theta)
    servers = [pair for first, pair in made if isinstance(first, msg.Hello)]
    assert len(servers) == 4  # both ends of two
    assert not [x for pair, x in through if any(pair is other for other in servers)]  # frames alone
    for shard, piece in zip(status.shards, slices(layout.numel, 2)):
        size = piece.stop - piece.start
        assert shard.up_bytes == 2 * 15 * (FRAME.size + 8 * size)  # sums are fp64 here
        weights = 15 + 1  # of versions 0 to 14, and the last ones
        assert shard.down_bytes == 2 * (FRAME.size + weights * (FRAME.size + 4 * size))  # once: the ticket is known
    frames = status.up_bytes + status.down_bytes - sum(row.up_bytes + row.down_bytes for row in status.shards)
    assert (frames - 32 * status.gradients) % FRAME.size == 0
    assert [row.there for row in status.shards] == [True, True]
    assert not any(held(cluster))


DROPPING = fedbuff(3, 0, start_nodes=2, sync_every=None)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(inhad(2, start_nodes=2, compress_up="topk", compress_down="int8", density=0.2), id="compressed"),
        pytest.param(asp(start_nodes=2), id="asp"),
        pytest.param(DROPPING, id="drop"),
    ],
)  # fmt: skip
def test_every_way_of_sending_trains_with_shards_and_nothing_stays_behind(settings):
    outer = sgd(lr=0.05) if settings is DROPPING else sgd(lr=0.2)
    cluster = Cluster(settings, 2, 2, shards=2, delays=[0.002, 0.008], outer=outer, updates=30)
    before = held_out(model())
    status = cluster.join()
    assert held_out(cluster.model) < 0.9 * before
    assert status.version == 30
    assert settings.max_staleness is None or status.max_staleness <= settings.max_staleness
    assert settings is not DROPPING or status.counters["stale"] > 0
    assert not any(held(cluster))


def test_a_node_that_breaks_between_a_header_and_its_pieces_leaves_no_half_of_a_sum(tmp_path, monkeypatch):
    sums, lines = [], []
    header, piece = threading.Event(), threading.Event()  # the fourth sum's header has gone, and a piece to one shard
    post, send_frame, send_tensor = Uplink.post, Peer.send_frame, Peer.send_tensor

    def posting(line, message):
        if isinstance(message, msg.Grad) and message.tensor is not None and message.member == breaks:
            sums.append(message)
            if len(sums) == 4:
                lines.append(line)
        post(line, message)

    def is_of_the_sum(frame, kind):
        message = msg.decode(frame[: FRAME.size])[0]
        return isinstance(message, kind) and sums[3].seq == (message.seq if kind is msg.Grad else message.number)

    def sending_frame(pair, frame, seconds=None):
        if lines and pair is lines[0].shards[1] and is_of_the_sum(frame, msg.Piece):
            assert header.wait(10.0)
            assert piece.wait(10.0)
            pair.close()
            raise PairError("broken by the test")
        send_frame(pair, frame)
        if lines and pair is lines[0].server and is_of_the_sum(frame, msg.Grad):
            header.set()

    def sending_tensor(pair, x, seconds):
        send_tensor(pair, x, seconds)
        if lines and pair is lines[0].shards[0]:
            piece.set()

    settings = inhad(2, start_nodes=2, deterministic=True, lease_seconds=15.0)
    cluster = Cluster(settings, 2, shards=2, delays=[0.01, 0.01], journal=tmp_path / "j")
    wait_until(lambda: cluster.service.machine.version)
    breaks = next(member.number for member in [*cluster.service.machine.members.values()] if member.node == 1)
    monkeypatch.setattr(Uplink, "post", posting)
    monkeypatch.setattr(Peer, "send_frame", sending_frame)
    monkeypatch.setattr(Peer, "send_tensor", sending_tensor)
    wait_until(lambda: cluster.service.machine.counters["joined"] == 3)  # it came again
    cluster.stop_after(20)
    assert cluster.join().counters["joined"] == 3
    updates = Journal.read(tmp_path / "j").updates
    keys = [(part.node, row.worker, row.step) for u in updates for part in u.parts for row in part.rows]
    assert len(keys) == len(set(keys))
    lost = sums[3].member, {row.step for row in sums[3].rows}
    assert not [p for u in updates for p in u.parts if p.member == lost[0] and {r.step for r in p.rows} & lost[1]]
    layout = Layout.of(model())
    again = replay(Journal.read(tmp_path / "j"), layout.flat(model()), gradient_of(model(), layout), sgd())
    assert torch.equal(again, flat(cluster.model))
    assert not any(held(cluster))


def pretended(service):
    """The connection of somebody who comes as shard 0 with this optimizer, and is taken in."""
    hello = msg.RegisterShard(0, free_port(), msg.PROTOCOL, True, fingerprint(sgd(), Layout.of(model()).dtype))
    pair = Caller(f"127.0.0.1:{service.port}", PeerIdentity("shard", 0)).connect(msg.encode(hello))
    assert isinstance(msg.decode(pair.receive_frame(FRAME.size, 60.0))[0], msg.ShardAccepted)
    return pair


def end(cluster):
    for node in cluster.nodes.values():
        node.failure = node.failure or ServerLost("ended by the test")
        node.close()
    for shard in cluster.shards:
        shard.close()


def test_a_lost_shard_ends_the_server_with_a_sentence_and_the_others_wait_for_the_next(tmp_path):
    folders = {"checkpoint_dir": tmp_path / "server", "shard_folder": tmp_path / "shards"}
    settings = inhad(2, start_nodes=2, lease_seconds=6.0)
    port = free_port()
    cluster = Cluster(settings, 2, shards=2, delays=[0.01, 0.02], updates=100_000, checkpoint_every=5, port=port,
                      journal=tmp_path / "j", shards_apart=[1], **folders)  # fmt: skip
    wait_until(lambda: (cluster.service.shards.saved_version or 0) >= 20 and cluster.service.machine.version >= 23)
    cluster.shard_processes[1].kill()
    cluster.serving.join(90)
    (failure,) = [x for x in cluster.failures if isinstance(x, ShardLost)]
    saved = cluster.service.shards.saved_version
    assert "shard 1 (port " in str(failure)
    assert f"they continue from version {saved}" in str(failure)
    assert saved >= 20
    assert checkpoints.load(tmp_path / "server").version == saved

    second = Service(model(), settings, host="127.0.0.1", outer=sgd(), updates=saved + 30, port=port, shards=2,
                     checkpoint_every=5, journal=tmp_path / "j", checkpoint_dir=tmp_path / "server")  # fmt: skip
    assert second.machine.version == saved
    serving = started(second.run)
    cluster.add_shard(1, outer=sgd(), checkpoint_dir=tmp_path / "shards")  # in place of the dead one
    serving.join(120)
    assert not serving.is_alive(), f"the second server does not end: {second.status()}, {cluster.failures}"
    assert second.machine.version == saved + 30
    assert_once(tmp_path / "j", saved + 30)
    newest = checkpoints.load(tmp_path / "server")
    parts = [checkpoints.load_slice(tmp_path / "shards", saved + 30, i, 2, newest.run).theta for i in range(2)]
    assert torch.equal(torch.cat(parts), flat(second.model))
    end(cluster)


def test_a_killed_server_goes_on_from_its_checkpoint_with_the_shards_that_waited(tmp_path):
    port = free_port()
    settings = inhad(2, start_nodes=1, lease_seconds=6.0)
    options = {"checkpoint_dir": tmp_path / "c", "checkpoint_every": 5, "port": port, "shards": 2}
    options["journal"] = tmp_path / "j"
    first = Cluster(settings, 1, delays=[0.01], updates=10_000, shard_folder=tmp_path / "c", apart=True, **options)
    wait_until(lambda: (checkpoints.load(tmp_path / "c") or checkpoints.Saved(None, {}, 0, 0, {})).version >= 10)
    first.kill()
    kept = checkpoints.load(tmp_path / "c").version
    with pytest.raises(ValueError, match="in 2 shards, not 3"):
        Service(model(), settings, outer=sgd(), **{**options, "shards": 3})
    second = Service(model(), settings, host="127.0.0.1", outer=sgd(), updates=kept + 20, **options)
    assert second.machine.version == kept
    second.run()
    assert torch.isfinite(flat(second.model)).all()
    assert_once(tmp_path / "j", kept + 20)
    end(first)


def test_who_may_be_a_shard_and_who_may_send_pieces(tmp_path):
    cluster = Cluster(bsp(start_nodes=1, lease_seconds=3.0), 1, shards=2, delays=[0.01],
                      checkpoint_dir=tmp_path / "c", shard_folder=tmp_path / "c")  # fmt: skip
    wait_until(lambda: cluster.service.machine.version >= 3)
    address = cluster.address
    for index, options, sentence in (
        (1, {"outer": sgd()}, "shard 1 already exists"),
        (2, {"outer": sgd()}, "no shard 2: .* it has 0 to 1"),
    ):
        kind = ValueError if index == 2 else ShardRefused
        with pytest.raises(kind, match=sentence):
            Shard(address, index, host="127.0.0.1", **options).run()
    # a leader that sends pieces before the server has admitted it, or somebody else's
    (host, port, _), _ = json.loads(Caller(address, PeerIdentity("node", 7)).note("shards"))["places"]
    stranger = connect(host or "127.0.0.1", port, msg.encode(msg.Ticket(5)), PeerIdentity("node", 7))
    stranger.receive_frame(FRAME.size, 60.0)
    (member,) = cluster.service.machine.members
    stranger.send_frame(msg.encode(msg.Piece(member, 1), tensor_bytes=8))
    stranger.send_tensor(torch.zeros(2), 5.0)
    with pytest.raises(PairError):
        stranger.receive_frame(FRAME.size, 60.0)
    cluster.stop_after(20)
    assert cluster.join().counters["joined"] == 1


def test_a_server_that_waits_takes_only_shards_that_fit(tmp_path):
    service = Service(model(), bsp(), host="127.0.0.1", outer=sgd(), shards=1, updates=3, checkpoint_dir=tmp_path)
    failures = []
    serving = started(service.run)
    address = f"127.0.0.1:{service.port}"
    for options, sentence in (
        ({"outer": sgd(lr=0.3), "checkpoint_dir": tmp_path}, "a different optimizer"),
        ({"outer": sgd()}, "its own directory"),
    ):
        with pytest.raises(ShardRefused, match=sentence):
            Shard(address, 0, host="127.0.0.1", **options).run()
    gone = pretended(service)
    gone.close()  # it dies before it has its weights
    early = Node(address, 0, 1)  # nodes wait as well
    working = started(Worker(model(), *part_of(0, 0), early.address, 0).run)
    wait_until(lambda: not service.shards.shards)
    assert [row.there for row in service.status().shards] == [False]
    Shard(address, 0, host="127.0.0.1", outer=sgd(), checkpoint_dir=tmp_path).run()
    serving.join(60)
    working.join(60)
    assert service.machine.version == 3
    early.close()
    whole = Service(model(), bsp(), host="127.0.0.1", outer=sgd())
    with pytest.raises(ValueError, match="holds its weights whole"):
        Shard(f"127.0.0.1:{whole.port}", 0).run()
    whole.close()
    assert not failures


def test_a_shard_that_comes_again_waits_until_the_server_knows_that_it_was_dead():
    """Its machine broke down: nobody has told the server, which takes it for one that is there until its lease ends."""
    service = Service(model(), bsp(lease_seconds=3.0), host="127.0.0.1", outer=sgd(), shards=1)
    serving = started(service.run)
    dead = pretended(service)
    again, ended = Shard(f"127.0.0.1:{service.port}", 0, host="127.0.0.1", outer=sgd()), []
    running = started(lambda: ended.append(again.run()))
    wait_until(lambda: service.shards.ready or not running.is_alive())
    service.stop()
    running.join(60)
    serving.join(60)
    assert ended == [0]
    dead.close()


def test_a_server_that_waits_for_its_shards_ends_when_it_is_stopped():
    service, failures = Service(model(), bsp(), host="127.0.0.1", outer=sgd(), shards=1), []

    serving = in_thread(failures, service.run)
    service.stop()
    serving.join(10)
    assert not serving.is_alive()
    assert isinstance(failures[0], ShardLost)
    assert "stopped while it waited for its shards" in str(failures[0])


def test_a_shard_with_a_slice_of_another_length_ends_the_server_with_what_it_did(tmp_path, monkeypatch):
    """Nothing more is asked of it: a last checkpoint would be waited for until it counts as silent."""
    of_a_shard = WeightSlice.on

    def short(own, message):
        shown = isinstance(message, msg.ShowWeights)
        return [msg.ShardUpdated(own.version, own.weights.snapshot[1:])] if shown else of_a_shard(own, message)

    monkeypatch.setattr(WeightSlice, "on", short)
    cluster = Cluster(bsp(start_nodes=1, lease_seconds=20.0), 1, shards=1, updates=3,
                      checkpoint_dir=tmp_path / "c", shard_folder=tmp_path / "c")  # fmt: skip
    cluster.serving.join(120)
    assert not cluster.serving.is_alive()
    assert [str(failure) for failure in cluster.failures if "instead of its slice" in str(failure)], cluster.failures
    end(cluster)


def test_a_server_that_is_long_about_something_lives_on_for_its_shards():
    """What its user does at an update, an evaluation say, may take longer than a lease."""
    there, busy, done = threading.Event(), threading.Event(), threading.Event()

    def on_status(status):
        if there.is_set():
            busy.set()
            done.wait(60.0)

    service = Service(model(), bsp(lease_seconds=3.0), host="127.0.0.1", outer=sgd(), shards=2, on_status=on_status)
    failures = []
    serving = in_thread(failures, service.run)
    shard = pretended(service)
    there.set()
    assert busy.wait(60.0)
    for _ in range(4):  # one or two may have been on their way
        assert isinstance(msg.decode(shard.receive_frame(FRAME.size, 3.0))[0], msg.Ping)
        shard.send_frame(msg.encode(msg.Ping()))
    done.set()
    service.stop()
    serving.join(60)
    assert [type(failure) for failure in failures] == [ShardLost]  # it was stopped
    shard.close()


def test_nobody_serves(monkeypatch):
    monkeypatch.setattr(actor_module, "time", impatient())
    with pytest.raises(ServerLost, match=r"no server at .* for 60 s.*--shards"):
        Shard(f"127.0.0.1:{free_port()}", 0).run()
    with pytest.raises(ValueError, match="at most the model's 44 elements"):
        Service(model(), bsp(), shards=45)
    with pytest.raises(ValueError, match="host:port"):
        Shard("somewhere", 0)


@pytest.mark.parametrize("found", [True, False], ids=["while it serves", "while it looks for its server"])
def test_a_shard_that_is_closed_from_elsewhere_ends(found):
    failures, ended = [], []
    service = Service(model(), bsp(), host="127.0.0.1", outer=sgd(), shards=2)
    serving = in_thread(failures, service.run)
    shard = Shard(f"127.0.0.1:{service.port if found else free_port()}", 0, host="127.0.0.1", outer=sgd())
    running = in_thread(failures, lambda: ended.append(shard.run()))
    wait_until(lambda: not found or (shard.slice is not None and shard.slice.version == 0))
    shard.close()
    running.join(30)
    assert not running.is_alive()
    assert ended == [0 if found else -1]
    service.stop()
    serving.join(60)
    assert [type(failure) for failure in failures] == [ShardLost]  # the server was stopped


def server_that_leaves(hosts, roles=("shard",), heirs=None):
    """A listener that a shard takes for its server, and that ends with the first connection; it notes from where.

    With ``heirs`` somebody else has its port from then on.
    """
    settings = bsp(lease_seconds=0.2).to_json()
    notes = {"settings": settings, "layout": Layout.of(model()).to_json(), "nodes": "1", "outer": "",
             "shards": json.dumps({"count": 1, "places": []})}  # fmt: skip
    listener = Listener(notes=notes, roles=roles)

    def came(pair, hello):
        hosts.append(pair.host)
        listener.close()
        if heirs is not None:
            heirs.append(Listener(listener.port, roles=()))
        pair.close()

    listener.serve(came, FRAME.size)
    return listener


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has to be given 127.0.0.2 first")
def test_a_server_sees_a_shard_at_the_address_that_it_listens_at():
    listener = server_that_leaves(hosts := [])
    with pytest.raises(ServerLost):
        Shard(f"127.0.0.1:{listener.port}", 0, outer=sgd(), host="127.0.0.2", leases=0.0).run()
    assert hosts == ["127.0.0.2"]


def test_a_shard_that_nodes_could_not_reach_says_so():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # nothing is sent
            here = one.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
    with Service(model(), bsp(), host="0.0.0.0", trust=INSECURE, outer=sgd(), shards=1) as service:
        with pytest.raises(ValueError, match=r"could not reach this shard at 127\.0\.0\.1: give it --host"):
            Shard(f"{here}:{service.port}", 0, outer=sgd()).run()
        assert not service.shards.shards


def test_a_shard_gives_up_a_server_that_does_not_come_back():
    listener = server_that_leaves([])
    with pytest.raises(ServerLost, match=r"no server at .* for 0 s"):
        Shard(f"127.0.0.1:{listener.port}", 0, outer=sgd(), host="127.0.0.1", leases=0.0).run()


def test_a_shard_and_a_worker_wait_while_somebody_else_has_the_port_of_who_was_lost():
    heirs = []
    listener = server_that_leaves([], heirs=heirs)
    with pytest.raises(ServerLost, match=r"no server at .* does not accept shards"):
        Shard(f"127.0.0.1:{listener.port}", 0, outer=sgd(), host="127.0.0.1", leases=0.0).run()
    listener = server_that_leaves([], ("worker",), heirs)
    with pytest.raises(ServerLost, match=r"can no longer reach its leader: .* does not accept workers"):
        Worker(model(), *part_of(0, 0), f"127.0.0.1:{listener.port}", 0).run()
    for heir in heirs:
        heir.close()
