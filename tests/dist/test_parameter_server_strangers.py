"""A training whose processes share a secret, and those who come without it, with another, or as somebody else."""

import socket

import pytest
import torch
from parameter_cluster import Cluster, flat, memory, model, sgd, synchronous, wait_until

from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.secret_file import VARIABLE
from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity, find_trust, read_secret
from thinwire.systems.link.listener import Caller
from thinwire.systems.parameter_server import (
    Layout,
    Node,
    Service,
    serve,
    serve_shard,
)
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.presets import bsp

pytestmark = pytest.mark.dist


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """One secret for all that this process starts."""
    path = tmp_path / "secret"
    path.write_text("a secret of this training\n")
    monkeypatch.setenv(VARIABLE, str(path))
    return read_secret(path)


def talk(address, identity, hello):
    """Come in, say the first word, and read an answer; whether there was one."""
    pair = Caller(address, identity).connect(msg.encode(hello))
    try:
        pair.receive_frame(FRAME.size, 60.0)
    except PairError:
        return False
    else:
        return True
    finally:
        pair.close()


def ends(pair):
    """Read on until the other side closes."""
    try:
        while True:
            pair.receive_frame(FRAME.size, 60.0)
    except PairError as error:
        return "closed" in str(error) or "reset" in str(error)
    finally:
        pair.close()


def test_strangers_change_nothing(secret, caplog):
    settings, layout = bsp(start_nodes=1, deterministic=True), Layout.of(model()).number
    cluster = Cluster(settings, 1, delays=[0.01], shards=2)
    before = memory()
    for identity in (PeerIdentity("node", 9), PeerIdentity("node", 9, b"another secret, 24 bytes")):
        with pytest.raises(NotAdmitted, match="secret"):
            Caller(cluster.address, identity)
    said = ("it was asked for the secret and did not show it", "it does not know the secret")
    # each hello has its thread: either may be told of first, after the stranger has gone, and one line is told for both
    wait_until(lambda: any(f"turned away 127.0.0.1: {why}" in caplog.messages for why in said))
    # who knows the secret, and speaks as another node or in another role than it came in
    for identity, hello in (
        (PeerIdentity("node", 9, secret), msg.Hello(0, 1, layout, instance=5)),
        (PeerIdentity("shard", 0, secret), msg.Hello(0, 1, layout, instance=5)),
        (PeerIdentity("node", 0, secret), msg.RegisterShard(0, 1, msg.PROTOCOL, False, 0)),
        (PeerIdentity("shard", 1, secret), msg.RegisterShard(0, 1, msg.PROTOCOL, False, 0)),
        (PeerIdentity("node", 9, secret), msg.Hello(9, 2**62, layout)),
        (PeerIdentity("node", 9, secret), msg.Ping()),
    ):
        assert not talk(cluster.address, identity, hello)
    ports = [cluster.service.port, *(place.port for place in cluster.service.shards.shards.values())]
    for port in ports:
        for junk in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200, b"\xff" * 100_000, b"thinwire", b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(junk)
    assert memory() - before < 100e6
    cluster.stop_after(20)
    status = cluster.join()
    assert status.counters["joined"] == 1
    assert "refused" not in status.counters
    assert torch.equal(flat(cluster.model), synchronous(1, 1, status.version))


def test_a_member_that_announces_what_this_model_cannot_have_goes_alone(secret):
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.01])
    layout, before = Layout.of(model()).number, memory()
    for tensor, rows in ((10**12, 0), (10**12, 1), (0, 10**6), (44 * 4 + 1, 1), (0, 1)):
        pair = Caller(cluster.address, PeerIdentity("node", 9, secret)).connect(
            msg.encode(msg.Hello(9, 1, layout, instance=tensor))
        )
        welcome = msg.decode(pair.receive_frame(FRAME.size, 60.0))[0]
        assert isinstance(welcome, msg.Welcome)
        pair.send_frame(msg.encode(msg.Grad(welcome.member, 0, 1, 1, 0, 0), rows, tensor) + bytes(32 * min(rows, 1)))
        assert ends(pair)
    assert memory() - before < 100e6
    cluster.stop_after(20)
    cluster.join()
    assert all(row.isfinite() for row in flat(cluster.model))


def test_a_worker_says_nothing_but_a_workers_words(secret):
    service = Service(model(), bsp(), outer=sgd(), updates=5)
    node = Node(f"127.0.0.1:{service.port}", 0, 1)
    assert not talk(node.address, PeerIdentity("worker", 1, secret), msg.Hello(0, 1, Layout.of(model()).number))
    node.close()
    service.close()


def test_no_other_address_without_a_secret(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for start in (
        lambda: serve(model(), host="0.0.0.0", port=0, updates=1),
        lambda: serve_shard("127.0.0.1:1", index=0, host="0.0.0.0"),
        lambda: Service(model(), bsp(), host="0.0.0.0"),
    ):
        with pytest.raises(ValueError, match=r"--secret-file FILE.*--insecure"):
            start()
    with pytest.raises(ValueError, match="must come from find_trust"):  # else it would let everybody in
        Service(model(), bsp(), trust="0123456789abcdef")
    Service(model(), bsp(), host="0.0.0.0", trust=find_trust(insecure=True)).close()
    Service(model(), bsp(), host="0.0.0.0", trust=find_trust("0123456789abcdef")).close()


def test_by_default_only_this_machine_reaches_a_server():
    service = Service(model(), bsp())
    with open("/proc/net/tcp") as file:
        at = [line.split()[1] for line in file if f":{service.port:04X} " in line and " 0A " in line]
    assert at == [f"0100007F:{service.port:04X}"]
    service.close()
