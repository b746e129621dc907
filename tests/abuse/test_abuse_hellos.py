"""Nobody comes in, and nobody else is kept out, whatever is said in place of a hello: by each kind of listener."""

import contextlib
import os
import random
import secrets
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.collectives.meeting import Meeting, endpoint_of, listen
from thinwire.core.duplex import Duplex
from thinwire.core.errors import PairError
from thinwire.systems.link.hello import ROLES, PeerIdentity, hear, introduce
from thinwire.systems.link.listener import Caller, Listener

SECRET = b"0123456789abcdef"
KNOCK, PROOF = 68, 32
NODE = PeerIdentity("node", 3, SECRET)


def both_ends():
    """Of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        far.settimeout(20.0)
        return server.accept()[0], far


@pytest.fixture(scope="module")
def good():
    """What a node that knows the secret says: its first words, and its proof for one answer."""
    near, far = both_ends()
    caller = threading.Thread(target=lambda: _quietly(lambda: introduce(Duplex(near), NODE, 1, b"t" * 16, _later())))
    caller.start()
    first = far.recv(KNOCK, socket.MSG_WAITALL)
    far.sendall(b"thinwire\x01\x00\x01" + bytes(32))
    proof = far.recv(PROOF, socket.MSG_WAITALL)
    far.close()
    caller.join()
    return first, proof


def _later():
    return time.monotonic() + 60.0


def _quietly(call):
    try:
        return call()
    except PairError:
        return None


def spoiled(draw, parts):
    """Garbage, or true words that are cut, changed, doubled or in another order."""
    if draw.random() < 0.3:
        return draw.randbytes(draw.randrange(300))
    words = bytearray(b"".join(draw.choice((parts, parts[::-1], parts[:1], parts * 2))))
    for _ in range(draw.randrange(4)):
        words[draw.randrange(len(words))] = draw.randrange(256)
    if draw.random() < 0.3:
        words = words[: draw.randrange(len(words))]
    return bytes(words) + draw.randbytes(draw.choice((0, 0, 1, 40)))


def one(said):
    near, far = both_ends()
    far.sendall(said)
    far.shutdown(socket.SHUT_WR)
    listening = Duplex(near)
    with pytest.raises(PairError):
        hear(listening, ROLES, SECRET, _later())
    listening.close()
    far.close()


@settings(max_examples=100, database=None)
@given(st.integers(0, 2**32))
def test_no_other_words_let_anybody_in(good, seed):
    draw = random.Random(seed)
    for _ in range(25):
        one(spoiled(draw, good))


def test_a_listener_hears_them_all_and_then_a_node(good):
    came = []
    listener = Listener(roles=("node",), trust=SECRET, notes={"a": "b"})
    listener.serve(lambda pair, first: came.append(pair), 4)

    @settings(max_examples=100, database=None)
    @given(st.integers(0, 2**32))
    def go(seed):
        draw = random.Random(seed)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
                stranger.sendall(spoiled(draw, good))
                if draw.random() < 0.3:  # an end without a good-bye
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    go()
    assert not came
    assert Caller(f"127.0.0.1:{listener.port}", NODE, 30.0).note("a") == "b"
    listener.close()
    assert len(os.listdir("/proc/self/fd")) < 500


def test_ranks_meet_among_them(good):
    """The same at a mesh's port, whose hello is the job's one-time word."""
    words = [secrets.token_bytes(16) for _ in range(2)]
    servers = [listen(128) for _ in words]
    endpoints = [endpoint_of(server, word) for server, word in zip(servers, words)]
    draw, found = random.Random(0), [None, None]
    strangers = [socket.create_connection(servers[0].getsockname()) for _ in range(100)]
    for stranger in strangers:
        stranger.sendall(spoiled(draw, (words[1], words[0][:15] + b"\0", b"\1\0\0")))

    def come(rank):
        with contextlib.closing(Meeting(servers[rank], words[rank], endpoints, rank)) as meeting:
            found[rank] = {}
            assert meeting.connect(found[rank])

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert [sorted(one) for one in found] == [[(1, 0), (1, 1)], [(0, 0), (0, 1)]]
    for connection in (*strangers, *found[0].values(), *found[1].values()):
        connection.close()
