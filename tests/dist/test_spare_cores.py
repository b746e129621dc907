"""Where ranks have cores to spare their programs run in a thread beside backward, else in backward's own: same bits."""

import threading

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.engine.ranks.communicator import Communicator

pytestmark = pytest.mark.dist

METHODS = [
    ("topk", {"density": 0.1, "fusion": "none"}),
    ("acp", {"rank": 2, "fusion": "none"}),
    ("acp", {"rank": 2, "decoupled": True, "fusion": "none"}),
    ("signsgd", {"fusion": "none"}),
    ("powersgd", {"rank": 2, "fusion": "none"}),  # two exchanges, but for what does not pay: in the thread
]


def _train(rank, size, spare):
    before, Communicator.side_stream = Communicator.side_stream, lambda _: spare
    try:
        return [_where_and_what(rank, tw.method(name, **options)) for name, options in METHODS]
    finally:
        Communicator.side_stream = before


def _where_and_what(rank, method):
    """Whether programs began in the main thread; the weights; the residuals."""
    kind, where = type(method), set()
    reduce = kind.reduce

    def noted(self, bucket, state):
        if bucket.slots[0].device.type != "meta":  # else the plan is being traced
            where.add(threading.current_thread() is threading.main_thread())
        return reduce(self, bucket, state)

    kind.reduce = noted
    try:
        net, sync = cases.train(rank, 5, method)
        residuals = {k: v for k, v in sync.state_dict().items() if k.startswith("residual/")}
        sync.close()
    finally:
        kind.reduce = reduce
    return sorted(where), cases.weights(net), residuals


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_thread_changes_no_bit(size):
    beside, inside = run(_train, size, True), run(_train, size, False)
    for rank in range(size):
        for (name, _), thread, main in zip(METHODS, beside[rank], inside[rank]):
            assert thread[0] == [False], name
            assert main[0] == ([False, True] if name == "powersgd" else [True]), name
            for one, other in zip(thread[1], main[1]):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert thread[2].keys() == main[2].keys()
            assert thread[2]
            for key, one in thread[2].items():
                torch.testing.assert_close(one, main[2][key], rtol=0, atol=0)


def _ask(rank, size):
    net = cases.model()
    with tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "topk", density=0.1) as sync:
        return sync.services.session.comm.side_stream()


def test_ranks_on_one_machine_count_its_cores():
    from thinwire.predict.measure.machine import spare_cores

    assert run(_ask, 2) == [spare_cores(2)] * 2
