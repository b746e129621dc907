"""Several sockets for a peer's tensors: what crosses, what a lost socket costs, and who gets none in.

That every byte comes, whatever socket is lost and whatever is sent over one, ``tests/unit/collectives/test_bundle.py``
holds for all who use bundles.
"""

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
import torch
from parameter_cluster import started

from between import Between
from thinwire.core.collectives import bundle as bundle_module
from thinwire.core.connect import ListeningPort
from thinwire.core.duplex import dial, end_of
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.systems.link.hello import AGAIN, FRAMES, TENSORS, PeerIdentity, introduce
from thinwire.systems.link.listener import Listener, connect, server_of
from thinwire.systems.parameter_server.messages import CODEC, Ping, Weights

SECRET = b"0123456789abcdef"
NODE = PeerIdentity("node", 3, SECRET)
SOCKETS = 4
HEADER = struct.Struct("<BHIQI")
SIZES = (1, 3_000_001, 0, 7, 32768, 32769, 999_999, 2)


@pytest.fixture
def several(monkeypatch):
    monkeypatch.setenv("THINWIRE_SOCKETS", str(SOCKETS))


@pytest.fixture
def inn():
    """Makes a listener; whom it lets in is in its ``came``."""
    made = []

    def make(trust=SECRET, **options):
        listener = Listener(roles=("node",), trust=trust, **options)
        listener.came = queue.SimpleQueue()
        listener.serve(lambda peer, first: listener.came.put(peer), 4)
        made.append(listener)
        return listener

    yield make
    for listener in made:
        listener.close()


@pytest.fixture
def meet(inn, of):
    """Makes two peers, and what is between them."""
    made = []

    def make(encrypted=False):
        trusts = (of("server"), of("a")) if encrypted else (SECRET, SECRET)
        there = inn(trusts[0])
        between = Between(there.port)
        here = connect("127.0.0.1", between.port, b"1234", PeerIdentity("node", 3, trusts[1]))
        other = there.came.get(timeout=20)
        made.extend((here, other, between))
        return here, other, between

    yield make
    for one in made:
        one.close()


def given(sizes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in sizes]


def cross(peers, sizes, seed=3):
    """Send tensors both ways at once; return whether all have come as they were sent."""
    sent = [given(sizes, 10 * seed + side) for side in range(2)]
    found = [[torch.zeros_like(x) for x in some] for some in sent]

    def send(side):
        for x in sent[side]:
            peers[side].send_tensor(x, 20.0)

    def receive(side):
        for x in found[1 - side]:
            peers[side].receive_tensor(x, 20.0)

    threads = [started(do, side) for side in range(2) for do in (send, receive)]
    for thread in threads:
        thread.join(60)
    return all(torch.equal(x, y) for some in zip(sent, found) for x, y in zip(*some))


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize(("wish", "count"), [(str(SOCKETS), SOCKETS), ("1", 1), (None, 1)])
def test_tensors_of_any_size_cross_both_ways(meet, monkeypatch, encrypted, wish, count):
    """Over as many sockets as the user wishes or, here on a short wire, over one."""
    monkeypatch.setenv("THINWIRE_SOCKETS", wish) if wish else monkeypatch.delenv("THINWIRE_SOCKETS", raising=False)
    *peers, between = meet(encrypted)
    assert len(between.pairs) == 1 + count
    assert cross(peers, SIZES)
    assert peers[0].sent_bytes == peers[1].received_bytes == sum(SIZES)


def test_a_wire_is_not_long_because_the_listener_is_late(monkeypatch):
    """TCP counts the time until an acknowledgement, which it holds back in the hope of an answer to send with it."""
    monkeypatch.delenv("THINWIRE_SOCKETS", raising=False)
    listener = Listener(roles=("node",), trust=SECRET)
    between = Between(listener.port)
    meeting = started(connect, "127.0.0.1", between.port, b"1234", NODE)
    while not between.pairs:
        time.sleep(0.01)
    meeting.join(0.5)
    listener.serve(lambda peer, first: peer.close(), 4)
    meeting.join(20)
    assert len(between.pairs) == 2
    between.close()
    listener.close()


def test_frames_overtake_tensors(several, meet):
    here, other, between = meet()
    came = queue.SimpleQueue()
    for peer in (here, other):
        peer.start(CODEC, channels=2, seconds=60, most_bytes=1 << 24, deliver=came.put, closed=came.put)
    between.going.clear()
    (x,) = given([9_000_000])
    here.post(Weights(5, 1, 0, 7, 1, tensor=x))
    here.post(Ping())
    assert isinstance(came.get(timeout=20), Ping)
    between.going.set()
    assert torch.equal(came.get(timeout=20).tensor, x)


@pytest.mark.parametrize("seed", range(10))
def test_a_socket_that_is_cut_costs_no_byte(several, meet, seed):
    """At a random moment, and what is on its way is lost; half of the peers encrypt."""
    draw = random.Random(seed)
    *peers, between = meet(bool(seed % 2))

    def cutter():
        time.sleep(draw.uniform(0, 0.01))
        between.cut(draw.randrange(1, 1 + SOCKETS))

    cutting = started(cutter)
    assert cross(peers, (1_500_000, 70_000, 1_000_001), seed)
    cutting.join(10)
    assert cross(peers, (70_001,), seed)


def wait_for(what):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.005)


def none_opens(before):
    """Whether no side opens a socket now; ``before``: other threads."""
    names = ("thinwire-accept", "thinwire-open")
    return not any(one.name in names for one in set(threading.enumerate()) - before)


@pytest.mark.parametrize("encrypted,cuts", [(False, 20), (True, 10)])
def test_lost_sockets_are_opened_again_under_traffic(several, meet, monkeypatch, encrypted, cuts):
    """At random moments, one in six in the middle of its hello; at last none of the first is left."""
    monkeypatch.setattr(bundle_module, "OPENING_SECONDS", 3.0)
    draw, first = random.Random(encrypted), set(range(1, 1 + SOCKETS))
    *peers, between = meet(encrypted)
    over, crossed, before = threading.Event(), [], set(threading.enumerate())

    def traffic():
        while not over.is_set() and all(crossed):
            crossed.append(cross(peers, (400_000, 7, 100_001), len(crossed)))

    crossing = started(traffic)
    try:
        for number in range(cuts):
            time.sleep(draw.uniform(0, 0.05))
            between.cut(draw.choice(sorted(between.alive & first or between.alive - {0})))
            if number % 6 == 5:
                wait_for(lambda: len(between.alive) == 1 + SOCKETS)
                between.cut(max(between.alive))
            wait_for(lambda: len(between.alive) == 1 + SOCKETS and none_opens(before))
    finally:
        over.set()
    crossing.join(60)
    assert crossed
    assert all(crossed)
    assert cross(peers, SIZES)
    assert not between.alive & first


@pytest.mark.parametrize("shut", ["listener", "way"])
def test_where_no_socket_can_be_opened_again_the_others_carry_on(several, inn, monkeypatch, shut):
    monkeypatch.setattr(bundle_module, "OPENING_SECONDS", 0.3)
    before, there = set(threading.enumerate()), inn()
    between = Between(there.port)
    here = connect("127.0.0.1", between.port, b"1234", NODE)
    other = there.came.get(timeout=20)
    there.close() if shut == "listener" else between.refuse()
    for place in (1, 3):
        between.cut(place)
    for seed in range(20):
        assert cross((here, other), (70_001, 400_000), seed)
        time.sleep(0.05)
    assert between.alive == {0, 2, 4}
    for one in (here, other, there, between):
        one.close()
    wait_for(lambda: none_opens(before))


def test_a_tensor_that_does_not_come_has_a_time_limit_and_without_sockets_it_fails(several, meet):
    here, other, between = meet()
    with pytest.raises(PairError, match="not received: timed out: the other side is silent"):
        here.receive_tensor(torch.zeros(10), 0.2)
    with pytest.raises(PairError, match="timed out"):
        here.receive_tensor(torch.zeros(10), 60.0)
    here, other, between = meet()
    for place in range(1, 1 + SOCKETS):
        between.cut(place)
    with pytest.raises(PairError, match="a tensor was not received: the other side has gone"):
        other.receive_tensor(torch.zeros(10), 60.0)


def test_close_waits_for_nobody(several, meet, monkeypatch):
    """Although the other side takes nothing any more."""
    here, _, between = meet()
    between.going.clear()
    said, slept, sleep = queue.SimpleQueue(), [], time.sleep

    def send():
        try:
            here.send_tensor(torch.zeros(50_000_000), 600.0)
        except PairError as error:
            said.put(str(error))

    def sleeping(seconds):
        slept.append(threading.current_thread())
        sleep(seconds)

    sending = started(send)
    sending.join(0.3)
    monkeypatch.setattr(time, "sleep", sleeping)
    here.close()
    assert threading.current_thread() not in slept
    assert said.get(timeout=30) == "this connection is closed"
    with pytest.raises(PairError, match="this connection is closed"):
        here.receive_tensor(torch.zeros(1), 60.0)


@pytest.mark.parametrize("encrypted", [False, True])
def test_finish_delivers_what_was_posted(several, meet, encrypted):
    """To a side that reads only after the sender has gone."""
    here, other, _ = meet(encrypted)
    here.start(CODEC, seconds=60, most_bytes=1 << 24, deliver=print, closed=print)
    tensors = given((4_000_000, 1, 2_999_999))
    for x in tensors:
        here.post(Weights(5, 1, 0, 7, 1, tensor=x))
    here.finish()
    here.join(60)
    assert here.ended
    for x in tensors:
        assert torch.equal(other.receive(CODEC, 20.0, 1 << 24).tensor, x)
    with pytest.raises(PairError):
        other.receive_tensor(torch.zeros(1), 20.0)


# --- who gets none in ---------------------------------------------------------------------------------------------


def call(listener, channel, token=b"t" * 16, identity=NODE):
    duplex, end = dial("127.0.0.1", listener.port, 20.0), end_of(20.0)
    try:
        introduce(duplex, identity, channel, token, end, "127.0.0.1")
    except PairError:
        duplex.close()
        raise
    return duplex


def begin(listener, count, identity=NODE):
    """A node's connection for frames, which says how many there will be for tensors."""
    frames = call(listener, FRAMES, identity=identity)
    frames.write(struct.pack("<IB", 5, count) + b"1234", end_of(20.0))
    return frames


def member(listener, count, identity=NODE):
    """A node that does by hand what it should, and then what it likes with its sockets."""
    frames = begin(listener, count, identity)
    opened = [call(listener, TENSORS + place, identity=identity) for place in range(count)]
    return frames, opened, listener.came.get(timeout=20)


@pytest.mark.parametrize(
    ("before", "channel", "changed"),
    [
        ((), TENSORS + 1, {"token": b"u" * 16}),
        ((), TENSORS + 1, {"identity": PeerIdentity("node", 4, SECRET)}),
        ((), TENSORS + 1, {"identity": PeerIdentity("node", 3, b"f" * 16)}),
        ((), AGAIN, {}),
        ((), AGAIN + 1, {}),
        ((), 255, {}),
        ((1, 2), TENSORS + 2, {}),
        ((), TENSORS + 3, {}),
    ],
)
def test_a_socket_that_does_not_belong_is_refused(several, inn, before, channel, changed):
    there = inn(seconds=3.0)  # after which a wrong token counts as one that nobody has shown
    frames = begin(there, 3)
    opened = [call(there, TENSORS + place) for place in before]
    with pytest.raises(PairError):
        call(there, channel, **changed)
    assert there.came.empty()
    honest = connect("127.0.0.1", there.port, b"1234", NODE)  # nobody else is kept out
    there.came.get(timeout=20).close()
    honest.close()
    for ours in (frames, *opened):
        ours.close()


@pytest.mark.parametrize("count", [0, 17])
def test_a_number_of_sockets_that_cannot_be_ends_the_peer(inn, count):
    there = inn()
    with pytest.raises(PairError, match="the other side has"):
        begin(there, count).read(1, end_of(20.0))


def test_sockets_of_which_one_never_comes_are_closed_and_one_too_many_is_refused(several, inn):
    there = inn(seconds=2.0)
    opened = [begin(there, 3), *(call(there, TENSORS + place) for place in (1, 2))]
    for ours in opened:
        with pytest.raises(PairError, match="the other side has"):
            ours.read(1, end_of(60.0))
    assert there.came.empty()
    _, _, peer = member(there, 3)
    for place in (0, 1, 5):
        with pytest.raises(PairError):
            call(there, TENSORS + place)
    peer.close()


def asked_for_another(duplex):
    """Read what a peer says over one socket until it asks for another one; return the token for it."""
    while True:
        kind, *_, size = HEADER.unpack(duplex.read(HEADER.size, end_of(20.0)))
        more = duplex.read(size, end_of(20.0))
        if kind == 4:
            return more


@pytest.fixture
def one_lost(several, inn, of, monkeypatch):
    """Makes a node that has lost one of two sockets: the listener, what is left to it, its peer, the token it got."""
    monkeypatch.setattr(bundle_module, "OPENING_SECONDS", 60.0)

    def make(encrypted=False):
        there = inn(of("server") if encrypted else SECRET, seconds=2.0)
        own = PeerIdentity("node", 3, of("a") if encrypted else SECRET)
        frames, (lost, kept), peer = member(there, 2, own)
        lost.close()
        return there, own, (frames, kept), peer, asked_for_another(kept)

    return make


def carries(duplex, peer, message):
    duplex.write(HEADER.pack(1, 0, message, 0, 5) + b"hello", end_of(20.0))
    return bytes(peer.receive_tensor(torch.zeros(5, dtype=torch.uint8), 20.0).tolist()) == b"hello"


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda own, token, other: (own, AGAIN, b"u" * 16),
        lambda own, token, other: (own, AGAIN, b"t" * 16),  # of its first sockets
        lambda own, token, other: (own, TENSORS, token),
        lambda own, token, other: (replace(own, number=4), AGAIN, token),
        lambda own, token, other: (replace(own, trust=other), AGAIN, token),
        lambda own, token, other: (replace(own, number=4, trust=other), AGAIN, token),
        lambda own, token, other: (replace(own, trust=None), AGAIN, token),
    ],
    ids=["token", "first token", "place", "number", "trust", "number and trust", "no trust"],
)
def test_a_socket_in_place_of_a_lost_one_can_only_be_its_peers(one_lost, of, change, encrypted):
    """Nor does who tries keep the peer out; and what the peer has shown is good for one socket."""
    there, own, left, peer, token = one_lost(encrypted)
    identity, channel, shown = change(own, token, of("b") if encrypted else b"f" * 16)
    with pytest.raises(PairError):
        call(there, channel, shown, identity)
    another = call(there, AGAIN, token, own)
    assert carries(another, peer, 0)
    with pytest.raises(PairError):
        call(there, AGAIN, token, own)
    assert carries(left[1], peer, 1)
    assert carries(another, peer, 2)
    for one in (*left, another, peer):
        one.close()


def test_half_a_hello_for_a_socket_is_ended_and_keeps_nobody_out(one_lost):
    there, own, left, peer, token = one_lost()
    knock = b"thinwire" + struct.pack("<HBBq16s", 1, AGAIN, 0, 3, token) + bytes(32)
    with contextlib.ExitStack() as stack:
        halves = [socket.create_connection(("127.0.0.1", there.port), 20.0) for _ in range(2)]
        for stranger, words in zip(halves, (knock[:30], knock)):
            stack.enter_context(stranger).sendall(words)
        another = call(there, AGAIN, token, own)
        assert carries(another, peer, 0)
        assert halves[0].recv(1) == b""
        assert halves[1].recv(43, socket.MSG_WAITALL)  # the challenge, and no verdict
        assert halves[1].recv(1) == b""
    for one in (*left, another, peer):
        one.close()


def test_when_the_peer_has_ended_no_socket_is_let_in(one_lost):
    there, own, left, peer, token = one_lost()
    peer.close()
    with pytest.raises(PairError):
        call(there, AGAIN, token, own)
    for one in left:
        one.close()


def test_a_side_that_sends_what_nobody_asks_for_is_bounded(several, inn):
    there, closed = inn(), queue.SimpleQueue()
    _, sockets, peer = member(there, 2)
    peer.start(CODEC, seconds=600, most_bytes=1 << 20, deliver=print, closed=closed.put)
    frames = b"".join(HEADER.pack(1, 0, n, 0, 32768) + bytes(32768) for n in range(1 << 12))  # 128 MB
    with pytest.raises(PairError, match="the other side has"):
        sockets[0].write(frames, end_of(60.0))
    peer.close()


def test_who_never_confirms_does_not_fill_the_memory(several, inn):
    there = inn()
    _, sockets, peer = member(there, 2)
    reading = [started(sink, one) for one in sockets]
    with pytest.raises(PairError, match="timed out"):
        peer.send_tensor(torch.zeros(1 << 26), 2.0)  # 256 MB, of which it keeps 64 for sending them again
    for thread in reading:
        thread.join(30)


def sink(duplex):
    with contextlib.suppress(PairError):
        while True:
            duplex.read_some(end_of(60.0))


def test_what_the_user_asks_for_in_vain_is_said(inn, monkeypatch):
    there = inn()
    monkeypatch.setenv("THINWIRE_SOCKETS", "17")
    with pytest.raises(ValueError, match="THINWIRE_SOCKETS='17' must be a whole number from 1 to 16"):
        connect("127.0.0.1", there.port, b"1234", NODE)
    monkeypatch.setenv("THINWIRE_CONGESTION", "nonesuch")
    with pytest.raises(ValueError, match="THINWIRE_CONGESTION='nonesuch' must be one of those"):
        ListeningPort(server_of(0, "127.0.0.1"), print)
    monkeypatch.delenv("THINWIRE_CONGESTION")
    with pytest.raises(NotAdmitted):
        call(there, TENSORS, identity=PeerIdentity("node", 3))
