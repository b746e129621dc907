"""Two ends over a real link: the cloud in a thread, the edge in the test; and who says what it likes to the cloud."""

import contextlib
import copy
import functools
import json
import threading

import split_models as small
import torch

from thinwire.core.errors import PairError
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import connect
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
from thinwire.systems.split.frames import CODEC, unpack
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
            server.serve(edges)
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


class Noting(CloudClient):
    """Keeps the requests, and the replies to them."""

    def __post_init__(self):
        super().__post_init__()
        self.noted = []

    def call(self, request):
        self.noted += [request, reply := super().call(request)]
        return reply


def guest(server, edge, trust=None):
    """Who has said hello as an edge does, and has been let in: what it sends now is up to the test."""
    hello = json.dumps(edge.hello()).encode()
    peer = connect("127.0.0.1", server.port, hello, PeerIdentity("edge", 0, trust))
    assert unpack(peer.receive(CODEC, 60.0, 1 << 16)).kind == "ready"
    return peer


def until_closed(peer):
    with contextlib.suppress(PairError):
        while True:
            peer.receive_frame(1, 60.0)
    peer.close()


def assert_same(losses, of_edge, of_cloud, expected):
    """Bit for bit what ``in_process`` came to."""
    assert losses == expected[0]
    assert torch.equal(parameters(of_edge), expected[1])
    assert torch.equal(parameters(of_cloud), expected[2])
