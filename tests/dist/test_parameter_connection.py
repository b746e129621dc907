"""Order between peers with two channels: weights never reach a node before the WELCOME that makes it a member."""

import queue
import threading
import time

import pytest
import torch

from thinwire.systems.link.codec import FRAME
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import Caller, Listener
from thinwire.systems.parameter_server.messages import CODEC, Enter, Ping, Weights, Welcome, decode, encode

pytestmark = pytest.mark.dist


@pytest.fixture
def ends():
    listener, taken = Listener(roles=("worker",)), queue.SimpleQueue()
    listener.serve(lambda peer, hello: taken.put(peer), FRAME.size)
    here = Caller(f"127.0.0.1:{listener.port}", PeerIdentity("worker", 0)).connect(encode(Enter(0)))
    yield taken.get(timeout=10), here
    listener.close()


def start(peer, deliver=lambda message: None, closed=lambda reason: None):
    peer.start(CODEC, channels=2, seconds=10, most_bytes=16, deliver=deliver, closed=closed)


def test_a_tensor_never_overtakes_what_was_posted_before_it(ends, monkeypatch):
    came, done = queue.SimpleQueue(), threading.Event()
    server, node = ends
    send_frame = server.send_frame

    def slow_to_welcome(frame, seconds=None):
        """The thread is not scheduled between taking WELCOME from the outbox and sending it."""
        if isinstance(decode(frame[: FRAME.size])[0], Welcome):
            time.sleep(0.3)
        send_frame(frame)

    monkeypatch.setattr(server, "send_frame", slow_to_welcome)
    start(node, came.put, lambda reason: done.set())
    start(server)
    server.post(Welcome(5, 0))
    server.post(Weights(5, 1, 0, 7, 1, tensor=torch.arange(4.0)))
    assert [type(came.get(timeout=10)) for _ in range(2)] == [Welcome, Weights]
    server.post(Ping())
    assert isinstance(came.get(timeout=10), Ping)  # and what comes later still passes
    server.finish()
    assert done.wait(10)
    for peer in ends:
        peer.join(5)


def test_a_peer_may_be_closed_and_waited_for_while_another_thread_starts_it(ends, monkeypatch):
    """A shard whose server goes closes also the connection of a leader that comes just then."""
    server, _ = ends
    begin, interrupted = threading.Thread.start, []

    def starting(thread):
        if thread.name.startswith("thinwire_"):
            server.close()
            server.join(0.0)
            interrupted.append(thread.name)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    start(server)
    assert len(interrupted) == 4
    server.join(5)
    assert server.ended
