"""A process that has died is heard of at once, though a child that it forked lives on."""

import os
import queue
import signal
import socket
import threading

import pytest

from thinwire.core.collectives.socket_stream import Stream, socket_loop
from thinwire.core.connect import ListeningPort
from thinwire.core.duplex import Duplex, dial, end_of
from thinwire.systems.link.listener import server_of
from thinwire.systems.split.connection import CloudServer


class Orphan:
    """A child of a process that has opened something and been killed; it lives until the end of the block."""

    def __init__(self, make):
        self.ask, self.go_on = os.pipe()
        self.here, said = os.pipe()
        parent = os.fork()
        if not parent:
            kept = make()
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(self.go_on)
            os.read(self.ask, 1)
            os.write(said, b"lives" if kept else b"")
            os._exit(0)
        os.close(said)
        assert os.waitpid(parent, 0)[1] == signal.SIGKILL

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.go_on)
        assert os.read(self.here, 5) == b"lives"
        os.close(self.ask)
        os.close(self.here)


@pytest.mark.parametrize("make", [Duplex, lambda left: Stream(left, "rank 1", 60.0, socket_loop())])
def test_a_connection(make):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right = server.accept()[0]

    def opened():
        right.close()
        return make(left)

    with Orphan(opened), left, right:
        left.close()
        right.settimeout(30)
        assert right.recv(1) == b""


def test_a_listening_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Orphan(lambda: ListeningPort(server_of(port, "127.0.0.1"), print)), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_child_that_closes_what_it_inherited_ends_nothing():
    met = queue.SimpleQueue()
    port = ListeningPort(server_of(0, "127.0.0.1"), lambda duplex, end: met.put(duplex.read(1, end)))
    port.open()
    mine = dial("127.0.0.1", port.port, 10.0)
    child = os.fork()
    if not child:
        mine.close()
        port.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    another = dial("127.0.0.1", port.port, 10.0)
    for duplex in (mine, another):
        duplex.write(b"x", end_of(10.0))
        assert met.get(timeout=10.0) == b"x"
        duplex.close()
    port.close()


def test_a_split_server_closes_while_a_child_lives():
    server = CloudServer(None, insecure=True)
    serving = threading.Thread(target=server.serve, args=(None,), daemon=True)
    serving.start()
    wait, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.read(wait, 1)
        os._exit(0)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    serving.join(30.0)
    assert not serving.is_alive()
    os.close(go_on)
    os.waitpid(child, 0)
    os.close(wait)
