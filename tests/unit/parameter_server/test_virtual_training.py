"""Training in virtual time against plain SGD: bit for bit where the protocol promises it, and its accounting."""

import math
import random
import re
from itertools import pairwise

import pytest
import torch

from thinwire.systems.parameter_server import Fault, Journal, Link, replay, simulate
from thinwire.systems.parameter_server.effects import Contribution
from thinwire.systems.parameter_server.journal import JournalWriter
from thinwire.systems.parameter_server.messages import Row
from thinwire.systems.parameter_server.outer import DelayedNesterov, FlatWeights
from thinwire.systems.parameter_server.presets import (
    asp,
    async_local_sgd,
    bsp,
    delayed_nesterov,
    diloco,
    inhad,
    local,
    n_softsync,
    ssp,
)
from thinwire.systems.parameter_server.settings import alpha

D = 12
TARGET = torch.linspace(-1, 1, D)
SCALES = torch.linspace(0.2, 1.0, D)


def gradient(theta, node, worker, step):
    """Of a quadratic, with noise that depends on (node, worker, step) alone."""
    draw = torch.Generator().manual_seed(1_000_003 * step + 7919 * node + 31 * worker)
    return SCALES.to(theta.dtype) * (theta - TARGET.to(theta.dtype)) + 0.1 * torch.randn(D, generator=draw)


def uneven(node, worker, step, rng):
    return (4.0 if node == 1 else 1.0) * rng.lognormvariate(0, 0.3)


def equal(node, worker, step, rng):
    return 1.0


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **{"lr": 0.1, **options})


def start(dtype=torch.float32):
    return torch.linspace(2, 3, D, dtype=dtype)


def written(path, settings, trace):
    """The file of a run's journal."""
    writer = JournalWriter(path, settings, {"a": 1})
    for update in trace.journal.updates:
        writer.write(update)
    writer.close()
    return path


def by_hand(trace, mean):
    """Plain SGD with what each update of a run took: ``mean``: (weights by version, version, rows) -> gradient."""
    history = [start()]
    for version, _, rows in trace.updates:
        theta = history[-1].clone()
        theta.grad = mean(history, version, rows)
        torch.optim.SGD([theta], lr=0.1).step()
        history.append(theta.detach())
    return history[-1]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, inhad(0, "nodes")),
        ({"momentum": 0.9}, bsp(deterministic=True)),
        ({"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, bsp()),
    ],
    ids=["plain", "momentum", "nesterov"],
)
def test_one_worker_at_s_0_is_torch_sgd_bit_for_bit(options, settings):
    trace = simulate(settings, nodes=1, updates=200, step_seconds=uneven, parameters=start(), gradient=gradient,
                     outer=sgd(**options))  # fmt: skip
    theta = start()
    optimizer = torch.optim.SGD([theta], **{"lr": 0.1, **options})
    for step in range(200):
        theta.grad = gradient(theta, 0, 0, step)
        optimizer.step()
    assert torch.equal(trace.parameters, theta)
    assert set(trace.staleness()) == {0}


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (3, 2), (4, 4)])
def test_s_0_is_synchronous_sgd_bit_for_bit(nodes, workers):
    settings = bsp(start_nodes=nodes, deterministic=True)
    trace = simulate(settings, nodes=nodes, workers=workers, updates=60, step_seconds=uneven, parameters=start(),
                     gradient=gradient, outer=sgd(momentum=0.9),
                     link=lambda n: Link(0.5 if n == 0 else 0.001))  # fmt: skip
    theta = start()
    optimizer = torch.optim.SGD([theta], lr=0.1, momentum=0.9)
    for step in range(60):
        total = torch.zeros(D, dtype=torch.float64)
        for node in range(nodes):  # each node's sum, then theirs: the order is part of the bits
            mine = torch.zeros(D, dtype=torch.float64)
            for worker in range(workers):
                mine += gradient(theta, node, worker, step).double()
            total += mine
        theta.grad = (total / (nodes * workers)).float()
        optimizer.step()
    assert torch.equal(trace.parameters, theta)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_one_worker_above_s_0_is_delayed_sgd_as_the_journal_says(limit):
    settings = inhad(limit, "nodes")
    trace = simulate(settings, nodes=1, updates=80, step_seconds=equal, link=Link(0.7), parameters=start(),
                     gradient=gradient, outer=sgd())  # fmt: skip

    def mean(history, version, rows):
        total = None
        for base in sorted({row[3] for row in rows}):
            part = None
            for _, worker, step, _ in [row for row in rows if row[3] == base]:
                g = gradient(history[base], 0, worker, step)
                part = g if part is None else part + g
            weight = 1.0 / max(version - base, 1)
            part = part if weight == 1.0 else part * weight
            total = part if total is None else total + part
        return total / len(rows)

    torch.testing.assert_close(trace.parameters, by_hand(trace, mean), rtol=1e-6, atol=1e-7)
    assert max(len(rows) for _, _, rows in trace.updates) > 1
    assert max(trace.staleness()) <= limit


def test_asp_with_one_worker_each_is_plain_asp_bit_for_bit():
    trace = simulate(
        asp(), nodes=4, updates=200, step_seconds=uneven, parameters=start(), gradient=gradient, outer=sgd()
    )

    def alone(history, version, rows):
        ((node, worker, step, base),) = rows
        return gradient(history[base], node, worker, step)

    assert torch.equal(trace.parameters, by_hand(trace, alone))
    assert max(trace.staleness()) > 2


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_n_softsync_takes_exactly_c_and_is_about_n_versions_late(n):
    def steps(node, worker, step, rng):
        return rng.lognormvariate(0, 0.2)

    trace = simulate(n_softsync(float(n)), nodes=8, updates=400, step_seconds=steps)
    assert {len(rows) for _, _, rows in trace.updates} == {8 // n}
    ages = trace.staleness()
    mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
    assert mean <= 1.1 * n
    assert n == 1 or mean >= 0.7 * n


@pytest.mark.parametrize(("clock_limit", "far"), [(0, 3.0), (1, 0.0), (3, 3.0)])
def test_ssp_keeps_clocks_together_and_promises_what_is_read(clock_limit, far):
    def steps(node, worker, step, rng):
        return 8.0 if node == 1 else 1.0

    trace = simulate(ssp(clock_limit, start_nodes=4), nodes=4, updates=200, step_seconds=steps,
                     link=lambda n: Link(far if n == 2 else 0.001))  # fmt: skip
    clocks, when = [0] * 4, {}
    for version, _, rows in trace.updates:
        for node, _, step, base in rows:
            assert step == clocks[node]
            clocks[node] += 1
            when[node, step] = version
            assert max(clocks) - min(clocks) <= clock_limit + 1
            for other in range(4):
                read = step - clock_limit - 1
                assert read < 0 or when[other, read] < base, "an update that the bound promises was not read"


def test_ssp_0_with_sgd_is_synchronous_with_the_sum():
    fast = simulate(ssp(0, start_nodes=3), nodes=3, updates=60, step_seconds=uneven, outer=sgd(lr=0.02),
                    parameters=start(torch.float64), gradient=gradient)  # fmt: skip
    theta = start(torch.float64)
    for step in range(20):
        theta = theta - 0.02 * sum(gradient(theta, node, 0, step) for node in range(3))
    torch.testing.assert_close(fast.parameters, theta, rtol=1e-12, atol=1e-12)


def test_diloco_with_rate_1_and_no_momentum_averages_parameters():
    settings = diloco(steps=5, start_nodes=3)
    trace = simulate(settings, nodes=3, updates=8, step_seconds=uneven, parameters=start(torch.float64),
                     gradient=gradient, outer=sgd(lr=1.0), inner=sgd(lr=0.1))  # fmt: skip
    theta = start(torch.float64)
    for outer in range(8):
        ends = []
        for node in range(3):
            x = theta.clone()
            for i in range(5):
                x = x - 0.1 * gradient(x, node, 0, 5 * outer + i)
            ends.append(x)
        theta = sum(ends) / 3
    torch.testing.assert_close(trace.parameters, theta, rtol=1e-12, atol=1e-12)
    assert {len(rows) for _, _, rows in trace.updates} == {3}


def test_balanced_local_steps_let_all_workers_take_as_long():
    ends = {}

    def steps(node, worker, step, rng):
        ends[node] = ends.get(node, 0) + 1
        return 4.0 if node == 1 else 1.0

    trace = simulate(delayed_nesterov(8), nodes=2, updates=60, step_seconds=steps)
    counts = [sum(row[0] == node for _, _, rows in trace.updates[20:] for row in rows) for node in range(2)]
    assert abs(counts[0] - counts[1]) <= 3  # as many submissions, of four times fewer steps
    assert ends[0] > 3 * ends[1]


def test_delayed_nesterov_without_momentum_is_plain_steps_and_a_full_period_is_one_nesterov_step():
    plain, reference = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    optimizer = DelayedNesterov([plain], lr=0.5, beta=0.0, period=4, activation=0.1)
    for step in range(9):
        plain.grad = torch.full((3,), 1.0 + step, dtype=torch.float64)
        reference -= 0.5 / 4 * plain.grad
        optimizer.step()
    torch.testing.assert_close(plain, reference, rtol=1e-12, atol=1e-12)

    theta, other = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    delayed = DelayedNesterov([theta], lr=0.5, beta=0.9, period=4)
    nesterov = torch.optim.SGD([other], lr=0.5, momentum=0.9, nesterov=True)
    for step in range(5):
        delta = torch.full((3,), 1.0 + step, dtype=torch.float64)
        for _ in range(4):
            theta.grad = delta
            delayed.step()
        other.grad = delta
        nesterov.step()
        torch.testing.assert_close(theta, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stale", [0, 3])
def test_a_quadratic_converges_below_the_bound_of_its_staleness_and_diverges_above(stale):
    # x' = x - lr * x(t - tau) is stable for lr < 2 sin(pi / (2 (2 tau + 1))); one node at S = tau, updates back to back
    bound = 2 * math.sin(math.pi / (2 * (2 * stale + 1)))

    def pull(theta, node, worker, step):
        return theta.clone()

    def end(lr):
        settings = asp()
        nodes = stale + 1  # round robin: each gradient is tau versions old
        trace = simulate(settings, nodes=nodes, updates=400, parameters=torch.ones(1, dtype=torch.float64),
                         gradient=pull, outer=sgd(lr=lr), link=Link(0.0),
                         step_seconds=lambda n, w, s, rng: nodes + (n / nodes) * (s == 0))  # fmt: skip
        assert trace.staleness()[stale] > 380
        return float(trace.parameters.abs())

    assert end(0.9 * bound) < 1e-2
    assert end(1.1 * bound) > 1e2


def test_no_update_waits_longer_than_a_lease_and_the_slowest_step():
    faults = [Fault(10.0 + 7 * i, "pause", i % 3, for_seconds=5.0) for i in range(5)]
    trace = simulate(bsp(start_nodes=3, lease_seconds=2.0), nodes=3, seconds=60.0, step_seconds=equal, faults=faults)
    times = [at for _, at, _ in trace.updates]
    assert max(b - a for a, b in pairwise(times)) < 2.0 + 0.2 + 1.0 + 0.1


def test_a_straggler_delays_s_0_and_not_a_large_bound():
    def rate(settings, slow):
        def steps(node, worker, step, rng):
            return (slow if node == 0 else 1.0) * rng.lognormvariate(0, 0.2)

        trace = simulate(settings, nodes=16, seconds=100.0, link=Link(0.001), step_seconds=steps)
        return len(trace.updates) / 100

    assert rate(bsp(start_nodes=16), 10.0) == pytest.approx(0.1, rel=0.1)
    assert rate(inhad(64, start_nodes=16), 10.0) > rate(inhad(64, start_nodes=16), 1.0) / 1.2


def ADAMW(params):
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.parametrize(
    "settings",
    [inhad(3, deterministic=True), bsp(), asp(), ssp(1), async_local_sgd(3)],
    ids=["inhad", "bsp", "asp", "ssp", "local"],
)
def test_a_recorded_run_is_replayed_bit_for_bit(tmp_path, settings):
    nodes, workers = (3, 2) if settings.deterministic else (2, 1)
    trace = simulate(settings, nodes=nodes, workers=workers, updates=60, step_seconds=uneven, parameters=start(),
                     gradient=gradient, outer=sgd(momentum=0.5), inner=ADAMW)  # fmt: skip
    journal = Journal.read(written(tmp_path / "journal", settings, trace))
    assert journal.updates == trace.journal.updates
    assert journal.settings == settings
    again = replay(journal, start(), gradient, sgd(momentum=0.5), inner=ADAMW)
    assert torch.equal(again, trace.parameters)


def test_a_journal_that_a_kill_cut_off_keeps_its_whole_lines_and_a_foreign_file_is_refused(tmp_path):
    trace = simulate(bsp(), nodes=2, updates=5, step_seconds=equal)
    path = written(tmp_path / "journal", bsp(), trace)
    path.write_text(path.read_text()[:-9])
    assert len(Journal.read(path).updates) == 4
    JournalWriter(path, bsp(), {"a": 1}, version=3).close()
    assert [update.version for update in Journal.read(path).updates] == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]
    whole = path.read_bytes()
    (tmp_path / ".partial-journal").mkdir()  # so that its new beginning cannot be written
    with pytest.raises(ValueError, match=re.escape(f"the journal {path} cannot be written")):
        JournalWriter(path, bsp(), {"a": 1}, version=2)
    assert path.read_bytes() == whole


SPOILED = [b"what?\n", b"", b"\xff\xfe\n", b"[]\n", b"5\n", b"[" * 100_000 + b"\n", b'{"settings": 5, "facts": {}}\n']


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = written(tmp_path / "journal", bsp(), simulate(bsp(), nodes=1, updates=2, step_seconds=equal))
    contents = [*SPOILED]
    head, first, second = path.read_text().splitlines()
    for line in ("5", "{}", '{"version": 1e999, "at": 0, "parts": []}', first.replace("[[", "[", 1)):
        contents.append(f"{head}\n{line}\n{second}\n".encode())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="/journal is not a journal"):
            Journal.read(path)


def test_a_journal_with_a_gap_is_not_replayed():
    trace = simulate(bsp(), nodes=1, updates=5, step_seconds=equal, parameters=start(), gradient=gradient, outer=sgd())
    journal = Journal(trace.journal.settings, {}, (*trace.journal.updates[:2], *trace.journal.updates[3:]))
    with pytest.raises(ValueError, match="lacks the update that made version 3"):
        replay(journal, start(), gradient, sgd())


def test_no_more_pushes_wait_for_a_full_link_than_there_are_workers():
    trace = simulate(asp(), nodes=4, workers=4, seconds=60.0, step_seconds=equal, payload_bytes=40_000_000,
                     link=Link(0.0005, 1e9), server_link=Link(0.0005, 1e9))  # fmt: skip
    assert max(trace.staleness()) < 2 * 16
    assert trace.bytes_per_gradient < 1.3 * 80_000_000  # the last ones are still on their way


def test_equal_seeds_give_equal_runs():
    runs = [simulate(inhad(2), nodes=5, workers=2, updates=50, step_seconds=uneven, seed=s).updates for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("settings", "shards"), [(inhad(2), 2), (inhad(4, "nodes"), 0), (bsp(), 2), (bsp(), 0), (asp(), 2), (ssp(1), 0)]
)
def test_jitter_of_a_link_keeps_the_messages_of_a_connection_in_order(settings, shards):
    """Weights that came before the WELCOME, or a fence after the weights, left a node without work for good."""
    link = Link(0.01, 1e9, lambda rng: rng.expovariate(1 / 0.5))
    trace = simulate(settings, nodes=3, workers=2, updates=60, seconds=3000.0, step_seconds=uneven, link=link,
                     payload_bytes=1000, faults=[Fault(20.0, "cut", 1)], shards=shards)  # fmt: skip
    assert len(trace.updates) == 60
    assert settings.max_staleness is None or max(trace.staleness()) <= settings.max_staleness
    again = simulate(settings, nodes=1, updates=20, seconds=3000.0, step_seconds=equal, link=link, shards=shards)
    assert len(again.updates) == 20


def test_submissions_that_are_not_finite_are_counted_while_their_node_lives():
    def spoiled(theta, node, worker, step):
        return gradient(theta, node, worker, step) * (float("nan") if node == 1 and step % 2 else 1.0)

    trace = simulate(bsp(), nodes=2, updates=20, step_seconds=equal, parameters=start(), gradient=spoiled, outer=sgd())
    assert trace.counters["not_finite"] == 10
    assert not trace.counters["left"]
    faults = [Fault(4.5, "cut", 1)]
    trace = simulate(bsp(), nodes=2, updates=20, step_seconds=equal, parameters=start(), gradient=spoiled, outer=sgd(),
                     faults=faults)  # fmt: skip
    assert trace.counters["left"] == 1
    assert trace.parameters.isfinite().all()
    assert 8 <= trace.counters["not_finite"] <= 11


def rounds_by_hand(trace, settings, steps):
    """Of local steps of SGD, from who took part in which round: a change counts by the factor of its age."""
    theta, history = start(torch.float64), []
    for version, _, rows in trace.updates:
        history.append(theta)
        total = torch.zeros_like(theta)
        for node, worker, step, base in rows:
            x = history[base].clone()
            for i in range(steps):
                x = x - 0.1 * gradient(x, node, worker, steps * step + i)
            total += alpha(settings.alpha, version - base) * (x - history[base])
        theta = theta + total / max(1, len(rows))
    return theta


@pytest.mark.parametrize("rule", ["inverse", "reciprocal"])
def test_rounds_of_a_quorum_are_those_by_hand_also_with_late_changes(rule):
    settings = local(4, quorum=2, grace=0.3, codec=None, compress_down=None, robust=None, balance=False, alpha=rule,
                     start_nodes=4)  # fmt: skip
    faults = [Fault(40.0, "pause", 2, for_seconds=9.0), Fault(80.0, "kill", 3), Fault(95.0, "return", 3)]
    trace = simulate(settings, nodes=4, updates=60, step_seconds=uneven, parameters=start(torch.float64),
                     gradient=gradient, inner=sgd(lr=0.1), faults=faults)  # fmt: skip
    assert len(trace.updates) == 60
    assert set(trace.staleness()) >= {0, 1, 2}
    assert trace.gradients == sum(trace.staleness().values())
    torch.testing.assert_close(trace.parameters, rounds_by_hand(trace, settings, 4), rtol=1e-10, atol=1e-10)


def test_a_node_that_stands_still_costs_one_grace_once():
    settings = local(4, quorum=2, grace=2.0, start_nodes=3, lease_seconds=40.0)
    trace = simulate(settings, nodes=3, seconds=200.0, step_seconds=equal,
                     faults=[Fault(50.0, "pause", 2, for_seconds=30.0)])  # fmt: skip
    took = [later - earlier for (_, earlier, _), (_, later, _) in pairwise(trace.updates)]
    assert sum(seconds > 4.5 for seconds in took) == 1  # a round is four steps of a second
    assert max(took) < 4.0 + 2.0 + 4.5  # and the server looks ten times a lease
    assert 0 < max(trace.staleness()) <= 8
    assert trace.counters["left"] == 0


def test_one_that_waits_goes_on_although_too_few_for_a_quorum_still_move():
    settings = local(4, quorum=2, grace=0.5, start_nodes=4, lease_seconds=20.0)
    pauses = [Fault(50.0, "pause", node, for_seconds=40.0) for node in (1, 2, 3)]
    trace = simulate(settings, nodes=4, seconds=120.0, step_seconds=equal, faults=pauses, payload_bytes=100_000)
    times = [at for _, at, _ in trace.updates]
    most = 4.0 + 2.0 + 0.5 + 2.0  # a round, half of one, the grace; and the server looks every two seconds
    assert max(later - earlier for earlier, later in pairwise(times)) < most
    assert [len(rows) for _, at, rows in trace.updates if 60.0 < at < 85.0].count(1) > 4
    assert [len(rows) for _, _, rows in trace.updates][-4:] == [4] * 4


def test_the_automatic_grace_follows_who_comes_later():
    def steps(node, worker, step, rng):
        return 1.0 + 0.15 * node

    settings = local(4, quorum=2, start_nodes=4, balance=False)
    trace = simulate(settings, nodes=4, seconds=400.0, step_seconds=steps)
    counts = [len(rows) for _, _, rows in trace.updates]
    assert counts[-20:] == [4] * 20
    assert {0} == {version - base for version, _, rows in trace.updates[-20:] for *_, base in rows}


def test_a_change_that_is_too_long_or_not_finite_is_cut_and_counted():
    weights = FlatWeights(start(), lambda params: torch.optim.SGD(params, lr=1.0), local(4))
    row = Row(0, 0, 0, 1)

    def update(*changes):
        before = weights.theta.clone()
        weights.apply([Contribution(k, 10 + k, (row,), 1.0, torch.full((D,), x)) for k, x in enumerate(changes)])
        return before - weights.theta

    for _ in range(3):
        torch.testing.assert_close(update(0.1, 0.1, 0.1), torch.full((D,), 0.1))
    torch.testing.assert_close(update(0.1, 0.1, 1e6), torch.full((D,), (0.1 + 0.1 + 0.3) / 3))
    torch.testing.assert_close(update(0.1, math.nan, 0.1), torch.full((D,), 0.2 / 3))
    torch.testing.assert_close(update(0.1, -math.inf, 0.2), torch.full((D,), 0.1))
    assert weights.clip.cut == {12: 1, 11: 2}


def test_a_link_on_which_nobody_ever_joins_ends_in_a_sentence():
    settings, wire = local(8, lease_seconds=1000.0), Link(0.001, 1e4)
    with pytest.raises(ValueError, match=r"no update in 100000 s: is the link too slow"):
        simulate(settings, nodes=2, updates=3, step_seconds=equal, link=wire, server_link=wire, payload_bytes=4_000_000)


def drawn_faults(rng, nodes, seconds):
    """Deaths with a return, pauses, and cut connections, one after another."""
    at, found = 5.0, []
    while (at := at + rng.expovariate(1 / 8)) < seconds:
        kind, node = rng.choice(["kill", "pause", "cut"]), rng.randrange(nodes)
        found.append(Fault(at, kind, node, for_seconds=rng.uniform(0.1, 20)))
        if kind == "kill":
            at += rng.uniform(0.0, 15)
            found.append(Fault(at, "return", node))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_drawn_faults_leave_rounds_as_by_hand(seed):
    """The server as the fuzzer would have it: whoever dies, stands still or comes back, each change counts once."""
    rng = random.Random(seed)
    nodes, every = rng.randint(1, 5), rng.choice([1, 2, 4, 7])
    settings = local(
        every, rng.choice([1, nodes, "nodes/2"]), rng.choice(["auto", 0.0, 0.2, 3.0]), codec=None, compress_down=None,
        robust=None, balance=False, alpha=rng.choice(["inverse", "reciprocal"]), start_nodes=rng.randint(1, nodes),
        lease_seconds=rng.choice([2.0, 10.0, 40.0]),
    )  # fmt: skip
    wire = Link(
        rng.choice([0.0005, 0.3]), rng.choice([None, 1e6]), rng.choice([None, lambda r: r.expovariate(1 / 0.2)])
    )
    trace = simulate(
        settings, nodes=nodes, updates=60, seconds=4000.0, step_seconds=uneven, parameters=start(torch.float64),
        gradient=gradient, inner=sgd(lr=0.1), faults=drawn_faults(rng, nodes, 200.0), link=wire, seed=seed,
    )  # fmt: skip
    assert len(trace.updates) == 60
    assert min(trace.staleness()) >= 0
    torch.testing.assert_close(trace.parameters, rounds_by_hand(trace, settings, every), rtol=1e-10, atol=1e-10)
