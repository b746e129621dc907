"""Ranks with different numbers of batches, against the mean over those that still have some."""

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

COUNTS = (3, 9, 6)
EPOCHS = 2


def _batches(rank, epoch):
    return [100 * epoch + step for step in range(COUNTS[rank])]


def _gradients(rank, size, cases_):
    """Two epochs by each method: weights, the optimizer's state, and what an error said without ``join``."""
    found = {}
    for name, method, options, join in cases_:
        net = cases.model(dtype=torch.float64)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with tw.attach(net, optimizer, method, **options) as sync:
            for epoch in range(EPOCHS):
                with sync.join(**join):
                    for step in _batches(rank, epoch):
                        cases.down(cases.loss_of(net, rank, step, dtype=torch.float64), optimizer)
        states = [x.clone() for state in optimizer.state.values() for x in state.values()]
        found[name] = cases.weights(net), states
    return found


CASES = [
    ("mean of those with data", "ssgd", {}, {}),
    ("mean of all", "ssgd", {}, {"divide_by_initial_world_size": True}),
    ("residuals", "acp", {"rank": 2}, {}),
    ("eight bits", "cast", {"dtype": "int8"}, {}),
    ("unused", "ssgd", {"find_unused_parameters": True}, {}),
]


@pytest.fixture(scope="module")
def trained():
    return run(_gradients, len(COUNTS), CASES, seconds=240)


def _oracle(*, initial):
    net = cases.model(dtype=torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for step in range(max(COUNTS)):
            going = [rank for rank, count in enumerate(COUNTS) if step < count]
            for rank in going:
                loss = cases.loss_of(net, rank, 100 * epoch + step, dtype=torch.float64)
                (loss / (len(COUNTS) if initial else len(going))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(
    ("name", "initial"), [("mean of those with data", False), ("mean of all", True), ("unused", False)]
)
def test_gradients_are_averaged_over_the_ranks_with_data(trained, name, initial):
    for found in trained:
        for a, b in zip(found[name][0], _oracle(initial=initial), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_afterwards_all_ranks_hold_the_same(trained, name):
    first = trained[0][name]
    for found in trained[1:]:
        for mine, theirs in zip(first, found[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _local(rank, size, options, join, epochs):
    net = cases.model(dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    own = []
    with tw.attach(net, optimizer, "local", sync_every=3, **options) as sync:
        for epoch in range(epochs):
            with sync.join(**join):
                for step in _batches(rank, epoch):
                    before = cases.weights(net)
                    cases.down(cases.loss_of(net, rank, step, dtype=torch.float64), optimizer)
                    own.append([a - b for a, b in zip(cases.weights(net), before)])
        sync.finish()
        rounds = sync.stats().note
    return cases.weights(net), rounds


def _local_oracle(*, initial):
    """Every three steps the mean of what those changed who have stepped."""
    outer = cases.weights(cases.model(dtype=torch.float64))
    for first in range(0, max(COUNTS), 3):
        changes = []
        for rank, count in enumerate(COUNTS):
            net = cases.model(dtype=torch.float64)
            torch.nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in outer]), net.parameters())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            for step in range(first, min(first + 3, count)):
                cases.down(cases.loss_of(net, rank, step, dtype=torch.float64), optimizer)
            if first < count or initial:
                changes.append([a - b for a, b in zip(cases.weights(net), outer)])
        outer = [x + sum(some) / len(some) for x, some in zip(outer, zip(*changes))]
    return outer


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("codec", ["none", "outer"])
def test_local_steps_are_averaged_over_the_ranks_that_have_made_some(codec, initial):
    options = {"codec": "none"} if codec == "none" else {"codec": "none", "outer": tw.Nesterov(1.0, 0.0)}
    for weights, _ in run(_local, 3, options, {"divide_by_initial_world_size": initial}, 1, seconds=120):
        for a, b in zip(weights, _local_oracle(initial=initial), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "int2", "fragments": 2},
        {"codec": "int8", "fragment_sync_delay": 2, "look": 0.3},
        {"codec": "int4", "outer": tw.Nesterov(0.7, 0.5)},
    ],
    ids=lambda options: options["codec"],
)
def test_local_steps_of_any_kind_end_with_equal_weights_after_two_epochs(options):
    ends = run(_local, 3, options, {}, 2, seconds=120)
    for weights, _ in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, ends[0][0], strict=True))
    with torch.no_grad():
        net = cases.model(dtype=torch.float64)
        start = float(cases.loss_of(net, 1, 5, dtype=torch.float64))
        torch.nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in ends[0][0]]), net.parameters())
        assert float(cases.loss_of(net, 1, 5, dtype=torch.float64)) < start


def _from_the_start(rank, size):
    """Rank 0 has no data in the first epoch; in the second all have."""
    found = {}
    cases_ = [(name, *case) for name, *case in CASES if case[-1] == {}]
    cases_ += [("auto", "auto", {}, {}), ("local", "local", {"sync_every": 2, "codec": "int8"}, {})]
    for name, method, options, _ in cases_:
        net = cases.model(dtype=torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, method, timeout=30, **options) as sync:
            for epoch in range(2):
                with sync.join():
                    for step in range((0, 3)[rank] if epoch == 0 else 12):
                        cases.down(cases.loss_of(net, rank, 100 * epoch + step, dtype=torch.float64), optimizer)
            if method == "local":
                sync.finish()
        found[name] = cases.weights(net)
    return found


def test_a_rank_may_have_no_data_from_the_start():
    """What is planned by the first steps is planned when all ranks make some."""
    first, second = run(_from_the_start, 2, seconds=120)
    for name, weights in first.items():
        assert all(torch.equal(a, b) for a, b in zip(weights, second[name], strict=True)), name
    net = cases.model(dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch, ranks in ((0, [1]), (1, [0, 1])):
        for step in range(3 if epoch == 0 else 12):
            losses = [cases.loss_of(net, rank, 100 * epoch + step, dtype=torch.float64) for rank in ranks]
            cases.down(sum(losses) / len(ranks), optimizer)
    for a, b in zip(first["mean of those with data"], net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def _refused(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    said = []
    for method, options in (("dear", {}), ("local", {"sync_every": tw.QSR(0.02)})):
        with tw.attach(net, optimizer, method, **options) as sync:
            said.append(cases.said(lambda: sync.join().__enter__()))
    return said


def test_what_has_no_part_is_refused():
    for dear, qsr in run(_refused, 2, seconds=120):
        assert dear.startswith("ValueError: join() has no part for what dear does in a step")
        assert qsr.startswith("ValueError: join() has no part for a period that follows the learning rate")


def test_one_rank_alone():
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for method in ("ssgd", "local"):
        with tw.attach(net, optimizer, method) as sync, sync.join():
            cases.walk(net, optimizer, 0, 0, 2)
