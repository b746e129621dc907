"""Who is late, said so that it can be read."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from thinwire.engine.ranks import late_ranks as late
from thinwire.engine.ranks.communicator import SingleRank


@pytest.fixture
def _world():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=3, world_size=1024)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
def test_of_a_thousand_a_few_are_named(monkeypatch):
    monkeypatch.setattr(late, "WAIT_SECONDS", 0.1)
    assert late.LateRanks(range(1024), 3, "test", 5.0).report(7, "2 (fc.weight)", "AllReduce") == (
        "rank 0, rank 1, rank 2, rank 4, rank 5, rank 6, rank 7, rank 8 and 1015 others did not report: "
        "dead, late or done already (all ranks need as many batches, or sync.join(), and the same calls)"
    )


@pytest.mark.usefixtures("_world")
def test_a_rank_that_leaves_after_a_meeting_does_not_undo_it(monkeypatch):
    """It may leave between the looks of another rank at those who have come and at those who have left."""

    class Store(dist.HashStore):
        def check(self, keys):
            if waiting:
                rank = waiting.pop()
                rank.come()
                rank.leave("has left attach with ValueError: sync_every=0")
            return super().check(keys)

    store, waiting = Store(), []
    with monkeypatch.context() as patch:
        patch.setattr(late, "bounded", lambda seconds, connect: store)
        first, second = (late.LateRanks((0, 1), place, "meeting", 5.0) for place in range(2))
    waiting.append(second)
    first.come()
    with pytest.raises(RuntimeError, match="another rank has given up"):
        first.come()


def test_what_the_system_says_is_told_without_gloos_comparison():
    gloo = "[enforce fail at /gloo/transport/tcp/device.cc:33] rv != -1. -1 vs -1. Too many open files"
    words = r"^rank 0: connecting failed: RuntimeError: Too many open files\. "
    with pytest.raises(RuntimeError, match=words), SingleRank().meeting("connecting"):
        raise RuntimeError(gloo)
