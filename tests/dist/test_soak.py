"""Two thousand steps of every kind of method: nothing grows."""

import os
import threading
from pathlib import Path

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist

METHODS = [
    ("ssgd", {}),
    ("ssgd", {"gradient_as_bucket_view": False}),
    ("dear", {}),
    ("cast", {"dtype": "int8"}),
    ("acp", {"rank": 2}),
    ("powersgd", {"rank": 2}),
    ("topk", {"density": 0.05}),
    ("dgc", {"density": 0.05}),
]


def _held():
    """Resident MB, open files, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()


def _trains(rank, size, steps, method, options):
    net = torch.nn.Sequential(cases.model(), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    with tw.attach(net, optimizer, method, **options) as sync:
        for step in range(steps):
            if step == steps // 4:
                before = _held()
            cases.loss_of(net, rank, step).backward()
            if step % 7 == 3:  # a batch that the script drops
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return before, _held(), sync.stats().steps


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc to see what a process holds")
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_nothing_grows(method, options):
    steps = 2000
    for before, after, counted in run(_trains, 2, steps, method, options, fresh=True, seconds=280):
        assert counted == steps
        assert after[0] - before[0] < 8  # MB; a residual that leaked each step would be 15
        assert all(now <= was for now, was in zip(after[1:], before[1:])), (before, after)  # a file may be closed late
