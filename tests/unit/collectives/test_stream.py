"""Messages on one TCP connection: in order, of any size, posted early or late, and never waited for without end."""

import os
import socket
import threading
import time

import pytest
import torch

from thinwire.core.collectives.socket_stream import CountdownWork, SocketLoop, Stream, socket_loop


def _pair(timeout=20.0, other_loop=None):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    mine = socket_loop()
    return Stream(left, "rank 1", timeout, mine), Stream(right, "rank 0", timeout, other_loop or mine)


@pytest.fixture
def streams():
    pair = _pair()
    yield pair
    for stream in pair:
        stream.close()


def _tensors(sizes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator) for n in sizes]


SIZES = (1, 300_000, 0, 7, 3_000_000, 131_072, 2)


@pytest.mark.parametrize("early", ["send", "receive"])
def test_messages_arrive_in_order_both_ways(streams, early):
    given = [_tensors(SIZES), [-x for x in _tensors(SIZES)]]
    taken = [[torch.full_like(x, torch.nan) for x in _tensors(SIZES)] for _ in range(2)]
    work = CountdownWork(4 * len(SIZES))

    def send():
        for stream, tensors in zip(streams, given):
            for x in tensors:
                stream.send(x, work)

    def receive():
        for stream, tensors in zip(streams, reversed(taken)):
            for x in tensors:
                stream.receive(x, work)

    first, second = (send, receive) if early == "send" else (receive, send)
    first()
    time.sleep(0.2)
    second()
    work.wait()
    assert all(torch.equal(a, b) for side in range(2) for a, b in zip(given[side], taken[side]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16])
def test_every_dtype_travels_as_bytes(streams, dtype):
    x, out = torch.arange(40_000).to(dtype).view(200, 200), torch.zeros(200, 200, dtype=dtype)
    work = CountdownWork(2)
    streams[0].send(x, work)
    streams[1].receive(out, work)
    work.wait()
    assert torch.equal(x, out)


def test_many_small_messages_do_not_starve(streams):
    given, taken = torch.arange(3000.0), torch.zeros(3000)
    work = CountdownWork(6000)
    for i in range(3000):
        streams[1].receive(taken[i : i + 1], work)
        streams[0].send(given[i : i + 1], work)
    work.wait()
    assert torch.equal(given, taken)


def test_what_was_sent_before_the_end_arrives(streams):
    x, out = _tensors([200_000])[0], torch.zeros(200_000)
    sent, received = CountdownWork(1), CountdownWork(1)
    streams[1].receive(out, received)
    streams[0].send(x, sent)
    sent.wait()
    received.wait()
    streams[0].close()
    assert torch.equal(x, out)
    late = CountdownWork(1)
    streams[1].receive(out, late)
    with pytest.raises(RuntimeError, match="connection to rank 0 was lost"):
        late.wait()
    after = CountdownWork(1)
    streams[1].send(x, after)  # refused at once, without a wait
    with pytest.raises(RuntimeError, match="was lost"):
        after.wait()


def test_a_dead_side_fails_what_waits(streams):
    work = CountdownWork(2)
    streams[0].receive(torch.zeros(10), work)
    streams[0].receive(torch.zeros(10), work)
    failed = threading.Event()
    work.then(failed.set)
    streams[1].close()
    assert failed.wait(10)
    with pytest.raises(RuntimeError, match="connection to rank 1 was lost"):
        work.wait()


@pytest.mark.parametrize("way", ["receive", "send"])
def test_a_silent_side_is_given_up(way):
    streams = _pair(timeout=0.6)
    try:
        work = CountdownWork(1)
        size = 10 if way == "receive" else 30_000_000  # more than the kernel takes
        started = time.monotonic()
        getattr(streams[0], way)(torch.zeros(size), work)
        with pytest.raises(RuntimeError, match="timed out: rank 1 moved no byte"):
            work.wait()
        assert time.monotonic() - started > 0.5
    finally:
        for stream in streams:
            stream.close()


def test_one_who_is_slow_but_moves_is_not_given_up():
    streams = _pair(timeout=4.0)
    try:
        out, work = torch.zeros(8), CountdownWork(1)
        streams[1].receive(out, work)
        for i in range(8):  # 4.8 s in all
            streams[0].socket.send(torch.tensor(float(i)).numpy().tobytes())
            time.sleep(0.6)
        work.wait()
        assert out.tolist() == list(range(8))
    finally:
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("timeout", [20.0, 0.4], ids=["data came", "none came"])
def test_trouble_of_one_stream_is_not_the_others(timeout, monkeypatch):
    streams, other = _pair(timeout), _pair()
    try:
        monkeypatch.setattr(streams[1], "on_data", lambda: 1 / 0)
        bad, good, out = CountdownWork(1), CountdownWork(2), torch.zeros(5)
        streams[1].receive(torch.zeros(5), bad)
        if timeout > 1:
            streams[0].send(torch.ones(5), CountdownWork(1))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            bad.wait()
        other[1].receive(out, good)
        other[0].send(torch.ones(5), good)
        good.wait()
        assert out.sum() == 5
    finally:
        for stream in (*streams, *other):
            stream.close()


def test_a_number_used_again_is_not_taken_for_the_old_stream():
    mine = SocketLoop()
    streams = _pair(other_loop=mine)
    number = streams[1].number
    streams[1].close()
    assert number in mine.gone or number not in mine.streams
    streams[0].close()


def _works(pair):
    """Whether a byte crosses, within ten seconds."""
    work, over = CountdownWork(2), threading.Event()
    work.then(over.set)
    pair[1].receive(torch.zeros(1), work)
    pair[0].send(torch.ones(1), work)
    return over.wait(10.0)


def test_a_fork_moves_its_own_bytes_and_leaves_its_parents_alone(streams):
    """It has its parent's memory, and no thread of its parent's."""
    assert _works(streams)
    child = os.fork()
    if not child:
        for stream in streams:
            stream.close()  # as the lanes do, for a group that is new
        os._exit(0 if _works(_pair()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _works(streams)


def test_the_last_part_runs_what_follows_and_its_error_counts():
    order = []
    work = CountdownWork(2, lambda: order.append("last"))
    work.then(lambda: order.append("told"))
    work.part_ended()
    assert order == []
    work.part_ended()
    work.wait()
    assert order == ["last", "told"]

    told = []
    broken = CountdownWork(1, lambda: {}["x"], told.append)
    broken.part_ended()
    with pytest.raises(RuntimeError, match="KeyError"):
        broken.wait()
    assert len(told) == 1
