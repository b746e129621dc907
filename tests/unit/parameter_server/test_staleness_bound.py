"""No gradient is applied more than S versions late, none twice, and nothing stalls."""

import pytest
from chaos import Chaos
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.parameter_server.effects import Start
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import IterationNumber, Pull, Weights, Welcome
from thinwire.systems.parameter_server.presets import bsp, inhad, n_softsync, ssp
from thinwire.systems.parameter_server.server import Member
from thinwire.systems.parameter_server.settings import UNBOUNDED, Settings
from thinwire.systems.parameter_server.virtual import simulate


def pushed(limit):
    return Settings(transfer="push", update_every=3, max_staleness=limit)


@given(
    seed=st.integers(0, 2**32),
    limit=st.sampled_from([0, 1, 2, 4, None]),
    nodes=st.integers(1, 6),
    workers=st.integers(1, 4),
    n=st.sampled_from([1.0, 2.0, 6.0]),
    far=st.booleans(),
    kill=st.sampled_from([0.0, 0.003]),
    bad=st.sampled_from([0.0, 0.1]),
    push=st.booleans(),
    instances=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_bound_under_random_events(seed, limit, nodes, workers, n, far, kill, bad, push, instances):
    options = pushed(limit) if push else inhad(limit, f"nodes/{n}")
    chaos = Chaos(options, nodes, workers, seed, far=0 if far else None, slow=nodes - 1, kill=kill, bad=bad,
                  instances=instances)  # fmt: skip
    chaos.run(1200)
    chaos.settle(updates=3)


@pytest.mark.parametrize(("limit", "seed"), [(0, 0), (1, 0), (1, 5), (2, 0), (4, 1), (4, 3)])
def test_bound_with_one_node_far_away_and_one_slow(limit, seed):
    """Drawn so that it breaks without running bases, grants in flight, the older of them, sequences or old buffers."""
    Chaos(inhad(limit, "nodes/2", start_nodes=4), 4, 3, seed, far=0, slow=1).run(4000)


@pytest.mark.parametrize("workers", [1, 3])
def test_s_0_takes_each_workers_gradient_once_per_update(workers):
    chaos = Chaos(bsp(start_nodes=4), 4, workers, 7, far=1, slow=2).run(6000)
    assert len(chaos.updates) > 20
    for version, parts in chaos.updates:
        keys = [(part.node, row.worker) for part in parts for row in part.rows]
        assert sorted(keys) == [(n, w) for n in range(4) for w in range(workers)]
        assert {row.base for part in parts for row in part.rows} == {version}


def test_a_silent_node_is_dropped_after_its_lease_and_the_others_go_on():
    chaos = Chaos(bsp(start_nodes=3, lease_seconds=9.0), 3, 1, 1).run(300)
    before = len(chaos.updates)
    gone = chaos.nodes.pop(1)  # as if stopped: nothing more comes from it, no connection breaks
    chaos.run(400)
    assert len(chaos.updates) > before + 10
    assert gone.leader.node not in {member.node for member in chaos.server.members.values()}


@pytest.mark.parametrize("push", [False, True])
def test_a_worker_that_comes_late_does_not_start_on_weights_that_the_server_takes_for_done(push):
    leader = Leader(pushed(0) if push else bsp(), 0, 2)
    leader.alive.discard(1)
    leader.join(0.0)
    leader.on(Welcome(5, 3), 0.0)
    (start,) = [e for e in leader.on(Weights(5, 3, 1, UNBOUNDED, 1), 0.0) if isinstance(e, Start)]
    leader.done(0, start.token, None, 0.1)
    assert leader.report(0.2).low == UNBOUNDED  # the server may make version 4 now
    assert not [e for e in leader.returned(1, 0.3) if isinstance(e, Start)]
    if not push:
        leader.on(Pull(5, 1, 4), 0.35)
    started = [e.worker for e in leader.on(Weights(5, 4, 2, UNBOUNDED, 1, ack=1), 0.4) if isinstance(e, Start)]
    assert started == [0, 1]


def test_an_old_iteration_number_changes_no_row():
    member = Member(1, 0, 1, 0.0)
    member.note(IterationNumber(1, 5, 9, 3, 3, 0))
    member.note(IterationNumber(1, 4, 7, 1, 1, 0))
    assert (member.seen, member.low, member.buf_low) == (9, 3, 3)


def pushed_by_all(unit, limit):
    return Settings(transfer="push", update_every=unit, max_staleness=limit)


@pytest.mark.parametrize(
    "options",
    [
        inhad(4), inhad(2, "nodes"), bsp(), pushed(2), pushed_by_all("workers", 0),
        pushed_by_all("nodes", None), ssp(),
    ],
    ids=["inhad", "nodes", "bsp", "push", "push-0", "push-all", "ssp"],
)  # fmt: skip
@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_waits_for_ever_for_a_worker_that_lives_and_hangs(options, workers):
    def hangs(node, worker, step, rng):
        return 2000.0 if (node, step) == (1, 2) and worker == 0 else 1.0

    trace = simulate(options, nodes=3, workers=workers, updates=60, step_seconds=hangs)
    assert len(trace.updates) == 60
    assert trace.seconds < 120  # some 60 updates of one or two seconds, and a lease or two
    assert max(trace.staleness()) <= options.bound


@pytest.mark.parametrize("options", [inhad(4), bsp(), pushed(2)], ids=["inhad", "bsp", "push"])
def test_a_node_far_slower_than_a_lease_is_waited_for_once_it_has_shown_what_it_takes(options):
    """Only its first gradient, which came after nobody waited any more, is too old."""
    trace = simulate(options, nodes=3, updates=60, step_seconds=lambda node, *_: 30.0 if node == 1 else 1.0)
    assert trace.counters["stale"] == 1
    gaps = {step for _, _, rows in trace.updates for node, _, step, _ in rows if node == 1}
    assert gaps == set(range(1, 1 + len(gaps)))
    assert len(gaps) > 5
    assert max(trace.staleness()) <= options.bound


@pytest.mark.slow
def test_a_million_events():
    events = 0
    for seed in range(40):
        limit = (0, 1, 2, 4)[seed % 4]
        for options in (inhad(limit), inhad(limit, "nodes"), pushed(limit), n_softsync(2.0, max_staleness=limit)):
            chaos = Chaos(options, 2 + seed % 5, 1 + seed % 3, seed, far=seed % 2, slow=1, kill=0.001, bad=0.1)
            events += chaos.run(6300).events
            assert len(chaos.updates) > 5
    assert events >= 1_000_000
