"""Several sockets between two ranks: every message whole and in its place, whatever socket its frames took or lost."""

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
import torch

from thinwire.core.collectives import bundle as bundle_module
from thinwire.core.collectives.bundle import FRAME_BYTES, Bundle
from thinwire.core.collectives.meeting import accepting, calling
from thinwire.core.collectives.socket_stream import CountdownWork, socket_loop

HEADER = struct.Struct("<BHIQI")


def _sockets(count):
    pairs = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(count):
            left = socket.create_connection(server.getsockname())
            pairs.append((left, server.accept()[0]))
    return pairs


def _bundles(count=4, timeout=20.0, active=4):
    lefts, rights = zip(*_sockets(count))
    left = Bundle(lefts, "rank 1", timeout, socket_loop(), call=calling(), active=active)
    return left, Bundle(rights, "rank 0", timeout, socket_loop(), accept=accepting((0,)), active=active)


@pytest.fixture
def pair():
    made = _bundles()
    yield made
    for bundle in made:
        bundle.fail(RuntimeError("over"))


def _given(sizes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in sizes]


SIZES = (1, 3_000_000, 0, 7, FRAME_BYTES, FRAME_BYTES + 1, 2 * FRAME_BYTES, 999_999, 2)


@pytest.mark.parametrize("early", ["send", "receive", "both"])
@pytest.mark.parametrize("streams", [1, 3])
def test_messages_arrive_in_their_places_both_ways(pair, early, streams):
    ends = [[bundle.stream() for _ in range(streams)] for bundle in pair]
    given = [[_given(SIZES, 10 * side + n) for n in range(streams)] for side in range(2)]
    taken = [[[torch.zeros_like(x) for x in some] for some in one] for one in given]
    work = CountdownWork(4 * streams * len(SIZES))

    def send(side):
        for place in range(len(SIZES)):
            for stream, some in zip(ends[side], given[side]):
                stream.send(some[place], work)

    def receive(side):
        for stream, some in zip(ends[side], taken[1 - side]):
            for x in some:
                stream.receive(x, work)

    first, second = (send, receive) if early == "send" else (receive, send)
    if early == "both":
        threads = [threading.Thread(target=do, args=(side,)) for side in range(2) for do in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for do in (first, second):
            for side in range(2):
                do(side)
            time.sleep(0.1)
    work.wait()
    for side in range(2):
        for some, wanted in zip(taken[side], given[side]):
            assert all(map(torch.equal, some, wanted))


def test_memory_is_free_when_the_send_has_ended(pair):
    (a, b), x = (bundle.stream() for bundle in pair), torch.full((5_000_000,), 1, dtype=torch.uint8)
    out, sent, came = torch.zeros_like(x), CountdownWork(1), CountdownWork(1)
    b.receive(out, came)
    a.send(x, sent)
    sent.wait()
    x.zero_()
    came.wait()
    assert bool((out == 1).all())


@pytest.mark.parametrize("seed", range(50))
def test_a_socket_that_is_cut_costs_no_byte(seed):
    """At a random moment, on either side, while messages go both ways; what was lost is sent again by the others."""
    draw, (left, right) = random.Random(seed), _bundles(4)
    given = [_given([2_000_000, 70_000, 1_500_000], 100 * seed + side) for side in range(2)]
    taken = [[torch.zeros_like(x) for x in some] for some in given]
    work = CountdownWork(12)
    streams = [left.stream(), right.stream()]
    cut = [draw.choice((left, right)).ends[n].socket for n in draw.sample(range(4), 1)]

    def cutter():
        for one in cut:
            time.sleep(draw.uniform(0, 0.004))
            one.shutdown(draw.choice((socket.SHUT_RDWR, socket.SHUT_WR, socket.SHUT_RD)))

    thread = threading.Thread(target=cutter)
    thread.start()
    for side, stream in enumerate(streams):
        for x, out in zip(given[side], taken[1 - side]):
            stream.send(x, work)
            stream.receive(out, work)
    thread.join()
    over = threading.Event()
    work.then(over.set)
    assert over.wait(20), "it hangs"
    work.wait()
    assert all(map(torch.equal, taken[0], given[0]))
    assert all(map(torch.equal, taken[1], given[1]))
    for bundle in (left, right):
        bundle.fail(RuntimeError("over"))


def test_users_are_told_in_the_order_of_the_messages(pair):
    """Although a short one is whole before a long one: the next messages are posted by whoever is told."""
    order, (a, b) = [], [bundle.stream() for bundle in pair]
    given = _given([3_000_000, 1, 2_000_000, 1, 1] * 8)
    ends = [CountdownWork(1, lambda place=place: order.append(place)) for place in range(len(given))]
    sent = CountdownWork(len(given))
    for place, x in enumerate(given):
        a.send(x, sent)
        if place == 20:
            time.sleep(0.02)
        b.receive(torch.zeros_like(x), ends[place])
    for one in ends:
        one.wait()
    assert order == list(range(len(given)))


def test_a_socket_that_stands_still_is_given_up_and_its_frames_go_elsewhere(monkeypatch, caplog):
    """As one whose path a router has forgotten: nothing comes back, not even an error."""
    monkeypatch.setattr(bundle_module, "STUCK_SECONDS", 0.4)
    (lefts, rights), ((dead, far), (near, other)) = zip(*_sockets(3)), _sockets(2)
    left = Bundle([dead, *lefts], "rank 1", 20.0, socket_loop(), active=4)
    right = Bundle([other, *rights], "rank 0", 20.0, socket_loop(), active=4)
    streams, given = (left.stream(), right.stream()), _given([1_000_000] * 60)
    work = CountdownWork(2 * len(given))
    taken = [torch.zeros_like(x) for x in given]
    for x, out in zip(given, taken):
        streams[0].send(x, work)
        streams[1].receive(out, work)
        time.sleep(0.02)
    over = threading.Event()
    work.then(over.set)
    assert over.wait(20), "it hangs"
    assert all(map(torch.equal, given, taken))
    assert len(left.ends) == len(right.ends) == 3
    assert "moved nothing" in caplog.text
    for one in (left, right, far, near):
        one.fail(RuntimeError("over")) if isinstance(one, Bundle) else one.close()


def test_lost_sockets_are_opened_again_and_carry_messages(pair):
    left, right = pair
    for place in range(3):
        left.ends[0 if place else 1].socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 20
        while not (sorted(left.by_place) == sorted(right.by_place) and 4 + place in left.by_place):
            assert time.monotonic() < deadline, "no new socket"
            time.sleep(0.01)
    for before in [end for end in left.ends if end.place < 4]:
        before.socket.shutdown(socket.SHUT_RDWR)
    for a, b in (pair, reversed(pair)):
        x, work = _given([3_000_000])[0], CountdownWork(2)
        out = torch.zeros_like(x)
        b.stream().receive(out, work)
        a.stream().send(x, work)
        work.wait()
        assert torch.equal(x, out)


@pytest.mark.parametrize("says", [b"", b"\0", bytes(16)], ids=["nothing", "a byte", "another token"])
def test_who_does_not_know_the_token_gets_no_socket_and_keeps_nobody_out(pair, monkeypatch, says):
    """Forty strangers connect first, where a lost socket is to be opened again, and stay: in one try, with no other."""
    listening, servers, create = [], [], socket.create_server

    def create_and_intrude(*args, **options):
        server = create(*args, **options)
        servers.append(server)
        for _ in range(40):
            stranger = socket.create_connection(server.getsockname())
            stranger.sendall(says)
            listening.append(stranger)
        return server

    monkeypatch.setattr(bundle_module.socket, "create_server", create_and_intrude)
    pair[0].ends[1].socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 60
    while not (4 in pair[0].by_place and 4 in pair[1].by_place):
        assert time.monotonic() < deadline, "no new socket"
        time.sleep(0.01)
    assert len(servers) == 1
    for stranger in listening:
        stranger.settimeout(10)
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_who_asks_for_sockets_without_end_gets_few():
    """As many as there are, which may all be lost without this side's knowledge."""
    lefts, rights = zip(*_sockets(2))
    called, go_on, before = [], threading.Event(), set(threading.enumerate())

    def call(beside, port, token):
        called.append((port, token))
        go_on.wait(20)
        raise ConnectionRefusedError

    bundle, work, out = Bundle(lefts, "rank 1", 20.0, socket_loop(), call=call), CountdownWork(1), torch.zeros(1)
    bundle.stream().receive(out, work)
    for round in range(2):
        for place in range(2, 202):
            rights[1].sendall(HEADER.pack(4, place, 5, 0, 16) + bytes(16))
        if not round:
            rights[1].sendall(HEADER.pack(1, 0, 0, 0, 4) + bytes(4))
            work.wait()
            opening = [one for one in set(threading.enumerate()) - before if one.name == "thinwire-open"]
            assert len(opening) == 2
            go_on.set()
            for thread in opening:
                thread.join(20)
            assert called == [(5, bytes(16))] * 2
    deadline = time.monotonic() + 20
    while len(called) == 2:  # afterwards it may ask again
        assert time.monotonic() < deadline, "no second try"
        time.sleep(0.01)
    bundle.fail(RuntimeError("over"))
    for right in rights:
        right.close()


_LEAVES = """
import socket, sys, torch
from thinwire.core.collectives.bundle import Bundle
from thinwire.core.collectives.socket_stream import CountdownWork, socket_loop
ends = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
bundle, work = Bundle(ends, "the test", 20.0, socket_loop(), active=3), CountdownWork(1)
bundle.stream().send(torch.full((1_500_000,), 7, dtype=torch.uint8), work)
work.wait()
"""


def test_what_was_sent_arrives_although_the_process_ends_at_once():
    """It has not closed anything, as a script whose last step is over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", _LEAVES, str(server.getsockname()[1])])
        bundle = Bundle([server.accept()[0] for _ in range(3)], "the process", 20.0, socket_loop())
    for end in bundle.ends:  # a slow wire
        end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    out, work = torch.zeros(1_500_000, dtype=torch.uint8), CountdownWork(1)
    bundle.stream().receive(out, work)
    assert process.wait(30) == 0
    work.wait()
    assert bool((out == 7).all())
    bundle.fail(RuntimeError("over"))


def test_without_any_socket_all_fails():
    lefts, rights = zip(*_sockets(4))  # neither side says how a lost one is opened again
    pair = [Bundle(some, f"rank {n}", 20.0, socket_loop()) for n, some in ((1, lefts), (0, rights))]
    work = CountdownWork(1)
    pair[0].stream().receive(torch.zeros(10), work)
    for end in list(pair[1].ends):
        end.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError, match="connection to rank 1 was lost"):
        work.wait()
    after = CountdownWork(1)
    pair[0].stream().send(torch.zeros(10), after)
    with pytest.raises(RuntimeError, match="was lost"):
        after.wait()


@pytest.mark.parametrize("way", ["receive", "send"])
def test_a_silent_side_is_given_up(way):
    lefts, rights = zip(*_sockets(2))
    bundle = Bundle(lefts, "rank 1", 0.6, socket_loop())
    work = CountdownWork(1)
    getattr(bundle.stream(), way)(torch.zeros(10 if way == "receive" else 30_000_000), work)
    if way == "send":  # which ends when the last byte is on its way
        bundle.stream().receive(torch.zeros(10), work)
    with pytest.raises(RuntimeError, match="timed out: rank 1 moved no byte"):
        work.wait()
    for right in rights:
        right.close()


def test_what_was_sent_arrives_although_its_sender_closes(pair):
    x, out, work = _given([6_000_000])[0], torch.zeros(6_000_000, dtype=torch.uint8), CountdownWork(2)
    pair[0].stream().send(x, work)
    pair[1].stream().receive(out, work)
    pair[0].close()
    work.wait()
    assert torch.equal(x, out)


# --- bytes that are no frames --------------------------------------------------------------------------------------


def _hostile(draw):
    kind = draw.choice((0, 1, 1, 1, 2, 3, 4, 5, 255))
    size = draw.choice((0, 1, 17, FRAME_BYTES, FRAME_BYTES + 1, 2**32 - 1))
    offset = draw.choice((0, 1, FRAME_BYTES, 2**40, 2**64 - 1))
    header = HEADER.pack(kind, draw.choice((0, 1, 9, 65535)), draw.choice((0, 1, 5, 2**32 - 1)), offset, size)
    return header + os.urandom(min(size, 200))


def test_hostile_frames_end_the_bundle_or_are_kept_for_messages_that_never_come():
    """100,000 of them: nobody waits for ever, and no message that was received is wrong."""
    draw, count = random.Random(7), 0
    while count < 100_000:
        honest, (near, far) = _given([300_000], count)[0], zip(*_sockets(2))
        bundle = Bundle(near, "rank 1", 0.5, socket_loop())
        confirming = draw.random() < 0.3
        stream, work, out = bundle.stream(), CountdownWork(1), torch.zeros(300_000, dtype=torch.uint8)
        stream.receive(out, work)
        for one in far:
            one.settimeout(5.0)
        some = [_hostile(draw) for _ in range(draw.choice((1, 40, 2000)))]
        count += len(some)
        try:
            if draw.random() < 0.5:
                memory = memoryview(honest.numpy())
                for offset in range(0, 300_000, FRAME_BYTES):
                    piece = memory[offset : offset + FRAME_BYTES]
                    far[1].sendall(HEADER.pack(1, 0, 0, offset, len(piece)) + piece)
                work.wait()
                assert torch.equal(out, honest)
            far[0 if confirming else 1].sendall(b"".join(some))
            for one in far:
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        over = threading.Event()
        work.then(over.set)
        assert over.wait(10), "it hangs"
        late = CountdownWork(1)
        stream.receive(out, late)
        with pytest.raises(RuntimeError):
            late.wait()
        for one in far:
            one.close()
