"""Groups of other names than "gloo" may have Gloo for CPUs too: with several devices' backends, or with no name."""

import cases
import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

METHODS = [
    ("ssgd", {}),
    ("dear", {}),
    ("cast", {"dtype": "bf16", "decoupled": True}),
    ("topk", {"density": 0.1}),
    ("gtopk", {"density": 0.1}),
    ("oktopk", {"density": 0.1}),
    ("local", {"sync_every": 2, "codec": "int8"}),
]


def _every_method(rank, size, name):
    dist.init_process_group(*filter(None, [name]))
    found = []
    for method, options in METHODS:
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, method, **options):
            cases.walk(net, optimizer, rank, 0, 3)
        found.append(cases.weights(net))
    dist.destroy_process_group()
    return found


def test_the_same_weights_whatever_the_group_was_given():
    unnamed = "gloo" if torch.accelerator.is_available() else None  # there, a group without a name is for accelerators
    named, *others = (run(_every_method, 2, name, init=False)[0] for name in ("gloo", "cpu:gloo", unnamed))
    for other in others:
        for (method, _), mine, theirs in zip(METHODS, named, other, strict=True):
            assert all(map(torch.equal, mine, theirs)), method


def _refused(rank, size):
    from thinwire.engine.ranks.communicator import backend_of

    dist.init_process_group("cpu:gloo")
    with pytest.raises(ValueError, match=r"on cuda:0, for which the process group \(cpu:gloo\) has no backend: call"):
        backend_of(None, torch.device("cuda:0"))
    dist.destroy_process_group()


def test_a_device_without_a_backend_is_refused():
    run(_refused, 1, init=False)


def _own_group(rank, size):
    dist.init_process_group("cuda:gloo")  # stands for NCCL alone
    group = dist.new_group(list(range(size)), backend="gloo")
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, "ssgd", process_group=group):
        cases.loss_of(net, rank, 0).backward()
        optimizer.step()
    dist.destroy_process_group()
    return cases.weights(net)


def test_lanes_have_the_backends_of_the_users_group_and_not_of_the_default_one():
    first, second = run(_own_group, 2, init=False)
    assert all(map(torch.equal, first, second))
