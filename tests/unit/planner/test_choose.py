"""The ranking: when dense is the answer, when a lossy method is, the band, and what was measured."""

import dataclasses
import json
from dataclasses import dataclass, replace

import pytest
from timelines import DeAR, Hierarchical, profile_of

from thinwire import GTopK
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.costs import Costs, Table, assumed_compute
from thinwire.core.pricing.profiles import ModelProfile, builtin
from thinwire.core.program import AllReduce, Method, Topology
from thinwire.core.words import milliseconds as ms
from thinwire.predict import choose as planner
from thinwire.predict.choose import DEVICES, Ranking
from thinwire.predict.choose.rank import UNCERTAINTY, spread_costs
from thinwire.predict.choose.worth import UNKNOWN, MeasuredWorth, Worth, read_worth, shipped, worth_from
from thinwire.predict.timeline import bound_by, simulate
from thinwire.predict.timeline.local_steps import PLAIN, Periodic

DENSE = (("ssgd", SSGD()), ("cast", Cast()))
SPARSE = (("topk .001", TopK(0.001)), ("topk .01", TopK(0.01)))
ALL = (*DENSE, *SPARSE, ("signsgd", SignSGD()), ("powersgd", PowerSGD(rank=4)), ("acp", ACP(rank=4)))
GPU = {"backend": "nccl", "shared_compute": False}
RESNET, BERT = builtin("resnet50", device_flops=3e13), builtin("bert-base", device_flops=3e13)


def alike(method, elements, workers):
    """As if a step of every method were worth the same, and next to nothing of what everybody has."""
    return Worth(*[1e6 if label_of_plain(method) else 1.0] * 3, "a test's")


def label_of_plain(method):
    return next((label for label, plain in PLAIN.items() if plain == method), None)


def methods_in(entries):
    return [entry for entry in entries if entry.label not in PLAIN]


def choose(*arguments, worth=alike, **options):
    return planner.choose(*arguments, worth=worth, **options)


def costs_of(bits, latency, workers, memory=3e12, flops=1e13, **more):
    return Costs.of_link(bits, latency, workers, compute=assumed_compute(memory, flops), **more)


@pytest.mark.parametrize("profile", [RESNET, BERT], ids=lambda p: p.name)
@pytest.mark.parametrize("factor", [0.0, 1e-3, 1.0], ids=lambda f: f"compute x {f:g}")
def test_nvlink_is_dense(profile, factor):
    """The rows "8, NVLink 400 GB/s", with and without a backward to hide behind."""
    ranking = choose(SPARSE, profile.scaled(factor), Topology(8), costs_of(3.2e12, 3e-6, 8), **GPU)
    assert ranking.best.dense
    assert ranking.sentence.startswith(("dense is faster here: ", "dense is as fast here: "))
    if factor < 1 and profile is RESNET:  # selection alone takes longer than dense in 16 bits
        assert ranking.sentence.startswith("dense is faster here: ")
        dense, rival = (
            ranking.entry("dense 16-bit"),
            min(methods_in(ranking.lossy), key=lambda e: (e.dense, e.step_seconds)),
        )
        assert f"{ms(dense.step_seconds)} against {ms(rival.step_seconds)}" in ranking.sentence


@pytest.mark.parametrize(("profile", "workers"), [(RESNET, 8), (BERT, 64)], ids=str)
def test_ten_gigabit_is_sparse(profile, workers):
    ranking = choose((*DENSE, *SPARSE), profile, Topology(workers), costs_of(1e10, 30e-6, workers), **GPU)
    assert ranking.best.label == "topk .001"
    assert ranking.best_exact.label == "ssgd"
    assert ranking.sentence.startswith("topk .001 is faster here: ")
    assert ranking.answer == ranking.best
    assert ranking.best.worth > max(entry.worth for entry in ranking.exact)


@pytest.mark.parametrize("where", [GPU, {}], ids=["nccl", "gloo"])
def test_the_dense_forms_that_are_added_are_the_methods_themselves(where):
    topology, costs = Topology(8), costs_of(1e9, 30e-6, 8)
    ranking = choose(SPARSE, RESNET, topology, costs, **where)
    assert {entry.label for entry in ranking.entries} == {"dense fp32", "dense 16-bit", *dict(SPARSE), *PLAIN}
    for label, method in (("dense fp32", SSGD()), ("dense 16-bit", Cast())):
        entry, timeline = ranking.entry(label), simulate(method, RESNET, topology, costs, **where)
        assert (entry.step_seconds, entry.bytes_sent) == (timeline.step_seconds, timeline.bytes_sent)
        assert entry.options == choose(((label, method),), RESNET, topology, costs, **where).entry(label).options


@dataclass(frozen=True)
class Priced(Method):
    """One exchange of nothing much, and a segment as long as one wants."""

    name = "priced"
    seconds: float = 0.0
    fusion: object = "single"

    def compute_seconds(self, shapes, phase, topology, costs):
        return [self.seconds, 0.0]

    def reduce(self, bucket, state):
        yield AllReduce(bucket.flat[:1])


def gaining(gain, **options):
    """A dense step of 1 s, and a rival that is shorter by a share."""
    profile = profile_of([1000], [0.25], forward=0.25)
    costs = Costs({("AllReduce", "world", 4): Table(((4, 0.0), (2000, 0.5), (4000, 0.5)))}, assumed_compute(1e30))
    return choose((("rival", Priced(0.5 - gain)),), profile, Topology(4), costs, shared_compute=False, **options)


@pytest.mark.parametrize("gain,wins", [(-0.1, 0), (0.0, 0), (0.01, 0), (0.099, 0), (0.101, 1), (0.3, 1)])
def test_the_rule_of_ten_percent(gain, wins):
    ranking = gaining(gain)
    assert ranking.entry("dense fp32").step_seconds == pytest.approx(1.0)
    assert ranking.entry("rival").step_seconds == pytest.approx(1 - gain)
    assert ranking.best.label == ("rival" if wins else "dense fp32")
    starts = "rival is faster here" if wins else "dense is faster here" if gain <= 0 else "dense is as fast here"
    assert ranking.sentence.startswith(starts)


def of(*factors):
    return lambda method, elements, workers: Worth(factors[0], factors[1], factors[2], "a test's")


@pytest.mark.parametrize(
    ("worth", "best", "sentence"),
    [
        (
            of(1.0, 1.2, 1.4),
            "rival",
            "rival is faster here: 500 ms x 1.20 steps against 1000 ms for dense (dense fp32)",
        ),
        (of(1.0, 1.2, 1.9), "dense fp32", "dense is as fast here: 1000 ms against 500 ms x 1.20 steps"),
        (of(1.0, 2.1, 2.2), "dense fp32", "dense is faster here: 1000 ms against 500 ms x 2.10 steps"),
        (
            lambda *_: UNKNOWN,
            "dense fp32",
            "dense fp32: 1000 ms, what a step is worth is not known for any other method",
        ),
    ],
    ids=["sooner whatever seed", "not with the most steps", "not in the middle", "not measured"],
)
def test_a_lossy_step_counts_for_what_it_is_worth(worth, best, sentence):
    ranking = gaining(0.5, worth=lambda m, *rest: worth(m, *rest) if m.name == "priced" else alike(m, *rest))
    assert ranking.best.label == best
    assert ranking.sentence.startswith(sentence)
    rival = ranking.entry("rival")
    middle = worth(None, 0, 0).middle
    if rival.steps is None:
        assert (rival.worth, rival.steps_source, ranking.entries[-1]) == (None, "not measured", rival)
    else:  # one worker alone takes a million steps of half a second
        assert (rival.steps, rival.worth) == (middle, pytest.approx(1e6 / middle))
    assert Ranking.from_json(ranking.to_json()) == ranking


def test_power_sgd_and_not_local_steps_that_are_as_soon():
    """ResNet-50, 4 workers and 1 Gb/s: a hair is no lead."""
    candidates = (("powersgd", PowerSGD(rank=4)), ("local", Periodic(Cast("int2"))))
    card = DEVICES["a100"]
    profile = builtin("resnet50", device_flops=card.training_flops)
    costs = Costs.of_link(1e9, 50e-6, 4, trees=True, compute=assumed_compute(1.2e12, 4e12))
    worth = worth_from(
        (
            MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 1_000_000, 2, (1.0, 1.07, 1.13)),
            MeasuredWorth("cast", {"dtype": "int2"}, 4, 3, 1_000_000, 2, (1.1, 1.15, 1.2)),
        )
    )
    ranking = planner.choose(candidates, profile, Topology(4), costs, worth=worth, **GPU)
    assert ranking.best.label == "powersgd"
    assert "; local is as fast, " in ranking.sentence
    alone = planner.choose(candidates[1:], profile, Topology(4), costs, worth=worth, **GPU)
    assert alone.best.label == "local"
    assert alone.best.steps * alone.best.step_seconds < ranking.best.steps * ranking.best.step_seconds


ROWS = (
    MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 1_000_000, 2, (1.1, 1.3, 1.2)),
    MeasuredWorth("powersgd", {"rank": 16}, 1, 0, 1_000_000, 2, (1.0, 1.0, 1.1)),
    MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 1_000_000, 8, (1.4, 1.5, 1.6)),
    MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 9_000_000, 2, (1.01, 1.02, 1.03)),
    MeasuredWorth("cast", {"dtype": "int8"}, 1, 0, 1_000_000, 2, (1.0, 1.0, 1.0)),
    MeasuredWorth("cast", {"dtype": "int8"}, 4, 3, 1_000_000, 2, (1.2, 1.3, None)),
    MeasuredWorth("cast", {"dtype": "int8"}, 8, 7, 1_000_000, 2, (None, 1.5, None)),
    MeasuredWorth("cast", {"dtype": "int8"}, 8, 2, 1_000_000, 2, (1.1, 1.2, 1.4)),
    MeasuredWorth("acp", {"rank": 4}, 1, 0, 1_000_000, 2, (1.7, 1.6, 2.1)),
    MeasuredWorth("cast", {"dtype": "int8"}, 16, 0, 2_000_000, 2, (1.1,)),
    MeasuredWorth("cast", {"dtype": "int2"}, 16, 0, 1_000_000, 2, (1.3,), steps=1500),
    MeasuredWorth("cast", {"dtype": "int1"}, 8, 0, 1_000_000, 2, (1.02,), look=0.5, steps=1500),
    MeasuredWorth("cast", {"dtype": "int4"}, 1, 0, 1_000_000, 2, (1.09,), steps=1500, local=True),
)


@pytest.mark.parametrize(
    ("method", "elements", "workers", "middle"),
    [
        (SSGD(), 1e6, 4, 1.0),
        (Cast(), 1e6, 4, 1.0),
        (PowerSGD(rank=4), 1e6, 2, 1.2),
        (PowerSGD(rank=8), 1e6, 2, 1.2),
        (PowerSGD(rank=32), 1e6, 2, 1.0),
        (PowerSGD(rank=2), 1e6, 2, None),
        (PowerSGD(rank=2), 1e6, 1, 1.0),
        (PowerSGD(rank=4), 1e6, 64, 1.5),
        (PowerSGD(rank=4), 5e7, 2, 1.02),
        (ACP(rank=4), 4e6, 2, 1.7),
        (ACP(rank=4), 4e6 + 1, 2, None),  # who needed many steps is not trusted far from what was measured
        (Cast("int8"), 1e6, 2, 1.0),
        (Cast("int2"), 1e6, 2, None),
        (TopK(0.01), 1e6, 2, None),
        (Periodic(Cast("int8"), 2, "full"), 1e6, 2, 1.3),
        (Periodic(Cast("int8"), 4, 3), 1e6, 2, 1.3),
        (Periodic(Cast("int8"), 32, 0), 1e6, 2, None),
        (
            Periodic(Cast("int8"), 16, 0),
            1e6,
            2,
            1.3,
        ),  # in more bits than in whole runs, which count more than short ones
        (Periodic(Cast("int1"), 16, 0), 1e6, 2, None),
        (Periodic(Cast("int2"), 4, 0, look=0.5), 1e6, 2, 1.02),
        (Periodic(Cast("int2"), 4, 0, look=0.3), 1e6, 2, None),
        (Periodic(Cast("int8"), 6, "full"), 1e6, 2, None),
        (Periodic(Cast("int8"), 6, 2), 1e6, 2, 1.2),
        (Periodic(Cast("int2"), 1, 0), 1e6, 2, 1.3),
        (Periodic(Cast("int8"), 1, 0), 1e6, 2, 1.09),
        (Cast("int4"), 1e6, 2, None),  # weights are averaged at each step there, not gradients
        (Periodic(Cast("int8"), 8, 1), 1e6, 2, 1.2),
        (Periodic(Cast("int8"), 8, 3), 1e6, 2, None),
        (Periodic(Cast("int8"), 16, 2), 1e6, 2, None),
        (Periodic(Cast("int8"), 16, "full"), 1e6, 2, None),
        (Periodic(Cast("int8")), 1e6, 2, None),
    ],
    ids=str,
)
def test_the_row_that_speaks_for_a_method(method, elements, workers, middle):
    """One that sends as much or less, as often or more rarely, of the nearest number of ranks and size."""
    found = worth_from(ROWS)(method, round(elements), workers)
    assert found.known == (middle is not None)
    if middle is not None:
        assert found.middle == middle
        assert found.low <= found.middle <= found.high


def test_the_table_that_is_shipped(tmp_path):
    worth = shipped()
    assert worth(PowerSGD(rank=4), 3_000_000, 2).known
    assert "measured with " in worth(PowerSGD(rank=4), 3_000_000, 2).source
    apart = [worth(Periodic(Cast("int2"), 4, 0), 400_000, workers) for workers in (8, 16, 32)]
    assert [one.source.endswith("; 32 workers need more") for one in apart] == [False, False, True]
    assert apart[0].middle < 1.5 < apart[1].middle == worth(Periodic(Cast("int2"), 4, 0), 100_000_000, 16).middle
    row = {"method": "powersgd", "options": {}, "every": 1, "delay": 0, "elements": 5, "workers": 2, "factors": [1.2]}
    (tmp_path / "good.json").write_text(json.dumps({"rows": [row]}))
    assert read_worth(tmp_path / "good.json")(PowerSGD(rank=4), 5, 2).middle == 1.2
    (tmp_path / "good.json").write_text(json.dumps({"rows": [row], "race": {"model": "mine:build"}}))
    found = read_worth(tmp_path / "good.json")(PowerSGD(rank=4), 5, 2)
    assert found.source == "your race of mine:build with 5e-06 M parameters, 2 workers"
    edited = [{"factors": []}, {"factors": ["1.2"]}, {"factors": [-1.2]}, {"workers": 0}, {"elements": "5"}]
    texts = [json.dumps({"rows": [row | change]}) for change in edited]
    for text in ("", "[]", '{"rows": [{"method": 3}]}', *texts):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="holds no table of steps to a loss as written by thinwire race"):
            read_worth(tmp_path / "bad.json")
    (tmp_path / "short.json").write_text(json.dumps({"rows": [], "race": {"model": "mine:build"}}))
    with pytest.raises(ValueError, match="tells the steps of no method: the race trained none, so race for"):
        read_worth(tmp_path / "short.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_worth(tmp_path / "none.json")


def test_exact_apart_from_lossy_and_best_first():
    ranking = choose((*ALL, ("dear", DeAR())), RESNET, Topology(16), costs_of(1e10, 5e-5, 16))
    assert ranking.entries == (*ranking.exact, *ranking.lossy)
    for part in (ranking.exact, ranking.lossy):
        part, alone = methods_in(part), 1e6 * ranking.entry("alone").step_seconds
        assert [e.step_seconds for e in part] == sorted(e.step_seconds for e in part)
        assert all(e.worth == pytest.approx(alone / e.step_seconds) for e in part)
    assert all(e.exact for e in ranking.exact)
    assert ranking.best_exact == ranking.exact[0]


def test_one_worker():
    ranking = choose(ALL, RESNET, Topology(1), Costs({}, assumed_compute()))
    assert ranking.best.label == "ssgd"
    assert "one worker" in ranking.sentence
    assert all(e.bytes_sent == 0 for e in ranking.exact)


def test_figures_are_those_of_the_simulator():
    topology, costs = Topology(16, 4), costs_of(1e10, 5e-5, 16, ranks_per_node=4)
    for entry in methods_in(choose(ALL, RESNET, topology, costs, **GPU).entries):
        method = dict(ALL)[entry.label]
        timeline = simulate(method, RESNET, topology, costs, **GPU)
        assert entry.step_seconds == timeline.step_seconds
        assert entry.exposed_seconds == timeline.exposed_seconds
        assert entry.bytes_sent == timeline.bytes_sent
        assert entry.bound_by == bound_by(method, RESNET, topology, costs, **GPU)
        assert set(entry.options) == {f.name for f in dataclasses.fields(method)}


def measured(costs, provenance="measured here"):
    return replace(
        costs,
        exchanges={key: replace(curve, provenance=provenance) for key, curve in costs.exchanges.items()},
        compute={name: replace(curve, provenance=provenance) for name, curve in costs.compute.items()},
    )


@pytest.mark.parametrize("provenance", UNCERTAINTY)
def test_the_band_of_one_provenance_is_its_uncertainty(provenance):
    profile = replace(RESNET, provenance=provenance)
    costs, off = measured(costs_of(1e10, 5e-5, 16), provenance), UNCERTAINTY[provenance]
    for entry in choose(ALL, profile, Topology(16), costs).entries:
        assert entry.low_seconds == pytest.approx((1 - off) * entry.step_seconds)
        assert entry.high_seconds == pytest.approx((1 + off) * entry.step_seconds)


def test_what_is_scaled_from_another_size_counts_as_assumed():
    costs, topology = measured(costs_of(1e10, 5e-5, 4)), Topology(16)
    scaled, dear = costs.lookup("AllReduce", "world", 16), spread_costs(costs, topology, 1)
    assert dear.seconds("AllReduce", "world", 16, 1e6) == pytest.approx(1.4 * scaled(1e6))
    assert spread_costs(costs, Topology(4), -1).seconds("AllReduce", "world", 4, 1e6) == pytest.approx(
        0.9 * costs.seconds("AllReduce", "world", 4, 1e6)
    )


def test_share_that_was_measured():
    costs, topology = costs_of(1e10, 5e-5, 16), Topology(16)
    mine = replace(RESNET, provenance="measured here")
    assert choose(ALL, RESNET, topology, costs).measured_share == 0.0
    assert all(e.measured_share == pytest.approx(1.0) for e in choose(ALL, mine, topology, measured(costs)).entries)
    compute = RESNET.forward_seconds + sum(RESNET.backward_seconds)
    for entry in choose(ALL, mine, topology, costs).entries:
        assert entry.measured_share == pytest.approx(compute / entry.step_seconds)
    network = replace(measured(costs), compute=costs.compute)
    for entry in methods_in(choose(ALL, RESNET, topology, network).entries):  # work of the method hides no exchange
        assert entry.measured_share == pytest.approx(entry.exposed_seconds / entry.step_seconds)
    elsewhere = choose(ALL, mine, Topology(32), measured(costs))
    assert all(e.measured_share < 1 for e in methods_in(elsewhere.entries))


def test_json_keeps_the_hash():
    ranking = choose((*ALL, ("none", Hierarchical())), RESNET, Topology(16), costs_of(1e10, 5e-5, 16))
    again = Ranking.from_json(ranking.to_json())
    assert (again, again.hash, hash(again)) == (ranking, ranking.hash, hash(ranking))
    data = json.loads(ranking.to_json())
    assert data["best"] == ranking.best.label
    assert data["entries"][0]["low_seconds"] <= data["entries"][0]["step_seconds"]
    assert ranking.entry("cast").options["dtype"] == "torch.bfloat16"
    for text in ("", "[]", "{}", '{"entries": 3}', ranking.to_json().replace('"best": "', '"best": "no ')):
        with pytest.raises(ValueError, match="not a thinwire ranking"):
            Ranking.from_json(text)


@dataclass(frozen=True)
class Refusing(Priced):
    """As a method that needs even machines."""

    def reduce(self, bucket, state):
        raise ValueError("machines of unequal size")


@dataclass(frozen=True)
class Unpriced(Priced):
    def compute_seconds(self, shapes, phase, topology, costs):
        return [costs.compute_seconds("quantise", 1), 0.0]


def test_what_cannot_run_here_is_left_out_with_its_reason():
    candidates = (*DENSE, ("refusing", Refusing()), ("unpriced", Unpriced()))
    ranking = choose(candidates, RESNET, Topology(4), costs_of(1e10, 5e-5, 4))
    assert [e.label for e in methods_in(ranking.entries)] == ["ssgd", "cast"]
    assert dict(ranking.left_out)["refusing"] == "machines of unequal size"
    assert "quantise" in dict(ranking.left_out)["unpriced"]


def test_wrong_arguments():
    topology, costs = Topology(4), costs_of(1e10, 5e-5, 4)
    with pytest.raises(ValueError, match=r"candidates\[1\].*twice"):
        choose((("a", SSGD()), ("a", Cast())), RESNET, topology, costs)
    with pytest.raises(ValueError, match=r"candidates\[0\].*not a method"):
        choose((("a", "ssgd"),), RESNET, topology, costs)
    with pytest.raises(ValueError, match="backend"):
        choose(DENSE, RESNET, topology, costs, backend="mpi")
    with pytest.raises(ValueError, match="of 1 bytes"):
        choose(DENSE, replace(RESNET, dtype_bytes=1), topology, costs)
    with pytest.raises(LookupError, match="no exchange"):
        choose(DENSE, RESNET, topology, Costs({}, assumed_compute()))
    with pytest.raises(LookupError, match="memory"):
        choose(DENSE, RESNET, topology, replace(costs, compute={}))
    with pytest.raises(ValueError, match="there are ssgd, cast"):
        choose(DENSE, RESNET, topology, costs).entry("acp")


def test_a_model_without_tensors():
    ranking = choose(ALL, ModelProfile("none", (), 0.0), Topology(4), costs_of(1e10, 5e-5, 4))
    assert ranking.best.label == "ssgd"
    assert all(e.worth is None and e.bytes_sent == 0 for e in ranking.entries)
    assert Ranking.from_json(ranking.to_json()) == ranking


@pytest.mark.parametrize(("elements", "workers"), [(1, 4), (1000, 64)])
def test_a_lossy_method_that_saves_start_ups_alone_is_not_recommended(elements, workers):
    """One gathering of a few numbers has half the start-ups of a ring, whatever it leaves out."""
    candidates = (*ALL, ("gtopk", GTopK(density=0.01)))
    few = profile_of([elements], [1e-4], 1e-4)
    ranking = choose(candidates, few, Topology(workers), costs_of(1e10, 5e-5, workers))
    assert min(e.step_seconds for e in ranking.lossy) < 0.9 * ranking.best.step_seconds
    assert ranking.best.label == "ssgd"
    assert ranking.sentence.startswith("dense is enough here: ")
    assert "start-ups" in ranking.sentence
    assert not choose(candidates, RESNET, Topology(workers), costs_of(1e10, 5e-5, workers)).best.dense


# --- what everybody has --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "accumulated", "said"),
    [(3.0, 2.0, "topk .001"), (1.01, 2.0, "alone"), (3.0, 0.5, "accumulate:every=4")],
)
def test_the_answer_may_be_one_worker_alone_or_ddp_that_accumulates(alone, accumulated, said):
    """And the answer is what is sooner, even without a method; worth is beside one worker alone."""
    steps = {"alone": alone, "accumulate:every=4": accumulated}

    def worth(method, elements, workers):
        return (
            alike(method, elements, workers)
            if (label := label_of_plain(method)) is None
            else Worth(*[steps[label]] * 3, "")
        )

    topology, costs = Topology(8), costs_of(1e10, 30e-6, 8)
    ranking = choose((*DENSE, *SPARSE), RESNET, topology, costs, worth=worth, **GPU)
    assert ranking.answer.label == said
    assert ranking.sentence.startswith("topk .001 is faster here: ")
    compute = RESNET.forward_seconds + sum(RESNET.backward_seconds)
    entry, exact = ranking.entry("alone"), ranking.entry("ssgd")
    assert (entry.bytes_sent, entry.step_seconds) == (0, pytest.approx(compute))
    assert entry.worth == 1.0
    assert exact.worth == pytest.approx(alone * compute / exact.step_seconds)
    assert ranking.answer.worth == max(e.worth for e in ranking.entries if e.worth is not None)
    fourth = ranking.entry("accumulate:every=4")
    assert (fourth.every, fourth.bytes_sent) == (4, pytest.approx(exact.bytes_sent / 4))


ALONE, ACCUMULATED = PLAIN.values()


@pytest.mark.parametrize(("workers", "steps"), [(2, 2.0), (4, 4.0), (8, 27**0.75), (16, 27.0), (32, 27**1.25)])
def test_steps_of_one_worker_alone_are_a_power_of_the_number_it_is_held_against(workers, steps):
    """By the nearest measured number; a model far from those that were measured has them too."""
    rows = [MeasuredWorth("alone", {}, 1, 0, 10**6, *measured, steps=1504) for measured in ((2, (2.0,)), (16, (27.0,)))]
    assert worth_from(tuple(rows))(ALONE, 10**9, workers).middle == pytest.approx(steps)


def test_what_a_users_race_does_not_say_of_one_worker_alone_is_as_shipped():
    row = MeasuredWorth("powersgd", {"rank": 4}, 1, 0, 10**6, 4, (1.1,))
    own = MeasuredWorth("alone", {}, 1, 0, 10**6, 4, (5.0,))
    for plain in (ALONE, ACCUMULATED):
        assert worth_from((row,))(plain, 10**6, 4) == shipped()(plain, 10**6, 4)
    assert worth_from((row,))(ALONE, 10**6, 4).known
    assert worth_from((row, own))(ALONE, 10**6, 4).middle == 5.0
    topology, costs = Topology(4), costs_of(1e9, 5e-5, 4)
    ranking = planner.choose((("powersgd", PowerSGD(rank=4)),), RESNET, topology, costs, worth=worth_from((row, own)))
    alone, powersgd = ranking.entry("alone"), ranking.entry("powersgd")
    assert alone.worth == 1.0
    assert powersgd.worth == pytest.approx(5.0 * alone.step_seconds / (1.1 * powersgd.step_seconds))


def test_a_row_of_one_seed_may_be_a_twentieth_off():
    of_one, of_three = (
        worth_from((MeasuredWorth("topk", {}, 1, 0, 10**6, 2, factors),))(TopK(0.01), 10**6, 2)
        for factors in ((1.2,), (1.2, 1.19, 1.3))
    )
    assert (of_one.low, of_one.middle, of_one.high) == (pytest.approx(1.2 / 1.05), 1.2, pytest.approx(1.2 * 1.05))
    assert (of_three.low, of_three.middle, of_three.high) == (1.19, 1.2, 1.3)
