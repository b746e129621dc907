"""Connections of nobody in particular: silent, slow, long, or with words that no terminal should see."""

import contextlib
import socket
import time

import pytest
import torch
from split_ends import assert_same, batch_of, edge_end, halves, in_process, linked, serving, visit

from thinwire.systems.split.connection import MOST
from thinwire.systems.split.frames import Message, encode


@contextlib.contextmanager
def strangers(server, count, says=b""):
    """So many connections that say this, and then nothing, but do not go."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(count)]
        for one in made:
            one.sendall(says)
            one.settimeout(60)
        yield made


HELLO = b"".join(encode(Message("hello", fields={"edge": "x" * 4000})))
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303")  # the first bytes of a TLS handshake


@pytest.mark.parametrize("tls,says", [(False, HELLO[:-1]), (True, CLIENT_HELLO)], ids=["half a hello", "of TLS"])
def test_silent_strangers_do_not_keep_the_edge_out(of, tls, says):
    front, back = halves()
    with (
        serving(back, credentials=of("server") if tls else None) as server,
        strangers(server, 20, says),
        linked(server, edge_end(front), of("edge") if tls else None) as (link, edge),
    ):
        losses = [float(edge.step(batch_of(0)))]
        with strangers(server, 20, says):
            losses += [float(edge.step(batch_of(step))) for step in range(1, 6)]
        edge.bye()
    assert_same(losses, front, back, in_process())
    assert link.reconnects == 0


def test_of_too_many_strangers_the_longest_there_makes_room():
    front, back = halves()
    with (
        serving(back, hello_seconds=600.0) as server,
        strangers(server, MOST) as first,
        strangers(server, 6),
        linked(server, edge_end(front)) as (_, edge),
    ):
        assert [one.recv(1) for one in first[:6]] == [b""] * 6
        end = time.monotonic() + 30.0  # each is said by a thread of its own, after its connection has closed
        while sum(f"{MOST} others connected" in words for words in server.said) < 6:
            assert time.monotonic() < end, server.said
            time.sleep(0.01)
        edge.bye()


def test_an_edge_that_has_just_been_taken_in_makes_no_room_for_strangers():
    """They come while the cloud still says that the edge begins, before the thread that heard its hello has ended."""
    front, back = halves()
    with serving(back, hello_seconds=600.0) as server, contextlib.ExitStack() as stack:
        say = server.say

        def saying(words):
            if "begins" in words:
                first = stack.enter_context(strangers(server, MOST + 1))
                assert first[0].recv(1) == b""  # all have come: the last one took its place
            say(words)

        server.say = saying
        assert visit(server, front, steps=1)[1].reconnects == 0


def test_handshake_and_hello_have_one_deadline(of):
    for credentials in (None, of("server")):
        front, back = halves()
        with serving(back, credentials=credentials, hello_seconds=1.0) as server:
            with strangers(server, 1, CLIENT_HELLO if credentials else HELLO[:40]) as (slow,):
                with contextlib.suppress(ConnectionError):
                    for _ in range(200):
                        slow.sendall(b"\x00")
                        time.sleep(0.1)
                assert not any(words.startswith("edge") for words in server.said)
                assert any("did not finish within 1 s" in words for words in server.said)
            visit(server, front, of("edge") if credentials else None)


def test_before_hello_nothing_long_is_taken():
    front, back = halves()
    with serving(back) as server:
        whole = b"".join(encode(Message("z", parts=(("z", torch.zeros(1 << 15)),))))
        with strangers(server, 1, whole[:100]) as (long,):
            assert long.recv(1) == b""
        assert any("over the limit of 65536 per message" in words for words in server.said)
        visit(server, front)


def test_an_edge_that_waits_within_a_message_is_not_kept_by_strangers():
    """Only what the edge says counts: a stranger's connections do not keep its place."""
    front, back = halves()
    edge = edge_end(front)
    with serving(back, edges=1, message_seconds=0.5, hold_seconds=0.0) as server:
        with strangers(server, 1, b"".join(encode(Message("hello", fields=edge.hello())))) as (half,):
            assert half.recv(1000)
            half.sendall(b"TWF1")
            for _ in range(200):
                if any("fell silent within a message" in words for words in server.said):
                    break
                with strangers(server, 1):
                    time.sleep(0.1)
            else:
                pytest.fail("the cloud still waits for the rest of the message")
        visit(server, halves()[0], name="other")


def test_an_edge_that_stays_and_says_nothing_makes_room_for_one_that_waits():
    front, back = halves()
    with serving(back, message_seconds=0.5) as server, linked(server, edge_end(front)):
        visit(server, halves()[0], name="other")
    assert "edge 'other' begins, step 0" in server.said


def test_a_strangers_words_are_printable():
    front, back = halves()
    edge = edge_end(front)
    spoiled = [edge.hello() | {what: "\ud800\x1b[31m\n" + "x" * 9000} for what in ("plan", "pair", "edge")]
    with serving(back, hold_seconds=0.0) as server:
        for words in spoiled:
            with strangers(server, 1, b"".join(encode(Message("hello", fields=words)))) as (one,):
                assert one.recv(1000)
        with linked(server, edge):
            edge.bye()
    assert len(server.said) >= 5
    for sentence in server.said:
        assert sentence.isprintable()
        assert len(sentence) <= 500
