"""The simulated card finds what it is there to find, and nothing where all is in order."""

import pytest
import torch
from card import Card, OnCard
from nccl import Nccl, disagreement
from training import DEVICE

SECOND = torch.device("cuda:1")


@pytest.fixture
def card():
    with Card().in_place() as card, torch.no_grad():
        yield card


def kinds(card):
    return [one.kind for one in card.findings]


def test_its_tensors_work_like_others(card):
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    x[:, 1] += 1
    assert isinstance(x, OnCard)
    assert (x.device, x.is_cuda, x.T.contiguous().tolist()) == (DEVICE, True, [[0, 3], [2, 5], [2, 5]])
    assert x.to(torch.float64).sum().item() == 17
    assert x.data_ptr() == x.view(-1).data_ptr()
    assert kinds(card) == []


def test_race(card):
    side, x = torch.cuda.Stream(DEVICE), torch.zeros(3, device=DEVICE)
    with torch.cuda.stream(side):
        x.add_(1)
    assert kinds(card) == ["RACE"]


@pytest.mark.parametrize("how", ["event", "stream", "host"])
def test_no_race_where_the_streams_have_an_order(card, how):
    side, x = torch.cuda.Stream(DEVICE), torch.zeros(3, device=DEVICE)
    main = torch.cuda.current_stream(DEVICE)
    if how == "event":
        side.wait_event(main.record_event())
    elif how == "stream":
        side.wait_stream(main)
    else:
        x.sum().item()
    with torch.cuda.stream(side):
        x.add_(1)
    assert kinds(card) == []


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_still_read(card, recorded):
    side, x = torch.cuda.Stream(DEVICE), torch.zeros(3, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        y = x + 1
        if recorded:
            x.record_stream(side)
    del x
    torch.ones(3, device=DEVICE)
    assert kinds(card) == ([] if recorded else ["FREED-IN-USE"])
    del y


def test_waiting_for_the_card(card):
    x = torch.zeros(3, device=DEVICE)
    pinned = torch.zeros(3).pin_memory()
    x.copy_(pinned, non_blocking=True)
    pinned.to(DEVICE, non_blocking=True)
    torch.where(x > 0, x, 0.0)
    assert card.waits == []
    for read in (x.cpu, x.tolist, x.sum().item, lambda: bool((x == 0).any()), x.nonzero, lambda: x[x > 0]):
        card.waits.clear()
        read()
        assert len(card.waits) == 1, read
    for copy in (lambda: torch.tensor([1], device=DEVICE), lambda: torch.zeros(3).to(DEVICE), lambda: x.copy_(pinned)):
        card.waits.clear()
        copy()
        assert len(card.waits) == 1, copy


def test_the_current_device_is_another(card):
    torch.zeros(3, device=SECOND)
    torch.cuda.Event().record()
    torch.cuda.current_stream()
    assert kinds(card) == ["WRONG-DEVICE"] * 2


def test_mixed_devices(card):
    x = torch.zeros(3, device=DEVICE)
    x + torch.tensor(1.0)  # a number
    assert kinds(card) == []
    x + torch.ones(3)
    x + torch.zeros(3, device=SECOND)
    assert kinds(card).count("MIXED") == 2


def test_launches_of_the_package_alone(card):
    from thinwire.core.kernels.orthogonal import orthogonalise

    x = torch.randn(8, 2, device=DEVICE) + 1
    assert card.launches == 0
    orthogonalise(x)
    assert card.names == {"nan_to_num": 1, "linalg_qr": 1}


def test_nccl(card):
    with Nccl(card, 1, 2).in_place() as nccl:
        dist = torch.distributed
        group, x = dist.new_group([0, 1]), torch.ones(4, device=DEVICE)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0, group), dist.P2POp(dist.isend, x.clone(), 0, group)])
        assert kinds(card) == ["FIRST"]
        work = dist.all_reduce(x, group=group, async_op=True)
        x.add_(1)
        assert kinds(card) == ["FIRST", "RACE"]
        work.wait()
        x.add_(1)
        dist.all_reduce(torch.ones(2, dtype=torch.int16, device=DEVICE))
        dist.all_reduce(torch.ones(2, 2, device=DEVICE).T[:1])
        assert kinds(card)[2:] == ["DTYPE", "LAYOUT"]
        assert [what for _, what in nccl.log[:2]] == ["made", "exchange 1 4 torch.float32"]


def test_ranks_that_disagree():
    a, b, other = ("0-1/0", "all-reduce 4"), ("0-1/1", "all-reduce 4"), ("0/0", "all-reduce 1")
    assert disagreement([[a, other, b], [a, b]]) is None
    for logs in ([a, b], [b, a]), ([a, b], [a]), ([a], [("0-1/0", "all-reduce 5")]):
        assert disagreement(list(logs)).startswith("DESYNC")


def test_torch_is_as_before():
    """It keeps a set of what makes tensors, from when a device was first said."""
    with Card().in_place(), torch.device("cuda:0"):
        torch.ones(1)
    with torch.device("meta"):
        assert torch.tensor([]).is_meta
