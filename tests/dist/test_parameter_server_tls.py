"""A training whose processes show certificates: the same numbers, and who else comes is told why not."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from parameter_cluster import Cluster, flat, model, part_of, sgd, started, synchronous, wait_until

import thinwire as tw
from spawned import free_port
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.tls import Credentials
from thinwire.systems.link.hello import VARIABLE, PeerIdentity, find_trust
from thinwire.systems.link.listener import Caller, connect
from thinwire.systems.parameter_server import Node, NodeRefused, Service, Shard, ShardRefused, Worker, run, serve
from thinwire.systems.parameter_server.messages import Ticket, encode
from thinwire.systems.parameter_server.presets import bsp
from thinwire.tools.bench.models.registry import build_model

pytestmark = pytest.mark.dist
SECRET = "a secret of this training"


def test_the_numbers_are_those_of_synchronous_sgd(keys):
    secured = Cluster(bsp(start_nodes=2, deterministic=True), 2, 2, updates=12, shards=2, keys=keys / "ours")
    assert secured.join().version == 12
    assert torch.equal(flat(secured.model), synchronous(2, 2, 12))


def test_a_node_that_comes_back_is_let_in_and_another_with_its_number_is_not(keys, caplog):
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.02], keys=keys / "ours")
    with pytest.raises(NodeRefused, match="node 0 belongs to a name other than this certificate's"):
        Node(cluster.address, 0, 1, trust=find_trust(keys=keys / "ours" / "node1"))
    told = "turned away 127.0.0.1: it uses a number that belongs to another name"
    wait_until(lambda: cluster.version >= 3 and told in caplog.messages)
    cluster.nodes[0].close()  # its worker looks for it, and goes on doing so
    cluster.add(0)
    wait_until(lambda: cluster.service.machine.counters["joined"] >= 2)
    cluster.stop_after(20)
    cluster.serving.join(60)
    assert cluster.status.counters["joined"] == 2
    cluster.nodes[0].close()


@pytest.mark.parametrize(
    ("server", "other", "sentence", "wrong"),
    [
        ({"keys": "ours/server"}, {"keys": "theirs/node0"}, "asks for a certificate: give --keys", "another authority"),
        (
            {"secret": SECRET},
            {"secret": "another secret, 24 bytes"},
            "asks for a secret: give --secret-file",
            "give both",
        ),
    ],
    ids=["keys", "secret"],
)
def test_each_of_them_is_told_why_not(keys, server, other, sentence, wrong):
    def placed(options):
        return find_trust(**{name: keys / value if name == "keys" else value for name, value in options.items()})

    with Service(model(), bsp(), outer=sgd(), updates=5, shards=1, trust=placed(server)) as service:
        address = f"127.0.0.1:{service.port}"
        for trust, why in ((None, sentence), (placed(other), wrong)):
            with pytest.raises(NodeRefused, match=why):
                Node(address, 0, 1, trust=trust)
            with pytest.raises(ShardRefused, match=why):
                Shard(address, 0, trust=trust).run()
        mine = placed({name: value.replace("server", "node0") for name, value in server.items()})
        with Node(address, 0, 1, trust=mine) as node, pytest.raises(NodeRefused, match=f"worker 0: .* {sentence[:15]}"):
            Worker(model(), *part_of(0, 0), node.address, 0).run()


def test_a_leader_knows_a_shard_by_its_certificate(keys):
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.01], shards=1, keys=keys / "ours")
    wait_until(lambda: cluster.service.shards.ready)
    shards = cluster.service.shards.shards
    (_, _, fingerprint), *_ = json.loads(cluster.service.shards.addresses())["places"]
    assert fingerprint == Credentials.of(keys / "ours" / "shard0").own().fingerprint
    node1 = Credentials.of(keys / "ours" / "node1")
    hello = encode(Ticket(7))
    connect("127.0.0.1", shards[0].port, hello, PeerIdentity("node", 1, node1.pinned(fingerprint))).close()
    with pytest.raises(NotAdmitted, match="not the pinned one"):
        connect("127.0.0.1", shards[0].port, hello, PeerIdentity("node", 1, node1.pinned("0" * 64)))
    with pytest.raises(NotAdmitted, match="does not accept shards"):
        connect("127.0.0.1", shards[0].port, hello, PeerIdentity("shard", 1, node1.pinned(fingerprint)))
    cluster.stop_after(20)
    assert cluster.join().counters["joined"] == 1


def test_keys_go_before_the_secret_of_the_environment_and_not_beside_another(keys, monkeypatch, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "secret"))
    with Service(model(), bsp(), host="0.0.0.0", trust=find_trust(keys=str(keys / "ours" / "server"))) as service:
        assert Caller(f"127.0.0.1:{service.port}", PeerIdentity("node", 0, Credentials.of(keys / "ours" / "node0")))
        with pytest.raises(PairError, match="asks for a certificate"):
            Caller(f"127.0.0.1:{service.port}", PeerIdentity("node", 0))
    with pytest.raises(ValueError, match="not both"):
        serve(model(), updates=1, secret=SECRET, keys=keys / "ours" / "server")
    with pytest.raises(ValueError, match=r"identity.crt cannot be read"):
        serve(model(), updates=1, keys=keys)


def test_serve_and_run_take_keys(keys):
    port, served, trained = free_port(), model(), model()
    options = {"settings": bsp(), "port": port, "outer": sgd(), "updates": 5, "keys": keys / "ours" / "server"}
    serving = started(lambda: serve(served, **options))
    run(trained, *part_of(0, 0), server=f"127.0.0.1:{port}", node_id=0, keys=keys / "ours" / "node0")
    serving.join(60)
    assert torch.equal(flat(trained), flat(served))


THINWIRE = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "ps"]


@pytest.mark.slow
def test_by_the_command_line_each_in_its_own_process(keys):
    """What the page shows, on this machine: a server at all addresses, a shard, a node with two workers."""
    ours, port = keys / "ours", str(free_port())
    verbs = [
        ["server", "--model", "mlp:width=16", "--settings", "bsp", "--updates", "4", "--host", "0.0.0.0",
         "--port", port, "--shards", "1", "--keys", str(ours / "server"), "--json"],
        ["shard", f"127.0.0.1:{port}", "--index", "0", "--keys", str(ours / "shard0"), "--json"],
        ["node", "--server", f"localhost:{port}", "--model", "mlp:width=16", "--workers", "2", "--node", "0",
         "--keys", str(ours / "node0"), "--json"],
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(VARIABLE, None)
    with contextlib.ExitStack() as stack:
        processes = []
        for words in verbs:
            process = subprocess.Popen(
                [*THINWIRE, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        ended = [process.communicate(timeout=200) for process in reversed(processes)]
    found = [json.loads(out or "{}") for out, _ in ended]
    assert ended[0][1].startswith(f"node 0, for the server at localhost:{port}; waits up to a minute for it\n")
    assert ended[1][1].startswith(f"shard 0, for the server at 127.0.0.1:{port}; waits up to a minute for it\n")
    assert [found[0]["end"], found[1]["version"], found[2]["version"]] == ["training has ended", 4, 4]


def test_local_steps_by_the_command_line_and_from_a_loop_of_ones_own(keys):
    """What the page shows: a server with a quorum; here one member is a command, and one a loop."""
    ours, port = keys / "ours", free_port()
    words = ["server", "--model", "digits", "--settings", "local:quorum=2:sync_every=4:codec=int2", "--updates", "40",
             "--nodes", "2", "--port", str(port), "--keys", str(ours / "server"), "--json"]  # fmt: skip
    node = ["node", "--server", f"localhost:{port}", "--model", "digits", "--node", "0", "--keys", str(ours / "node0")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(VARIABLE, None)
    with contextlib.ExitStack() as stack:
        processes = []
        for each in (words, [*node, "--json"]):
            started = subprocess.Popen([*THINWIRE, *each], env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(started.wait)
            stack.callback(started.kill)
            processes.append(started)
        workload = build_model("digits", 0)
        before = workload.held_out_loss()
        optimizer = workload.optimizer(workload.model)
        options = {"server": f"localhost:{port}", "keys": ours / "node1", "node": 1}
        with tw.attach(workload.model, optimizer, "local", **options) as sync:
            for step in sync.steps():
                workload.loss(workload.model, step, 1).backward()
                optimizer.step()
                optimizer.zero_grad()
        served, joined = [json.loads(one.communicate(timeout=200)[0]) for one in processes]
    assert [served["version"], served["gradients"] >= 70, joined["submissions"]] == [40, True, 40]
    assert (served["counters"]["joined"], served["loss"], sync.rounds) == (2, None, 40)
    assert workload.held_out_loss() < 0.5 * before
