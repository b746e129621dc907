"""Order on a connection with two channels: weights never reach a node before the WELCOME that makes it a member."""

import queue
import threading
import time

import pytest
import torch

from thinwire.systems.link.hello import Badge
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.meeting import Meeting
from thinwire.systems.parameter_server.connection import Connection
from thinwire.systems.parameter_server.messages import FRAME, Enter, Ping, Weights, Welcome, decode, encode

pytestmark = pytest.mark.dist


class SlowToWelcome:
    """A pair whose thread is not scheduled between taking WELCOME from the queue and sending it."""

    def __init__(self, pair):
        self._pair = pair

    def __getattr__(self, name):
        return getattr(self._pair, name)

    def send_frame(self, frame):
        if isinstance(decode(frame[: FRAME.size])[0], Welcome):
            time.sleep(0.3)
        self._pair.send_frame(frame)


@pytest.fixture
def ends():
    listener, taken = Listener(roles=("worker",)), queue.SimpleQueue()
    listener.serve(lambda pair, hello: taken.put(pair), FRAME.size)
    here = Meeting(f"127.0.0.1:{listener.port}", Badge("worker", 0)).connect(encode(Enter(0)))
    yield taken.get(timeout=10), here
    listener.close()


def test_a_tensor_never_overtakes_what_was_posted_before_it(ends):
    came, done = queue.SimpleQueue(), threading.Event()
    server, node = ends
    receiving = Connection(
        node, channels=2, seconds=10, most_bytes=16, deliver=came.put, closed=lambda reason: done.set()
    ).start()
    sending = Connection(
        SlowToWelcome(server), channels=2, seconds=10, most_bytes=0, deliver=came.put, closed=lambda reason: None
    ).start()
    sending.post(Welcome(5, 0))
    sending.post(Weights(5, 1, 0, 7, 1, tensor=torch.arange(4.0)))
    kinds = [type(came.get(timeout=10)) for _ in range(2)]
    assert kinds == [Welcome, Weights]
    sending.post(Ping())
    assert isinstance(came.get(timeout=10), Ping)  # and what comes later still passes
    sending.finish()
    assert done.wait(10)
    for connection in (sending, receiving):
        connection.join(5)


def test_a_connection_may_be_closed_and_waited_for_while_another_thread_starts_it(ends, monkeypatch):
    """A shard whose server goes closes also the connection of a leader that comes just then."""
    server, _ = ends
    connection = Connection(
        server, channels=2, seconds=10, most_bytes=0, deliver=lambda message: None, closed=lambda reason: None
    )
    begin, interrupted = threading.Thread.start, []

    def starting(thread):
        if thread.name.startswith("thinwire_"):
            connection.close()
            connection.join(0.0)
            interrupted.append(thread.name)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    connection.start()
    assert len(interrupted) == 4
    connection.join(5)
    assert connection.ended
