"""Which process groups NCCL would be asked for: counted on torch's fake backend, with up to 1,024 ranks and no card."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

import thinwire as tw
from thinwire.adapters.ddp import traced
from thinwire.core.collectives.exchange import LanePool
from thinwire.core.program import AllReduce, Topology
from thinwire.core.program.ops import WORLD
from thinwire.engine.ranks import communicator
from thinwire.engine.ranks.communicator import Communicator

SHAPES = [("a", (64, 64)), ("b", (64,))]
METHODS = [
    tw.SSGD(),
    tw.SSGD(collective="torus"),
    tw.ACP(rank=2),
    tw.PowerSGD(rank=2),
    tw.TopK(density=0.01),
    tw.GTopK(density=0.01),
    tw.OkTopk(density=0.01),
    tw.HiTopK(density=0.01),
    tw.Cast("int8"),
    tw.SignSGD(),
    tw.DeAR(),
]


@pytest.fixture(params=[24, 1024])
def ranks(request, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=1, world_size=request.param)
    monkeypatch.setattr(communicator, "backend_of", lambda group, device: "nccl")
    yield request.param
    dist.destroy_process_group()


def _groups():
    return len(dist.distributed_c10d._world.pg_map) - 1  # one is the default group


def _one(tensor):
    return (yield AllReduce(tensor, group=WORLD))


def test_a_group_that_cpus_have_used_is_not_taken_for_cards(ranks, monkeypatch):
    """Its NCCL has not connected yet, and would at the first op, in which perhaps not all ranks take part."""
    used = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None, **_: used.append(group))
    for device, connected in ((None, 0), (torch.device("cpu"), 1), (torch.device("cpu"), 1), (None, 1)):
        lanes = LanePool(tuple(range(ranks)), Topology(ranks), 1, None, device)
        lanes.get("gradients", WORLD, 0)
        lanes.release()
        assert len(used) == connected


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("per_node", [1, 2])
def test_at_most_three_and_all_made_at_attach(ranks, per_node, method, monkeypatch):
    used_at_once = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None, **_: used_at_once.append(group))
    topology = Topology(ranks, per_node)
    comm = Communicator(None, topology, torch.device("cpu"), None)
    comm.open_lanes(traced(method, SHAPES, topology, rank=1))
    made = _groups()
    assert 1 <= made <= 3
    assert len(set(map(id, used_at_once))) == made  # NCCL connects, all ranks at once, when a group is used first
    monkeypatch.undo()
    monkeypatch.setattr(communicator, "backend_of", lambda group, device: "nccl")
    comm.gather_tensor(torch.zeros(1))
    comm.run(_one(torch.zeros(1)), "run something")
    comm.broadcast_later(torch.zeros(1))()
    assert _groups() == made
