"""``fusion="tune"`` on real ranks: every plan on all of them, the slowest decides, and no bit of training changes."""

import logging

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import Costs
from thinwire.engine.controller import pilot
from thinwire.predict.measure.kernels import Stopwatch

pytestmark = pytest.mark.dist

SLOW = Costs.of_link(100e6, 200e-6, 2)
MOST = 11 + 12 * 8 + 1  # until the planner's plan; 8 plans and 2 twice more, 8 steps each; the decoupled last change


def _train(rank, method, *, steps=None, seconds=None, plan=None):
    """Until the tuner is done, or so many steps; with ``seconds`` of (rank, buckets) on a clock of that."""
    net = cases.model(width=16, depth=6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sync = tw.attach(net, optimizer, method, detect_desync=seconds is None, plan=plan, costs=SLOW)
    try:
        return net, sync, _loop(rank, net, sync, optimizer, steps, seconds)
    except ValueError:
        sync.close()
        raise


def _loop(rank, net, sync, optimizer, steps, seconds):
    now, hashes, step = [0.0], [], 0
    if seconds is not None:
        sync.services.controller.timings.stopwatch = Stopwatch(torch.device("cpu"), lambda: now[0])
    while step < steps if steps else not sync.stats().settled:
        buckets = len(sync.plan.phases[0])
        cases.down(cases.loss_of(net, rank, step, width=16), optimizer)
        now[0] += seconds(rank, buckets) if seconds else 0.0
        hashes.append(sync.plan.hash)
        step += 1
        assert step <= MOST
    return hashes


def _few(rank, buckets):
    return 0.1 + 0.01 * buckets


def _many(rank, buckets):
    """As before, but rank 1 wants many buckets, and is the slower one."""
    return _few(rank, buckets) if rank == 0 else 0.2 + 0.4 / buckets


def _chosen(rank, size):
    found = []
    for seconds in (_few, _many):
        lines, handler = [], logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        logger = logging.getLogger("thinwire")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            _, sync, hashes = _train(rank, tw.SSGD(fusion="tune"), seconds=seconds)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        found.append((len(sync.plan.phases[0]), hashes, sync.stats().why, lines))
        sync.close()
    return found


def test_the_slowest_rank_decides_and_all_follow():
    results = run(_chosen, 2)
    for few, many in results:
        assert few[0] == 1
        assert many[0] >= 7
        assert "took" in many[2][1]
        assert "noise" in many[2][1]
    for (buckets, hashes, why, lines), (others, same, because, silence) in zip(*results):
        assert (buckets, hashes, why) == (others, same, because)
        assert not silence
        trials = [line for line in lines if line.startswith("tune: trial ")]
        assert why == tuple(lines[-2:])
        assert f"in {len(trials)} trials" in why[0]
        assert len(trials) == (len(hashes) - 11) / 8
        assert 2 < len(set(hashes[10:])) <= 8


METHODS = [
    (tw.SSGD(deterministic=True, fusion="tune"), tw.SSGD(deterministic=True, fusion="single")),
    (tw.DeAR(fusion="tune"), tw.SSGD(deterministic=True, fusion="none")),
    (tw.Cast("bf16", decoupled=True, fusion="tune"), tw.Cast("bf16", deterministic=True, fusion=1)),
]
OTHERS = [tw.ACP(rank=2, min_rate=1.0, decoupled=True, fusion="tune"), tw.TopK(0.2, fusion="tune")]


def _twins(rank, size):
    found = []
    for tuned, fixed in METHODS:
        net, sync, hashes = _train(rank, tuned)
        if sync.pending:
            sync.synchronize()
        pinned = tw.Plan.from_json(sync.plan.to_json())
        found.append((hashes, sync.stats().why))
        sync.close()
        assert len(set(hashes)) > 2, "the plan was never changed"
        twin, other, _ = _train(rank, fixed, steps=len(hashes))
        other.close()
        for a, b in zip(cases.weights(net), cases.weights(twin)):
            assert torch.equal(a, b), tuned.name
        _, again, under = _train(rank, tuned, steps=2, plan=pinned)
        assert again.stats().settled
        assert set(under) == {pinned.hash}
        again.close()
    return found


def test_a_trajectory_is_that_of_a_fixed_plan():
    first, second = run(_twins, 2)
    assert first == second
    assert all(len(why) == 2 for _, why in first)


def _others(rank, size):
    """Two phases and a residual; a selection: plans change, and ranks and residuals do not part."""
    found = []
    for method in OTHERS:
        net, sync, hashes = _train(rank, method)
        if sync.pending:
            sync.synchronize()
        found.append((hashes, sync.stats().why, len(sync.plan.phases) == method.phases, cases.weights(net)))
        sync.close()
    return found


@pytest.mark.slow
def test_methods_with_phases_and_residuals():
    for (hashes, why, phases, weights), (same, because, _, others) in zip(*run(_others, 2)):
        assert len(set(hashes)) > 2
        assert (hashes, why) == (same, because)
        assert phases
        assert all(torch.equal(a, b) for a, b in zip(weights, others))


class _Garbled(tw.Plan):
    @classmethod
    def from_json(cls, text):
        return tw.Plan.of([tw.Plan.from_json(text).names()])


def _differ(rank, size):
    before = pilot.Plan
    pilot.Plan = _Garbled if rank == 1 else before
    try:
        _train(rank, tw.SSGD(fusion="tune"), seconds=_many)
    except ValueError as error:
        return str(error)
    finally:
        pilot.Plan = before


def test_ranks_that_would_run_different_plans_say_so():
    for message in run(_differ, 2):
        assert "rank 1 differs from rank 0: plan" in message


def _adaptive(rank, size):
    """Settled; then steps take no time at all on the clock, which is not what was measured."""
    before, pilot.WATCH_STEPS = pilot.WATCH_STEPS, 6
    try:
        net, sync, _ = _train(rank, tw.SSGD(fusion="tune"), seconds=_few, plan="adaptive")
    finally:
        pilot.WATCH_STEPS = before
    settled = sync.stats().settled, sync.services.controller.decisions
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    _loop(rank, net, sync, optimizer, 6 + 8, None)
    sync.close()
    return settled, (sync.stats().settled, sync.services.controller.decisions)


def test_adaptive_tunes_again():
    assert run(_adaptive, 2) == [((True, 1), (False, 2))] * 2
