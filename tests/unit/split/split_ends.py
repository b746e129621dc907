"""Two ends over a real socket: the cloud in a thread, the edge in the test; and a proxy that cuts the cable."""

import contextlib
import copy
import functools
import select
import socket
import threading

import split_models as small
import torch

from thinwire.systems.split import (
    CloudClient,
    CloudEnd,
    CloudServer,
    EdgeEnd,
    LocalPair,
    Recipe,
    SplitPlan,
    split_model,
)
from thinwire.systems.split.surgery import by_role

RECIPE = Recipe(learning_rate=1e-2, warmup=0.0)


def halves(plan=None, **more):
    """Copies of one surgery, front and back: two decompositions differ in their last bits."""
    return copy.deepcopy(_cut(plan or SplitPlan(2), **more))


def held(plan=None, **more):
    """The same as the plan places them: the edge's half and the cloud's."""
    return tuple(by_role(*halves(plan, **more)).values())


@functools.cache
def _cut(plan, **more):
    return split_model(small.model(**more), plan)


def batch_of(step):
    """Step by step, samples come again after two steps."""
    part = step % 2
    lengths = [(7, 4, 5), (3, 6, 2)][part]
    return small.batch(seed=part, lengths=lengths, slots=range(3 * part, 3 * part + 3))


def parameters(*modules):
    return torch.cat([p.detach().reshape(-1) for module in modules for p in module.parameters()])


def in_process(plan=None, steps=6, **more):
    """What both ends must come to: (losses, parameters of the edge's half and of the cloud's)."""
    pair = LocalPair(*halves(plan, **more), RECIPE, 20)
    losses = [float(pair.step(batch_of(step))) for step in range(steps)]
    return losses, parameters(pair.half), parameters(pair.cloud.half)


@contextlib.contextmanager
def serving(half, *, edges=1, pair="pair", checkpoint_dir=None, recipe=RECIPE, **options):
    """A server in a thread; yields it, and its sentences as ``server.said``."""
    said = []
    server = CloudServer(CloudEnd(half, pair, recipe, checkpoint_dir), say=said.append, **options)
    server.said = said
    ended = []

    def run():
        try:
            server.serve(edges, idle_seconds=20)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
        thread.join(20)
        assert not thread.is_alive()
        assert not ended, ended
    finally:
        server.close()


def edge_end(half, *, total=20, pair="pair", recipe=RECIPE, **more):
    return EdgeEnd(half, pair, recipe, total, **more)


@contextlib.contextmanager
def linked(server, edge, credentials=None, port=None, kind=CloudClient, **options):
    """A connected edge: yields the link and the edge."""
    with kind("127.0.0.1", port or server.port, credentials, **options) as link:
        link.attach(edge)
        yield link, edge


def trained(edge, steps):
    """Losses of an edge's first steps, after which it says bye."""
    losses = [float(edge.step(batch_of(step))) for step in range(steps)]
    edge.bye()
    return losses


def visit(server, half, credentials=None, steps=0, port=None, **more):
    """An edge comes, trains and says bye: its losses and its link."""
    with linked(server, edge_end(half, **more), credentials, port) as (link, edge):
        return trained(edge, steps), link


def assert_same(losses, of_edge, of_cloud, expected):
    """Bit for bit what ``in_process`` came to."""
    assert losses == expected[0]
    assert torch.equal(parameters(of_edge), expected[1])
    assert torch.equal(parameters(of_cloud), expected[2])


class Cable:
    """A proxy in front of a port: counts and keeps what crosses, and cuts when told.

    Attributes:
        port: to connect to.
        crossed: bytes as they came, up and down.
        cut_at: cut the connection when so many bytes have crossed in all; None: never.
        flip: the way (0 up, 1 down) and the place of a byte that is changed on its way, once.
    """

    def __init__(self, target, cut_at=None):
        self.target, self.cut_at, self.flip = target, cut_at, None
        self.crossed = [bytearray(), bytearray()]
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while self._open:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            near, _ = self._listener.accept()
            with near, socket.create_connection(("127.0.0.1", self.target)) as far:
                self._carry([near, far])

    def _carry(self, ends):
        while self._open:
            for end in select.select(ends, [], [], 0.05)[0]:
                try:
                    data = end.recv(4096)
                except OSError:
                    return
                if not data:
                    return
                total = sum(map(len, self.crossed))
                if self.cut_at is not None and total + len(data) >= self.cut_at:
                    self.cut_at = None
                    self.cuts += 1
                    return  # what came is lost with the connection
                way = ends.index(end)
                if self.flip is not None and self.flip[0] == way and self.flip[1] < len(self.crossed[way]) + len(data):
                    place, self.flip = self.flip[1] - len(self.crossed[way]), None
                    data = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
                self.crossed[way] += data
                ends[1 - ends.index(end)].sendall(data)

    def close(self):
        self._open = False
        self._thread.join()
        self._listener.close()
