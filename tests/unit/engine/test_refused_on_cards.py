"""What would go wrong on a card is refused before it does, in one sentence: asked without one."""

import pytest
import torch
import torch.distributed as dist

from thinwire.core.program import Topology
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.engine.ranks import communicator
from thinwire.engine.ranks.communicator import Communicator


@pytest.fixture
def group():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gloo_is_for_tensors_of_cpus(group):
    assert communicator.backend_of(None, torch.device("cpu")) == "gloo"
    with pytest.raises(ValueError, match=r"on cuda:1, but the process group's backend .* gloo") as error:
        communicator.backend_of(None, torch.device("cuda", 1))
    assert "\n" not in str(error.value)


def test_cuda_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    executor = StreamExecutor(None, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    executor.begin(0, lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for size in (1, None):
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            executor.begin(size, lambda _: None)


def test_a_part_of_the_ranks_beside_a_bound_device(monkeypatch):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=0, world_size=4)
    try:
        half = dist.new_group([0, 1])
        monkeypatch.setattr(communicator, "backend_of", lambda group, device: "nccl")
        Communicator(half, Topology(2), torch.device("cpu"), None).close(broken=False)
        monkeypatch.setattr(type(dist.group.WORLD), "bound_device_id", torch.device("cuda", 0))
        with pytest.raises(ValueError, match="leave device_id out"):
            Communicator(half, Topology(2), torch.device("cpu"), None)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
