"""Prices, plans and predictions as JSON and back, and what each refuses, in one table."""

import math
import pickle

import numpy as np
import pytest
from random_nets import sort_seconds

from thinwire.core.pricing.costs import Costs, Linear, Table, assumed_compute
from thinwire.core.pricing.merge import Merge, finish, greedy_mgwfbp, greedy_omgs
from thinwire.core.pricing.optimal import optimal_dense, optimal_sparse
from thinwire.core.pricing.placement import place
from thinwire.core.pricing.profiles import ModelProfile, ModuleTime, TensorTime, builtin
from thinwire.core.pricing.ratios import Ratios, lags

TABLE = Table(((1000, 1e-3), (10**6, 5e-3)), "measured elsewhere", "a paper")
LINE = Linear(1e-3, 1e-8, "measured here", "this rack")
EXCHANGES = {("AllReduce", "world", 4): LINE, ("AllGather", "cross", 2): TABLE}
COSTS = Costs(EXCHANGES, assumed_compute(), {"AllReduce": Linear(1e-5, 0.0)})
RATIOS = lags([1000, 20, 0], [1e-3, 1e-3, 0.0], sort_seconds, lambda k: 8e-7 * k, lambda d: 4e-7 * d)


@pytest.mark.parametrize(
    ("record", "other", "wrong"),
    [
        (Merge([[0], [1, 2]], 1.0, "optimal", True), Merge([[0]], 1.0, "mgwfbp", True), '{"groups": 3}'),
        (RATIOS, Ratios([], [], 0.0), '{"kept": [1], "dense": [], "finish_seconds": 0}'),
        (place([3.0, 1.0, 2.0], 2, [0.0, 5.0, 0.0]), place([1.0], 2), '{"owner": 3}'),
        (builtin("gpt2"), builtin("vgg16"), '{"name": "x", "tensors": [1]}'),
        (COSTS, Costs({}), '{"exchanges": [["a"]], "compute": {}, "cpu_share": {}}'),
        (Costs({}, {"memory": LINE}, {"AllReduce": LINE}), COSTS, COSTS.to_json().replace("0.001", "-1")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_json_keeps_everything_and_other_texts_are_refused(record, other, wrong):
    read = type(record).from_json(record.to_json())
    assert read == record
    assert read.hash == record.hash != other.hash
    assert hash(read) == hash(record)
    for text in ("", "[]", "{}", wrong):
        with pytest.raises(ValueError, match=f"this is not {record.called}"):
            type(record).from_json(text)


def test_what_is_scaled_on_demand_and_the_order_of_curves_are_no_part_of_costs():
    COSTS.lookup("AllReduce", "world", 7)
    assert Costs(dict(reversed(EXCHANGES.items())), COSTS.compute, COSTS.cpu_share).hash == COSTS.hash
    assert pickle.loads(pickle.dumps(COSTS)) == COSTS


def rules(sizes, seconds, price=lambda d: 1.0, select=lambda d: 1.0, **options):
    """Every rule of merging on the same arguments; only the exact ones take options."""
    yield lambda: optimal_dense(sizes, seconds, price, **options)
    yield lambda: optimal_sparse(sizes, seconds, select, price, **options)
    if not options:
        yield lambda: greedy_mgwfbp(sizes, seconds, price)
        yield lambda: greedy_omgs(sizes, seconds, select, price)


def test_no_tensors_and_numbers_of_numpy():
    assert all((rule().groups, rule().finish_seconds) == ([], 0.0) for rule in rules([], []))
    for rule in rules(np.array([3, 4]), np.array([0.1, 0.2], dtype=np.float32)):
        assert Merge.from_json(rule().to_json()).groups


BAD = (math.nan, math.inf, -1.0)
TENSOR = TensorTime("a.weight", (2, 3), 0.1)


def ratios(**options):
    given = {"sizes": [1000], "backward_seconds": [0.0], "select_seconds": sort_seconds,
             "exchange_seconds": lambda k: 8e-7 * k, "allreduce_seconds": lambda d: 4e-7 * d}  # fmt: skip
    return lambda: lags(**{**given, **options})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((rule, "backward_seconds has 1 entries where sizes has 2") for rule in rules([1, 2], [0.0])),
        *((rule, r"sizes\[1\]") for wrong in (-2, 2.5) for rule in rules([1, wrong], [0.0, 0.0])),
        *((rule, r"backward_seconds\[1\]") for bad in BAD for rule in rules([1, 2], [0.0, bad])),
        *(
            (rule, r"(allreduce|exchange)_seconds\(2\)")
            for bad in BAD
            for rule in rules([1, 2], [0.0, 0.0], lambda d, bad=bad: bad if d == 2 else 1.0)
        ),
        *(
            (
                lambda bad=bad, rule=rule: rule([1, 2], [0.0, 0.0], lambda d: bad if d == 3 else 1.0, lambda d: 5.0),
                r"select_seconds\(3\)",
            )
            for bad in BAD
            for rule in (optimal_sparse, greedy_omgs)
        ),
        *((rule, "breaks: 2") for rule in rules([1, 2], [0.0, 0.0], breaks=[2])),
        *((rule, "max_elements") for rule in rules([1, 2], [0.0, 0.0], max_elements=-1)),
        (lambda: greedy_omgs([1], [0.0], lambda d: 0.0, lambda d: 0.0, startup_seconds=math.nan), "startup_seconds"),
        *(
            (lambda groups=groups: finish(groups, [1, 1, 1], [0.0] * 3, lambda d: 0.0), words)
            for groups, words in (
                ([[0], []], r"groups\[1\] is empty"),
                ([[0], [2, 1]], r"groups\[1\] holds 2 where 1"),
                ([[0], [1]], "cover 2 tensors"),
                ([[0, 1, 2, 3]], "cover 4 tensors"),
            )
        ),
        (ratios(max_ratio=0.5), "max_ratio"),
        (ratios(max_ratio=math.nan), "max_ratio"),
        (ratios(exposed_seconds=-1.0), "exposed_seconds"),
        (ratios(select_seconds=lambda d: math.nan), r"select_seconds\(1000\)"),
        (ratios(exchange_seconds=lambda k: -1.0), r"exchange_seconds\(1000\)"),
        (ratios(allreduce_seconds=lambda d: math.inf), r"allreduce_seconds\(1000\)"),
        (ratios(backward_seconds=[]), "backward_seconds has 0"),
        (ratios(sizes=[-1]), r"sizes\[0\]"),
        (lambda: place([1.0], 0), "workers must be at least 1"),
        (lambda: place([-1.0], 2), r"costs\[0\] must be finite and not negative"),
        (lambda: place([math.nan], 2), r"costs\[0\]"),
        (lambda: place([1.0, 2.0], 2, [1.0]), "communicate_seconds has 1 entries where costs has 2"),
        (lambda: place([1.0], 2, [math.inf]), r"communicate_seconds\[0\]"),
        (lambda: ModelProfile("m", (TENSOR, TENSOR), 1.0), "twice"),
        (lambda: ModelProfile("m", (TensorTime("a", (1,), -1.0),), 1.0), r"tensors\[0\]"),
        (lambda: ModelProfile("m", (TENSOR,), 1.0, (ModuleTime("a", math.nan),)), r"modules\[0\]"),
        (lambda: ModelProfile("m", (TENSOR,), -1.0), "forward_seconds"),
        (lambda: ModelProfile("m", (TENSOR,), 1.0, (), 0), "dtype_bytes"),
        (lambda: ModelProfile("m", (TENSOR,), 1.0, provenance="guess"), "provenance"),
        (lambda: builtin("resnet5"), "resnet5"),
        (lambda: builtin("resnet50", sequence_length=3), "sequence_length"),
        (lambda: builtin("gpt2", sequence_length=1025), "sequence_length"),
        (lambda: builtin("gpt2", batch_size=0), "batch_size"),
        (lambda: builtin("gpt2", device_flops=0.0), "device_flops"),
        (lambda: Linear(-1.0, 0.0), "startup_seconds"),
        (lambda: Linear(0.0, math.nan), "seconds_per_byte"),
        (lambda: Linear(0.0, 0.0, "guessed"), "provenance"),
        (lambda: Table(()), "points"),
        (lambda: Table(((2, 1.0), (1, 1.0))), r"points\[1\]"),
        (lambda: Table(((1, math.inf),)), r"points\[0\]"),
        (lambda: Costs({("Gossip", "world", 2): LINE}), "Gossip"),
        (lambda: Costs({("AllReduce", "rack", 2): LINE}), "rack"),
        (lambda: Costs({}, {}, {"Gossip": LINE}), "Gossip"),
        (lambda: Costs.of_link(0, 1e-4, 4), "bits_per_second"),
        (lambda: Costs.of_link(1e9, -1.0, 4), "latency_seconds"),
        (lambda: Costs.of_link(1e9, 1e-4, 4, 3), "4 workers"),
        (lambda: Costs.of_link(1e9, 1e-4, 4, efficiency=2), "efficiency"),
        (lambda: assumed_compute(flops=0), "flops"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
