"""Connections of nobody in particular: silent, slow, long, or with words that no terminal should see.

What a listener does with them by itself is in ``tests/unit/link/test_hello.py``.
"""

import contextlib
import json
import socket

import pytest
import torch
from split_ends import assert_same, batch_of, edge_end, guest, halves, in_process, linked, serving, until_closed, visit

from thinwire.core.errors import PairError
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import connect
from thinwire.systems.split.frames import CODEC, Message, pack


@contextlib.contextmanager
def strangers(server, count, says=b""):
    """So many connections that say this, and then nothing, but do not go."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(count)]
        for one in made:
            one.sendall(says)
            one.settimeout(60)
        yield made


HALF_A_HELLO = b"thinwire\x01\0\x01\x03"
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303")  # the first bytes of a TLS handshake


@pytest.mark.parametrize("tls,says", [(False, HALF_A_HELLO), (True, CLIENT_HELLO)], ids=["half a hello", "of TLS"])
def test_silent_strangers_do_not_keep_the_edge_out(of, tls, says):
    front, back = halves()
    with (
        serving(back, credentials=of("server") if tls else None) as server,
        strangers(server, 200, says),  # of whom the first make room
        linked(server, edge_end(front), of("edge") if tls else None) as (link, edge),
    ):
        losses = [float(edge.step(batch_of(0)))]
        with strangers(server, 20, says):
            losses += [float(edge.step(batch_of(step))) for step in range(1, 6)]
        edge.bye()
    assert_same(losses, front, back, in_process())
    assert link.reconnects == 0


def test_before_hello_nothing_long_is_taken():
    front, back = halves()
    with serving(back, hello_seconds=1.0) as server:
        for hello in (json.dumps({"edge": "x" * 70_000}).encode(), b"[" * 60_000, b"[1]", b"{]"):
            with contextlib.suppress(PairError):
                until_closed(connect("127.0.0.1", server.port, hello, PeerIdentity("edge", 0)))
        visit(server, front)
    assert not any("refused" in words for words in server.said)


def test_an_edge_that_waits_within_a_message_is_not_kept_by_strangers():
    """Only what the edge says counts: a stranger's connections do not keep its place."""
    front, back = halves()
    with serving(back, message_seconds=0.5) as server:
        half = guest(server, edge_end(front))
        half.send_frame(CODEC.encode(pack(Message("z", parts=(("z", torch.zeros(9)),))), None, 36)[:40])
        with strangers(server, 20):
            visit(server, halves()[0], name="other")
        until_closed(half)
    assert "edge 'other' begins, step 0" in server.said


def test_an_edge_that_stays_and_says_nothing_makes_room_for_one_that_waits():
    front, back = halves()
    with serving(back, message_seconds=0.5) as server, linked(server, edge_end(front)):
        visit(server, halves()[0], name="other")
    assert "edge 'other' begins, step 0" in server.said


def test_an_edge_that_reads_nothing_holds_up_nobody():
    """It asks for more than the kernel holds, and takes none of it."""
    front, back = halves()
    with serving(back, message_seconds=0.5, hold_seconds=0.0) as server:
        server.cloud.handle = lambda request: Message("z", parts=(("z", torch.zeros(1 << 22)),))
        for sequence in range(2, 5):
            peer = guest(server, edge_end(front))
            for _ in range(sequence):
                peer.send(pack(Message("z", 0, 1, parts=(("z", torch.zeros(1)),))), CODEC, 10.0)
            with contextlib.suppress(PairError):
                peer.receive_frame(1, 0.1)
        del server.cloud.handle
        visit(server, halves()[0], name="other")
    assert any("without taking the reply" in words for words in server.said)


def test_a_strangers_words_are_printable():
    front, back = halves()
    edge = edge_end(front)
    spoiled = [edge.hello() | {what: "\ud800\x1b[31m\n" + "x" * 9000} for what in ("plan", "pair", "edge")]
    with serving(back, hold_seconds=0.0) as server:
        for words in spoiled:
            peer = connect("127.0.0.1", server.port, json.dumps(words).encode(), PeerIdentity("edge", 0))
            assert peer.receive(CODEC, 60.0, 1 << 16)
            peer.close()
        with linked(server, edge):
            edge.bye()
    assert len(server.said) >= 5
    for sentence in server.said:
        assert sentence.isprintable()
        assert len(sentence) <= 500
