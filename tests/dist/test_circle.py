"""Groups of ranks that have met at a store, beside the default group of all, and without one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from spawned import free_port, run
from thinwire.core.collectives.circle import Circle
from thinwire.core.program import Topology
from thinwire.core.program.ops import AllReduce
from thinwire.engine.ranks.communicator import Communicator

pytestmark = pytest.mark.dist
LIMIT = timedelta(seconds=20)
MEMBERS = (1, 3)  # the last one's number in the default group is none of the circle's


def _exchanged(circle, value):
    comm = Communicator(circle.whole, Topology(circle.whole.size()), torch.device("cpu"), LIMIT, asks=False)

    def program():
        return (yield AllReduce(torch.full((3,), float(value))))

    found = comm.gather(bytes([value])), comm.run(program(), "test").tolist(), comm.rank
    comm.close(broken=False)
    return found


def _beside(rank, size, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    found = []
    for name in ("first", "second") if rank in MEMBERS else ():
        circle = Circle(store, name, MEMBERS.index(rank), len(MEMBERS), LIMIT)
        found.append(_exchanged(circle, rank))
        circle.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    return found, total.item()


def test_two_of_four_ranks_meet_twice_and_the_default_group_stays():
    found = run(_beside, 4, free_port())
    assert [total for _, total in found] == [4.0] * 4
    for rank, (told, _) in enumerate(found):
        place = MEMBERS.index(rank) if rank in MEMBERS else None
        assert told == ([([b"\x01", b"\x03"], [4.0] * 3, place)] * 2 if rank in MEMBERS else [])


def _without(rank, size, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    circle = Circle(store, "only", rank, size, LIMIT)
    found = _exchanged(circle, rank)
    circle.close()
    return found


def test_no_default_group_is_needed():
    for rank, found in enumerate(run(_without, 2, free_port(), init=False)):
        assert found == ([b"\x00", b"\x01"], [1.0] * 3, rank)


def _left(rank, size, port):
    """The last rank goes; what the others' exchange then says."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank not in MEMBERS:
        dist.barrier()
        return ""
    circle = Circle(store, "leaving", MEMBERS.index(rank), len(MEMBERS), LIMIT)
    said = ""
    if rank == MEMBERS[0]:
        circle.close()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=circle.whole)
        said = type(raised.value).__name__
    circle.close()
    return said


def test_who_waits_for_a_rank_that_has_left_is_told():
    assert "Error" in run(_left, 4, free_port())[MEMBERS[1]]
