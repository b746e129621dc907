import json
import random

import pytest
from random_nets import KINDS, SHAPE_FILE, brute_force, exchange, log_uniform, net, resnet50, sort_seconds

from thinwire.core.pricing import optimal
from thinwire.core.pricing.merge import finish, fuse, greedy_mgwfbp, greedy_omgs
from thinwire.core.pricing.optimal import optimal_dense, optimal_sparse

RELATIVE = 1e-12


def select_of(draw):
    """Seconds of a selection: the sort of 2019, a start-up and a rate, or anything."""
    kind = draw.randrange(3)
    if kind == 0:
        return sort_seconds
    if kind == 1:
        a, b = log_uniform(draw, 1e-6, 1e-3), log_uniform(draw, 1e-12, 1e-9)
        return lambda d: a + b * d
    return exchange(draw, "any")


def limits(draw, n):
    """Sometimes breaks, sometimes a cap."""
    options = {}
    if draw.random() < 0.4:
        options["breaks"] = draw.sample(range(len(n.sizes)), draw.randint(0, min(3, len(n.sizes))))
    if draw.random() < 0.4:
        options["max_elements"] = int(log_uniform(draw, 1e3, 1e7))
    return options


def check_limits(merge, n, breaks=(), max_elements=None):
    assert [i for group in merge.groups for i in group] == list(range(len(n.sizes)))
    assert all(group for group in merge.groups)
    first = {group[0] for group in merge.groups}
    assert set(breaks) <= first
    if max_elements is not None:
        assert all(len(g) == 1 or sum(n.sizes[i] for i in g) <= max_elements for g in merge.groups)


def test_dense_is_brute_force():
    draw = random.Random(1)
    for case in range(240):
        n = net(draw, 1, 12)
        price, options = exchange(draw, KINDS[case % 3]), limits(draw, n)
        merge = optimal_dense(n.sizes, n.seconds, price, **options)
        assert merge.finish_seconds == pytest.approx(brute_force(n, price, **options), rel=RELATIVE, abs=0)
        assert merge.exact
        check_limits(merge, n, **options)


@pytest.mark.parametrize("side_stream", [False, True])
def test_sparse_is_brute_force(side_stream):
    draw = random.Random(2)
    for case in range(240):
        n = net(draw, 1, 10)
        price, select, options = exchange(draw, KINDS[case % 3]), select_of(draw), limits(draw, n)
        options["side_stream"] = side_stream
        merge = optimal_sparse(n.sizes, n.seconds, select, price, **options)
        assert merge.finish_seconds == pytest.approx(brute_force(n, price, select, **options), rel=RELATIVE, abs=0)
        assert merge.exact
        check_limits(merge, n, **{k: v for k, v in options.items() if k != "side_stream"})


def rivals(n):
    """One group, one per tensor, 25 MiB."""
    count = len(n.sizes)
    return [[list(range(count))], [[i] for i in range(count)], fuse(n.sizes, 25 * 2**18)]


def test_never_worse_than_simple_rules_and_greedy_ones():
    draw = random.Random(3)
    beaten = {"mgwfbp": 0, "omgs": 0}
    for case in range(60):
        n = net(draw, 8, 40)
        price, select = exchange(draw, KINDS[case % 3]), select_of(draw)
        whole = optimal_dense(n.sizes, n.seconds, price)
        greedy = greedy_mgwfbp(n.sizes, n.seconds, price)
        check_limits(greedy, n)
        for groups in [*rivals(n), greedy.groups]:
            assert whole.finish_seconds <= finish(groups, n.sizes, n.seconds, price) + 1e-12
        beaten["mgwfbp"] += whole.finish_seconds < greedy.finish_seconds - 1e-9
        rule = [greedy_omgs(n.sizes, n.seconds, select, price, startup_seconds=a) for a in (None, 1e-3)]
        for side_stream in (False, True):
            best = optimal_sparse(n.sizes, n.seconds, select, price, side_stream=side_stream)
            for groups in [*rivals(n), *(g.groups for g in rule)]:
                ends = finish(groups, n.sizes, n.seconds, price, select, side_stream=side_stream)
                assert best.finish_seconds <= ends + 1e-12
            if not side_stream:
                check_limits(rule[0], n)
                beaten["omgs"] += best.finish_seconds < rule[0].finish_seconds - 1e-9
    assert min(beaten.values()) > 12  # the published rules are not optimal under their own model


GOLDEN = json.loads(SHAPE_FILE.read_text())


def gather(row):
    """The OMGS code's price: two all-gathers, density .001."""
    return lambda d: 2 * (row["a"] + row["b"] * 4 * row["workers"] * 0.001 * d)


@pytest.mark.parametrize("row", GOLDEN["sparse"]["rows"], ids=lambda row: f"P={row['workers']}")
def test_reference_case_sparse(row):
    n, price = resnet50(GOLDEN["sparse"]["total_seconds"]), gather(row)
    assert sum(n.sizes) == GOLDEN["elements"] == 25_557_032
    assert len(n.sizes) == 161
    plain = greedy_omgs(n.sizes, n.seconds, sort_seconds, price)
    script = greedy_omgs(n.sizes, n.seconds, sort_seconds, price, startup_seconds=row["a"])
    best = optimal_sparse(n.sizes, n.seconds, sort_seconds, price)
    side = optimal_sparse(n.sizes, n.seconds, sort_seconds, price, side_stream=True)
    for merge, key in ((plain, "omgs"), (script, "omgs_startup"), (best, "optimal"), (side, "side_stream")):
        assert merge.finish_seconds * 1e3 == pytest.approx(row[key], abs=1e-3), key
    assert (len(plain.groups), len(script.groups)) == (row["omgs_groups"], row["omgs_startup_groups"])
    assert best.exact
    assert not plain.exact


@pytest.mark.parametrize("row", GOLDEN["dense"], ids=lambda row: f"{row['total_seconds']} s")
def test_reference_case_dense(row):
    n = resnet50(row["total_seconds"])

    def price(d):
        return row["a"] + row["b"] * 4 * d

    greedy = greedy_mgwfbp(n.sizes, n.seconds, price)
    assert optimal_dense(n.sizes, n.seconds, price).finish_seconds * 1e3 == pytest.approx(row["optimal"], abs=1e-3)
    assert greedy.finish_seconds * 1e3 == pytest.approx(row["mgwfbp"], abs=1e-3)
    assert len(greedy.groups) == row["mgwfbp_groups"]


def test_ties_go_to_the_longest_last_group():
    assert optimal_dense([1, 1, 1], [1.0, 1.0, 1.0], lambda d: 0.0).groups == [[0, 1, 2]]
    assert optimal_sparse([1, 1, 1], [1.0, 1.0, 1.0], lambda d: 0.0, lambda d: 0.0).groups == [[0, 1, 2]]


def test_many_tensors_are_joined_and_say_so():
    draw = random.Random(6)
    n = net(draw, 600, 600)
    options = {"breaks": [1, 300, 301], "max_elements": 3_000_000}

    def price(d):
        return 2 * (1.1e-2 + 1.7e-8 * 4 * 16 * 0.001 * d)

    merge = optimal_sparse(n.sizes, n.seconds, sort_seconds, price, **options)
    check_limits(merge, n, **options)
    assert not merge.exact
    free = optimal_sparse(n.sizes, n.seconds, sort_seconds, price)
    assert free.finish_seconds <= greedy_omgs(n.sizes, n.seconds, sort_seconds, price).finish_seconds
    alone = optimal_sparse(n.sizes, n.seconds, sort_seconds, price, breaks=range(600))
    assert alone.groups == [[i] for i in range(600)]


def test_joining_costs_little(monkeypatch):
    n, price = resnet50(0.12), gather(GOLDEN["sparse"]["rows"][3])
    exact = optimal_sparse(n.sizes, n.seconds, sort_seconds, price)
    monkeypatch.setattr(optimal, "EXACT_UP_TO", 100)
    monkeypatch.setattr(optimal, "JOINED_TO", 64)
    joined = optimal_sparse(n.sizes, n.seconds, sort_seconds, price)
    assert exact.exact
    assert not joined.exact
    assert exact.finish_seconds <= joined.finish_seconds <= 1.01 * exact.finish_seconds


def test_too_narrow_a_frontier_is_admitted(monkeypatch):
    n, price = resnet50(0.12), gather(GOLDEN["sparse"]["rows"][0])
    monkeypatch.setattr(optimal, "WIDEST", 3)
    assert not optimal_sparse(n.sizes, n.seconds, sort_seconds, price).exact
