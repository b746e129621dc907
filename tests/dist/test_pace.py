"""Own pace: on a slower machine a period has fewer steps. Each rank's clock is a fake one, so that speeds are exact."""

import contextlib
import copy
import itertools

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.program import Topology
from thinwire.engine.local import pace as pace_module
from thinwire.engine.local.pace import Pace
from thinwire.engine.local.settings import local_settings
from thinwire.engine.local.travel import LocalRanks

TOTAL = 32
SETTINGS = {
    "weights": {"codec": "none"},
    "residuals": {"codec": "int2"},
    "fragments, late": {"codec": "int4", "fragments": 2, "fragment_sync_delay": 3},
    "outer, look": {"codec": "int8", "outer": tw.Nesterov(0.7, 0.5), "look": 0.3},
    "late, half of the deviation kept": {"codec": "none", "fragment_sync_delay": 5},
}


def pace_of(rank, ranks=4, **options):
    return Pace(rank, Topology(ranks), torch.device("cpu"), **options)


def told(pace, speeds):
    message = pace.send()
    next(message)
    with contextlib.suppress(StopIteration):
        message.send(torch.tensor([[speed, 1.0] for speed in speeds], dtype=torch.float64))
    pace.merge()
    pace.begin_period(8)
    return pace.quota


def test_a_rank_makes_its_share_of_the_fastest_ones_steps():
    assert [told(pace_of(r), [2.0, 1.0, 0.75, 0.01]) for r in range(4)] == [8, 4, 3, 1]
    assert [told(pace_of(r), [1.0, 0.91, 0.96, 0.89]) for r in range(4)] == [8, 8, 8, 7]
    slow = pace_of(2)
    told(slow, [2.0, 1.0, 0.75, 0.01])
    assert [slow.reached() for _ in range(3)] == [2, 5, 8]
    assert (slow.reached(), slow.steps) == (8, 0)  # after a loop that ended within the period
    machines = Pace(2, Topology(4, 2), torch.device("cpu"), together=True)
    assert told(machines, [2.0, 1.0, 0.75, 0.5]) == 4  # each machine is as slow as its slowest rank


def test_a_period_that_is_too_short_for_a_rank_is_told_once(caplog):
    pace = pace_of(1, 2)
    for _ in range(2):
        told(pace, [8.0, 0.5])
    assert [record.getMessage() for record in caplog.records] == [
        'thinwire: pace="own": a step here takes longer than the 8 of the fastest rank in a period, so the others '
        "wait: take sync_every=16 or more"
    ]


def test_a_new_speed_counts_from_its_second_round_and_one_long_round_does_not(monkeypatch):
    pace, now = pace_of(0, 2), 0.0
    monkeypatch.setattr(pace_module, "clock", lambda: now)
    sent = []
    for seconds in (1, 1, 1, 9, 1, 1, 4, 4, 4):
        for _ in range(3):
            pace.left()
            now += seconds
            pace.stepped()
        sent.append(1 / float(next(pace.send()).tensor[0]))
    assert sent == [1, 1, 1, 1, 1, 1, 1, 4, 4]


@contextlib.contextmanager
def _steps_take(seconds):
    """What a rank measures of its steps."""
    ticks, real = itertools.count(), pace_module.clock
    pace_module.clock = lambda: seconds * next(ticks)
    try:
        yield
    finally:
        pace_module.clock = real


def _run(rank, options, total=TOTAL, at=None):
    """Train, with ``at``: half of it, then from a checkpoint in new objects. Return steps seen, and the weights."""
    seen = []

    def made(state=None):
        net = cases.model(dtype=torch.float64)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        sync = tw.attach(net, optimizer, "local", sync_every=8, pace="own", keep_dense="none",
                         start_compression_step=0, **options)  # fmt: skip
        if state is not None:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            sync.load_state_dict(state["sync"])
        return net, optimizer, sync

    net, optimizer, sync = made()
    for step in sync.steps(total):
        if at is not None and step >= at and sync.in_step:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
            state, at = copy.deepcopy(state), None
            sync.close()
            net, optimizer, sync = made(state)
            break
        seen.append(step)
        cases.down(cases.loss_of(net, rank, step, dtype=torch.float64), optimizer)
    for step in sync.steps(total) if sync.progress < 1 else ():
        seen.append(step)
        cases.down(cases.loss_of(net, rank, step, dtype=torch.float64), optimizer)
    assert sync.progress == 1
    note = sync.stats().note
    sync.finish()
    sync.close()
    return seen, cases.weights(net), note


def _together(rank, size):
    seconds = [1.0, 2.0, 1.05]
    with _steps_take(seconds[rank]):
        found = {name: _run(rank, options) for name, options in SETTINGS.items()}
        return found, _run(rank, SETTINGS["fragments, late"], at=9)


@pytest.fixture(scope="module")
def ranks():
    return run(_together, 3, seconds=240)


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_of_different_speed_follow_their_twins(ranks, name):
    """The same rounds in one process, in which a rank steps at the common numbers that it saw."""
    everyone = [found[name] for found, _ in ranks]
    full = list(range(TOTAL))
    late = "fragment_sync_delay" in SETTINGS[name]
    known = 16 if late else 8  # a speed that arrives within a period counts from the next
    assert [seen for seen, *_ in everyone] == [full, [*range(known), *range(known, TOTAL, 2)], full]
    assert "own pace: 4 of 8 steps" in everyone[1][2]
    nets = [cases.model(dtype=torch.float64) for _ in everyone]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    local = local_settings("local", {"sync_every": 8, "pace": "own", **SETTINGS[name]})
    twins = LocalRanks(local, [dict(net.named_parameters()) for net in nets], start=0)
    for step in range(TOTAL):
        for rank, (seen, *_) in enumerate(everyone):
            if step in seen:
                if local.look is not None:  # as far as in all the steps since its last
                    for fragment in twins.rounds[rank].fragments:
                        fragment.look(step - max((one for one in seen if one < step), default=-1))
                cases.down(cases.loss_of(nets[rank], rank, step, dtype=torch.float64), optimizers[rank])
        with torch.no_grad():
            twins.step()
    with torch.no_grad():
        twins.finish()
    for net, (_, weights, _) in zip(nets, everyone):
        for a, b in zip(net.parameters(), weights):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_resumed_run_goes_on_bit_for_bit(ranks):
    for found, resumed in ranks:
        seen, weights, _ = found["fragments, late"]
        assert resumed[0] == seen
        assert all(torch.equal(a, b) for a, b in zip(resumed[1], weights, strict=True))


def _equal(rank, size):
    def trained(**options):
        net = cases.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with tw.attach(net, optimizer, "local", sync_every=4, codec="int2", **options) as sync:
            for step in sync.steps(20):
                cases.down(cases.loss_of(net, rank, step), optimizer)
            sync.finish()
            return cases.weights(net), sync.stats().bytes_sent

    with _steps_take(1.0 + 0.05 * rank):
        return trained(), trained(pace="own")


def test_equal_machines_have_the_same_bits():
    for (common, sent), (own, sent_own) in run(_equal, 2, seconds=120):
        assert all(torch.equal(a, b) for a, b in zip(common, own, strict=True))
        assert sent_own - sent == 5 * 16  # a speed, and whether it has made steps, each round


def _machines(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    options = {"sync_every": 4, "inside": "ssgd", "topology": tw.Topology(4, 2)}
    with _steps_take([1, 1, 1, 4][rank]), tw.attach(net, optimizer, "local", pace="own", **options) as sync:
        seen = []
        for step in sync.steps(12):
            seen.append(step)
            cases.down(cases.loss_of(net, rank, step), optimizer)
        sync.finish()
    return seen, cases.weights(net)


def test_a_machine_keeps_the_pace_of_its_slowest_rank():
    everyone = run(_machines, 4, seconds=120)
    full, slow = list(range(12)), [0, 1, 2, 3, 4, 8]
    assert [seen for seen, _ in everyone] == [full, full, slow, slow]
    for _, weights in everyone:
        assert all(torch.equal(a, b) for a, b in zip(weights, everyone[0][1], strict=True))


def _without_steps(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with _steps_take(1.0), tw.attach(net, optimizer, "local", sync_every=4, pace="own") as sync:
        assert sync.progress == 0
        said = cases.said(lambda: cases.walk(net, optimizer, rank, 0, 1))
        at = []
        for step in sync.steps(8):
            at.append((step, sync.in_step, cases.said(sync.state_dict)))
            cases.walk(net, optimizer, rank, step, step + 1)
    return said, at


def test_the_loop_has_to_take_its_steps_from_it():
    for said, at in run(_without_steps, 2, seconds=60):
        assert 'RuntimeError: pace="own": take the steps of the loop from `for step in sync.steps(total)`' in said
        assert [(step, here) for step, here, _ in at] == [(step, step % 4 == 0) for step in range(8)]
        assert all(bool(refused) != here for _, here, refused in at)
        assert "save where sync.in_step is true" in at[1][2]


def _totals(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with _steps_take([1.0, 3.0][rank]), tw.attach(net, optimizer, "local", sync_every=4, pace="own") as sync:
        said = cases.said(lambda: sync.steps(20 + rank))
        for step in sync.steps(22):
            cases.walk(net, optimizer, rank, step, step + 1)
        saved = sync.state_dict() if sync.in_step else {}
        sync.finish()
        return said, sorted(key for key in saved if key.startswith("pace/")), bool(sync.state_dict())


def test_totals_are_equal_and_the_end_can_be_saved_within_a_period():
    for rank, (said, saved, again) in enumerate(run(_totals, 2, seconds=60)):
        assert said == "Disagreement: rank 1 differs from rank 0: steps: total: 20 against 21"
        assert saved == [f"pace/{rank}"]
        assert again


def test_refusals():
    from thinwire.adapters.ddp_module import chosen

    with pytest.raises(ValueError, match="pace='fast'"):
        local_settings("local", {"pace": "fast"})
    with pytest.raises(ValueError, match="does not follow the learning rate"):
        local_settings("local", {"pace": "own", "sync_every": tw.QSR(0.02)})
    with pytest.raises(ValueError, match="a slow rank would wait for each fragment"):
        local_settings("local", {"pace": "own", "sync_every": 8, "fragments": 2})
    with pytest.raises(ValueError, match="here the framework counts them"):
        chosen("local", pace="own", sync_every=4)


def test_one_rank_alone_counts_steps_too():
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, "local", pace="own") as sync:
        seen = []
        for step in sync.steps(5):
            seen.append((step, sync.progress))
            cases.walk(net, optimizer, 0, step, step + 1)
        assert seen == [(0, 0.0), (1, 0.2), (2, 0.4), (3, 0.6), (4, 0.8)]
        with pytest.raises(ValueError, match="steps: total"):
            sync.steps(0)
        sync.steps(2)
        assert sync.progress == 1
        with pytest.raises(RuntimeError, match="100 turns of the loop over steps"):
            list(sync.steps(6))
