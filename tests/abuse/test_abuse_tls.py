"""A port that speaks TLS: strangers of all kinds, who change nothing, and a node that then comes in."""

import contextlib
import os
import random
import socket
import ssl
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_cluster import Cluster, memory, wait_until
from split_ends import batch_of, edge_end, halves, in_process, linked, serving

from thinwire.core.duplex import Duplex, end_of
from thinwire.core.errors import PairError, PairTimeout
from thinwire.core.tls import Credentials
from thinwire.systems.link.listener import Listener
from thinwire.systems.parameter_server.presets import bsp


@pytest.fixture(scope="module")
def handshake(keys):
    """What a node says to a listener of the same authority: its two flights, the second with its certificate."""
    ends = [ssl.MemoryBIO() for _ in range(4)]
    caller = Credentials.of(keys / "ours" / "node0").contexts[0].wrap_bio(*ends[:2], server_hostname="localhost")
    listener = Credentials.of(keys / "ours" / "server").contexts[1].wrap_bio(ends[2], ends[3], server_side=True)
    said = []
    for _ in range(2):
        with contextlib.suppress(ssl.SSLWantReadError):
            caller.do_handshake()
        said.append(ends[1].read())
        ends[2].write(said[-1])
        with contextlib.suppress(ssl.SSLWantReadError):
            listener.do_handshake()
        ends[0].write(ends[3].read())
    return said


def spoiled(draw, parts):
    """Garbage, or a true handshake that is cut, changed, doubled, in another order, or of another connection."""
    if draw.random() < 0.3:
        return draw.choice((b"", b"\x16\x03\x01", b"thinwire")) + draw.randbytes(draw.randrange(300))
    words = bytearray(b"".join(draw.choice((parts, parts[::-1], parts[:1], parts[:1] * 3))))
    for _ in range(draw.randrange(4)):
        words[draw.randrange(len(words))] = draw.randrange(256)
    if draw.random() < 0.3:
        words = words[: draw.randrange(len(words))]
    return bytes(words) + draw.randbytes(draw.choice((0, 0, 1, 40, 70_000)))


def attack(ports, handshake, examples, each):
    """Every port gets so many of them."""
    before = memory()

    @settings(max_examples=examples, database=None)
    @given(st.integers(0, 2**32))
    def go(seed):
        draw = random.Random(seed)
        for _ in range(each):
            with (
                socket.create_connection(("127.0.0.1", draw.choice(ports))) as stranger,
                contextlib.suppress(OSError),  # it was sent away in the middle
            ):
                stranger.sendall(spoiled(draw, handshake))
                if draw.random() < 0.3:  # an end without a good-bye
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    go()
    assert memory() - before < 200e6


def test_garbage_and_spoiled_handshakes(keys, handshake):
    """A training with a shard, whose server, shard and leader are all attacked while a node works and after."""
    cluster = Cluster(bsp(start_nodes=1), 1, delays=[0.005], shards=1, keys=keys / "ours")
    wait_until(lambda: cluster.service.shards.ready)
    (shard,) = cluster.service.shards.shards.values()
    ports = [cluster.service.port, shard.port, cluster.nodes[0].port]
    attack(ports, handshake, 60, 5)
    cluster.stop_after(5)
    status = cluster.join()
    assert (status.counters["joined"], status.counters.get("refused")) == (1, None)
    assert len(os.listdir("/proc/self/fd")) < 500


def test_a_split_cloud_among_them(keys, handshake):
    front, back = halves()
    trust = {name: Credentials.of(keys / "ours" / name) for name in ("server", "other")}
    with (
        serving(back, credentials=trust["server"]) as server,
        linked(server, edge_end(front), trust["other"]) as (link, edge),
    ):
        losses = []
        for step in range(6):
            attack([server.port], handshake, 3, 5)
            losses.append(float(edge.step(batch_of(step))))
        edge.bye()
    assert losses == in_process()[0]
    assert link.reconnects == 0


def handshaken(port, credentials):
    """A connection whose handshake was in time, which on a busy machine not every one is."""
    while True:
        duplex = Duplex(socket.create_connection(("127.0.0.1", port)))
        try:
            duplex.secure(credentials, end_of(60), "127.0.0.1")
        except PairError:
            duplex.close()
        else:
            return duplex


def trickle(duplex, word):
    """Say this again and again, and read, until the other side has had enough."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        duplex.write(word, end_of(5))
        with contextlib.suppress(PairTimeout):
            duplex.read(1, end_of(0.1))


@pytest.mark.parametrize("word", [b"", b"t"])
def test_after_the_handshake_a_hello_has_its_time_limit_too(keys, word):
    listener = Listener(roles=("node",), trust=Credentials.of(keys / "ours" / "server"), seconds=0.5)
    slow = handshaken(listener.port, Credentials.of(keys / "ours" / "node0"))
    with pytest.raises(PairError, match=r"closed|gone"):
        trickle(slow, word)
    slow.close()
    listener.close()
