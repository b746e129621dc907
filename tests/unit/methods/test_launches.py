"""How many operations one rank's programs start in a step: on a GPU each is a kernel launch, on a CPU 5 to 10 us."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import PLAN, SHAPES, draw, label

from thinwire import OneBit
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.program import Bucket, Slot, State, Topology
from thinwire.core.program.local_world import run_lockstep

RANKS = 4
# Of one rank with all seven tensors in one bucket, and in the three buckets of PLAN.
MOST = [
    (Cast("int8"), 57, 170),
    (Cast("int4"), 71, 213),
    (Cast("int2"), 183, 549),  # without a weighted histogram, for which a GPU stops its host
    (SignSGD(), 57, 170),
    (SignSGD(error_feedback=False, vote="majority"), 56, 167),
    (OneBit(), 77, 194),
    (QSGD(), 57, 159),
    (QSGD(bits=8, norm="l2"), 47, 129),
    (TernGrad(), 56, 144),
    (TernGrad(clip=None), 50, 126),
]
NOTHING = {"alias", "detach", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts what computes or copies: neither views nor memory that is merely asked for."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NOTHING:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def watched(program, launches):
    """The same program; only what it does itself counts, not the collectives."""
    value = None
    while True:
        with launches:
            try:
                op = program.send(value)
            except StopIteration:
                return
        value = yield op


def step(method, states, plan, seed, launches, shapes):
    """One step of all ranks, on all buckets; rank 1's launches are counted."""
    gradients = draw(seed, shapes, RANKS, torch.float32)
    for index, names in enumerate(plan):
        programs = []
        for state, mine in zip(states, gradients):
            slots = [Slot(n, shapes[n], mine[n], torch.float32, mine[n].device) for n in names]
            program = method.reduce(Bucket(index, slots), state)
            programs.append(watched(program, launches) if state.rank == 1 else program)
        run_lockstep(programs, states[0].topology)
    for state in states:
        assert state.end_step()


def count(method, plan, shapes=SHAPES):
    states = [State(rank, Topology(RANKS)) for rank in range(RANKS)]
    step(method, states, plan, 0, Launches(), shapes)  # residuals are made
    launches = Launches()
    step(method, states, plan, 1, launches, shapes)
    return launches.seen


@pytest.mark.parametrize("method,one,three", MOST, ids=[label(method) for method, *_ in MOST])
def test_few_launches_for_each_bucket(method, one, three):
    assert count(method, [list(SHAPES)]).total() <= one
    assert count(method, PLAN).total() <= three <= 550


@pytest.mark.parametrize("method", [method for method, *_ in MOST], ids=label)
def test_small_tensors_more_in_a_bucket_add_next_to_nothing(method):
    """Only draws, and reductions that torch has no batched form of, go by the tensor."""
    few, many = ({f"{i}": (6, 3) for i in range(n)} for n in (4, 24))
    more = count(method, [list(many)], shapes=many).total() - count(method, [list(few)], shapes=few).total()
    by_tensor = {"onebit": 3, "qsgd": 1, "terngrad": 2}.get(method.name, 0)
    assert more <= 20 * by_tensor
