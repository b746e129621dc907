"""Local steps against plain arithmetic, torch's own averagers, and what no step of the algorithm may change."""

import dataclasses
import inspect
import itertools
import sys
import typing

import pytest
import torch
from local_ranks import SHAPES, Ranks, close, drawn, equal, mean_walk, virtual, walk

import thinwire
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.dgc import DGC
from thinwire.core.methods.hitopk import HiTopK
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.program import Topology
from thinwire.engine.attach import attach
from thinwire.engine.local import QSR, Local, Nesterov
from thinwire.engine.local.rounds import DEVIATION_KEPT
from thinwire.engine.local.settings import local_settings

CODECS = [
    SSGD(),
    Cast("int8", block=16),
    Cast("int4", block=16),
    Cast("int2", block=16),
    ACP(rank=2, min_rate=1.0),
    PowerSGD(rank=2, min_rate=1.0),
    TopK(0.1),
    TopK(0.1, exchange="gtopk"),
    TopK(0.2, exchange="oktopk"),
    HiTopK(0.2),
    SignSGD(),
]


SCHEDULES = [(1, 0, 1), (4, 0, 1), (4, 3, 1), (8, 7, 4), (5, 2, 3), (3, 1, 5)]


TURNS = [(codec, *SCHEDULES[(i + turn) % 6]) for i, codec in enumerate([None, *CODECS]) for turn in (0, 3)]
"""Each codec under two schedules, each schedule with four codecs."""


@pytest.mark.parametrize(("codec", "every", "delay", "fragments"), TURNS, ids=str)
def test_no_round_moves_the_virtual_iterate(codec, every, delay, fragments):
    settings = Local(every, codec, fragments=fragments, fragment_sync_delay=delay)
    world = Ranks(settings, equal(3), topology=Topology(3))
    for step in range(2 * every + 5):
        walk(world, 1, first=step)
        close(virtual(world), mean_walk(3, step + 1))


@pytest.mark.parametrize(
    ("codec", "fragments", "delay"),
    [
        (None, 1, 0),
        (None, 3, 1),
        (TopK(0.1), 3, 0),
        (TopK(0.1), 1, "full"),
        (Cast("int2", block=16), 1, 1),
        (Cast("int2", block=16), 3, "full"),
    ],
    ids=str,
)
def test_nor_does_a_period_that_changes(codec, fragments, delay):
    """It shrinks and grows with the rate, after a warm-up, while fragments travel."""
    settings = Local(QSR(0.1, least=1, most=6), codec, fragments=fragments, fragment_sync_delay=delay, warmup_steps=3)
    world, rates = Ranks(settings, equal(3)), [0.05] * 8 + [0.02] * 10 + [0.1] * 3 + [0.045] * 12
    seen = []
    for step, lr in enumerate(rates):
        for own, change in zip(world.weights, drawn(1000 + step, 3), strict=True):
            for name, x in own.items():
                x.sub_(0.01 * change[name])
        world.step(lr)
        close(virtual(world), mean_walk(3, step + 1))
        seen.append(world.rounds[0].period)
    # As of the rate at the period's start; the one that begins with 0.02 ends when the rate has risen to 0.1.
    assert seen == [1] * 3 + [4] * 8 + [6] * 7 + [2] + [1] * 2 + [4] * 12


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_rate_that_warms_up_from_nothing_does_not_keep_ranks_apart(fragments):
    world = Ranks(Local(QSR(0.1), TopK(0.1), fragments=fragments, fragment_sync_delay="full"), equal(2))
    left = []
    for step in range(30):
        for own, change in zip(world.weights, drawn(1000 + step, 2), strict=True):
            for name, x in own.items():
                x.sub_(0.01 * change[name])
        world.step(0.05 * min(1.0, step / 5))
        close(virtual(world), mean_walk(2, step + 1))
        left.append([f.left for f in world.rounds[0].fragments])
    assert world.rounds[0].period == 4
    assert min(left[9]) > 0  # every fragment has been sent
    assert min(left[-1]) > 30 - 4 - 1


def test_a_warm_up_averages_after_every_step_and_auto_waits_until_it_has_measured():
    world = Ranks(Local(4, warmup_steps=3, fragment_sync_delay="full"), equal(2))
    apart = []
    for step in range(8):
        walk(world, 1, first=step)
        apart.append(not torch.equal(world.weights[0]["a"], world.weights[1]["a"]))
    assert apart == [False] * 3 + [True] * 5
    settings = Local("auto", Cast("int8", block=16), fragment_sync_delay="full")
    world = Ranks(settings, equal(2))
    walk(world, 2)
    assert torch.equal(world.weights[0]["a"], world.weights[1]["a"])
    for rounds in world.rounds:
        rounds.measured = 3, 1
    walk(world, 3, first=2)
    assert [f.due for f in world.rounds[0].fragments] == [2 + 3 + 2]


@pytest.mark.parametrize(
    "settings",
    [
        Local(8, fragments=4, fragment_sync_delay=7),
        Local(5, fragments=3),
        Local(3, fragments=5),
        Local(QSR(0.1, most=4), fragments=2, fragment_sync_delay="full"),
    ],
    ids=str,
)
def test_as_many_travel_as_was_said_and_no_more(settings):
    world = Ranks(settings, equal(2))
    most = 0
    for step in range(24):
        walk(world, 1, first=step)
        rounds = world.rounds[0]
        most = max(most, len({f.left for f in [*rounds.leaving(), *rounds.travelling()]}))
    assert most <= rounds.most_travelling() <= len(rounds.fragments)
    if isinstance(settings.sync_every, int):
        assert most == rounds.most_travelling()


@pytest.mark.parametrize("delay", [0, 3, 7])
def test_no_more_travel_than_was_said_before_the_delay_was_measured(delay):
    world = Ranks(Local(8, fragments=4, fragment_sync_delay="auto"), equal(2))
    said = world.rounds[0].most_travelling()
    most = 0
    for step in range(40):
        if step == 24:
            for rounds in world.rounds:
                rounds.measured = 8, delay
        walk(world, 1, first=step)
        most = max(most, len({f.left for f in [*world.rounds[0].leaving(), *world.rounds[0].travelling()]}))
    assert 1 <= most <= said == 4


def test_a_short_notice_of_the_rule():
    """H = max(least, floor((alpha / lr)^2)), as the authors' code has it."""
    rule = QSR(0.0175, least=4, most=100)
    assert [rule.period(lr) for lr in (0.01, 0.008, 0.005, 0.001, 0.0001, 0.0)] == [4, 4, 12, 100, 100, 100]


@pytest.mark.parametrize("codec", [ACP(rank=2, min_rate=1.0), TopK(0.1), Cast("int8", block=16)], ids=lambda c: c.name)
def test_what_the_outer_weights_lack_is_owed(codec):
    """phi_0 - phi_T + lr mean e(T) = lr sum of the mean changes, where every round starts from phi."""
    world, changes = Ranks(Local(2, codec, outer=Nesterov(0.5, 0.0)), equal(3)), {}
    start = {name: x.clone() for name, x in world.outer().items()}
    for round_ in range(6):
        before = {name: x.clone() for name, x in world.outer().items()}
        for step in range(2):
            for own, change in zip(world.weights, drawn(round_ * 2 + step, 3)):
                for name, x in own.items():
                    x.sub_(0.1 * change[name])
            if step:
                for name in SHAPES:
                    mean = sum(before[name] - own[name] for own in world.weights) / 3
                    changes[name] = changes.get(name, 0) + mean
            world.step()
    for name in SHAPES:
        owed = sum(r.fragments[0].state.residuals.get(name, torch.zeros(SHAPES[name])) for r in world.rounds) / 3
        torch.testing.assert_close(
            start[name] - world.outer()[name] + 0.5 * owed, 0.5 * changes[name], rtol=1e-12, atol=1e-12
        )


def test_the_rate_acts_once_and_a_ramp_begins_without_momentum():
    moved = {}
    for lr, codec, ramp in ((1.0, None, 4), (0.5, None, 4), (0.5, SSGD(), 4), (0.5, None, 0)):
        world = Ranks(Local(2, codec, outer=Nesterov(lr, 0.9, ramp_rounds=ramp)), equal(2))
        walk(world, 2)
        moved[lr, codec, ramp] = equal(1)[0]["a"] - world.outer()["a"]
    torch.testing.assert_close(moved[0.5, None, 4], 0.5 * moved[1.0, None, 4], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moved[0.5, SSGD(), 4], 0.5 * moved[1.0, None, 4], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moved[0.5, None, 0], 0.95 * moved[1.0, None, 4], rtol=1e-12, atol=1e-14)
    assert [Nesterov(momentum=0.8, ramp_rounds=4).momentum_at(n) for n in (0, 1, 2, 4, 9)] == [0, 0.2, 0.4, 0.8, 0.8]


@pytest.mark.parametrize("codec", [PowerSGD(rank=64, min_rate=0.0), TopK(1.0)], ids=lambda c: c.name)
def test_a_lossless_codec_is_no_codec(codec):
    lossless, plain = Ranks(Local(3, codec), equal(2)), Ranks(Local(3), equal(2))
    walk(lossless, 9)
    walk(plain, 9)
    close(lossless.weights[0], plain.weights[0], 1e-10)


@pytest.mark.parametrize(("every", "fragments"), [(8, 4), (5, 3), (3, 5), (4, 1), (7, 2)])
def test_fragments_cover_every_parameter_once_in_a_period(every, fragments):
    world = Ranks(Local(every, fragments=fragments), equal(2))
    for period in range(3):
        seen = []
        for _ in range(every):
            walk(world, 1)
            seen += [name for f in world.rounds[0].leaving() for name in f.parameters]
        assert sorted(seen) == sorted(SHAPES), period


def test_bytes_are_the_fragments_own():
    world = Ranks(Local(4, fragments=2), equal(3, dtype=torch.float32))
    elements = [sum(x.numel() for x in f.parameters.values()) for f in world.rounds[0].fragments]
    before, peaks = 0, []
    for _ in range(8):
        walk_float(world)
        peaks.append(world.sent[0] - before)
        before = world.sent[0]
    each = [2 * 2 * 4 * n / 3 for n in elements]
    assert sum(peaks) == pytest.approx(2 * sum(each), rel=0.02)
    assert max(peaks) <= max(each) * 1.05
    assert [n for n, peak in enumerate(peaks, 1) if peak] == [2, 4, 6, 8]


def walk_float(world):
    for own in world.weights:
        for x in own.values():
            x.sub_(0.01)
    world.step()


@pytest.mark.parametrize(("codec", "delay"), [(c, 2 * (i % 2)) for i, c in enumerate([None, *CODECS])], ids=str)
def test_a_change_that_is_not_finite_is_rejected_by_all_ranks(codec, delay):
    world = Ranks(Local(3, codec, outer=Nesterov(0.7, 0.5), fragment_sync_delay=delay), equal(3))
    walk(world, 12 + delay)
    fragments = [rounds.fragments[0] for rounds in world.rounds]
    before = [f.snapshot() for f in fragments]
    world.weights[1]["a"][2, 3] = torch.nan
    walk(world, 3 - delay, first=50)
    while any(f.due is not None for f in fragments):
        walk(world, 1, first=90)
    for fragment, old in zip(fragments, before):
        now = fragment.snapshot()
        assert fragment.rejected == 1
        for kind in ("anchors", "momenta"):
            assert all(torch.equal(a, b) for a, b in zip(now[kind], old[kind]))
        assert set(now["codec"]["residual"]) == set(old["codec"]["residual"])
        for name, residual in old["codec"]["residual"].items():
            assert torch.equal(now["codec"]["residual"][name], residual)
    assert torch.equal(world.weights[1]["a"], world.outer()["a"])
    assert all(x.isfinite().all() for own in world.weights for x in own.values())
    walk(world, 6, first=70)
    assert fragments[0].rejected == 1


@pytest.mark.parametrize(("delay", "spoilt"), [(0, 7), (0, 8), (1, 9), (1, 10), (3, 7), (3, 9), (3, 10)])
@pytest.mark.parametrize("codec", [None, TopK(0.1)], ids=str)
def test_a_rank_whose_every_layer_is_spoilt_by_one_comes_back(codec, delay, spoilt):
    """As a forward does it: of one weight that is not finite, all gradients are not."""
    world = Ranks(Local(4, codec, fragments=2, fragment_sync_delay=delay), equal(2))
    for step in range(24):
        own = world.weights[1]
        if step == spoilt:
            own["b"][2] = torch.nan
        if not all(x.isfinite().all() for x in own.values()):
            for x in own.values():
                x.fill_(torch.nan)
        walk(world, 1, first=step)
    assert all(x.isfinite().all() for own in world.weights for x in own.values())
    assert sum(f.rejected for f in world.rounds[0].fragments) <= 2
    assert all(torch.equal(x, world.outer(1)[name]) for name, x in world.outer(0).items())


def test_what_the_times_of_other_ranks_said_is_measured_again():
    settings = Local("auto", "auto", fragment_sync_delay="auto")
    old, new = Ranks(settings, equal(2)), Ranks(settings, equal(3))
    for rounds in old.rounds:
        rounds.measured, rounds.code = (4, 2), 1
    walk(old, 5)
    for rounds in new.rounds:
        rounds.restore(old.rounds[0].snapshot())
        assert not rounds.settings.measures(rounds.measured)
        rounds.begin_again()
        assert rounds.settings.measures(rounds.measured)
        assert rounds.code == settings.first_code


def test_who_goes_on_while_it_measures_measures_from_the_first_codec():
    old, new = (Ranks(Local("auto", "auto"), equal(2)) for _ in range(2))
    walk(old, 5)
    old.rounds[0].code = 0
    new.rounds[0].restore(old.rounds[0].snapshot())
    assert new.rounds[0].code == 1
    old.rounds[0].measured = (4, 1)
    new.rounds[0].restore(old.rounds[0].snapshot())
    assert new.rounds[0].code == 0


def test_outer_weights_are_lent_to_the_model():
    world = Ranks(Local(4), equal(2))
    walk(world, 6)
    own = {name: x.clone() for name, x in world.weights[0].items()}
    with world.rounds[0].outer_weights():
        assert all(torch.equal(world.weights[0][name], x) for name, x in world.outer().items())
    assert all(torch.equal(world.weights[0][name], own[name]) for name in SHAPES)
    assert not torch.equal(own["a"], world.outer()["a"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_every": 0}, "sync_every=0 must be a whole number of at least 1"),
        ({"sync_every": 4, "fragment_sync_delay": 4}, "must be below sync_every=4"),
        ({"sync_every": "often"}, "sync_every='often' must be a whole number of at least 1"),
        ({"sync_every": True}, "sync_every=True must be a whole number"),
        ({"fragment_sync_delay": "half"}, "fragment_sync_delay='half' is unknown"),
        ({"sync_every_max": 1}, "sync_every_max=1"),
        ({"sync_every": QSR(0.1), "fragment_sync_delay": "auto"}, 'works with a fixed period, or "auto"'),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"moments": {"exp_avg": 0}}, "moments: exp_avg=0"),
        ({"moments": ["exp_avg"]}, "moments=.'exp_avg'. must be rounds by name"),
        ({"outer": 0.7}, "outer=0.7 must be a thinwire.Nesterov"),
        ({"moments": {"exp_avg": 3}, "fragment_sync_delay": 2}, "moments would lose the steps"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragment_update_alpha": 1.5}, "at least 0 and at most 1"),
        ({"codec": "zip"}, "codec='zip' must be a method"),
        ({"codec": DGC(0.1)}, "dgc cannot be a codec of local steps: "),
        ({"codec": ACP(decoupled=True)}, "acp is decoupled"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Local(**options)


def test_a_server_is_joined_from_a_loop_of_ones_own():
    with pytest.raises(ValueError, match=r"server= joins from a loop or callback of your own: thinwire.attach"):
        thinwire.ddp_hook("local", server="10.0.0.1:29400")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("locla", {}, r"unknown method: 'locla'; did you mean 'local'\? known: ssgd, .*, lags, local, diloco, auto$"),
        ("local_sgd", {}, r"did you mean 'local'\?"),
        ("local", {"sync_evry": 4}, r"unknown option of local: 'sync_evry'; did you mean 'sync_every'\? known: "),
    ],
)
def test_names_that_are_nearly_right_are_asked_about(name, options, words):
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words):
        attach(net, torch.optim.SGD(net.parameters(), lr=0.1), name, **options)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads")
def test_an_editor_knows_every_option_of_local():
    shown = inspect.signature(typing.get_overloads(attach)[0]).parameters
    own = {"model", "optimizer", "method", "options"}
    assert shown.keys() - own == {one.name for one in dataclasses.fields(Local)}


def test_an_unknown_codec_is_told_all_that_there_are():
    with pytest.raises(ValueError, match=r"codec: unknown method: 'int3'; known: ssgd.* auto, none, fp16.* int8, int4"):
        local_settings("local", {"codec": "int3"})


@pytest.mark.parametrize(("options", "words"), [({"alpha": 0}, "alpha=0"), ({"alpha": 0.1, "least": 0}, "least=0"),
                                                ({"alpha": 0.1, "least": 8, "most": 4}, "most=4")])  # fmt: skip
def test_bad_rules(options, words):
    with pytest.raises(ValueError, match=words):
        QSR(**options)


def test_more_fragments_than_parameters():
    with pytest.raises(ValueError, match="fragments=6: the model has only 5 trainable parameters"):
        Ranks(Local(fragments=6), equal(2))


@pytest.mark.parametrize("codec", [None, SSGD()], ids=["none", "changes"])
@pytest.mark.parametrize(("delay", "kept"), [(0, 0.0), (1, 0.0), (2, DEVIATION_KEPT), (3, DEVIATION_KEPT)])
def test_of_a_late_round_half_is_taken_out(codec, delay, kept):
    """What set ranks apart when they sent, and not what they made meanwhile; the mean over ranks stays."""
    world = Ranks(Local(4, codec, fragment_sync_delay=delay), equal(3))
    walk(world, 3)
    sent = [{name: x.clone() for name, x in own.items()} for own in world.weights]
    for own, change in zip(sent, drawn(1003, 3)):
        for name, x in own.items():
            x.sub_(0.01 * change[name])
    walk(world, 1 + delay, first=3)
    for rank, name in itertools.product(range(3), SHAPES):
        made = sum((-0.01 * drawn(1004 + step, 3)[rank][name] for step in range(delay)), torch.zeros(SHAPES[name]))
        mean = sum(own[name] for own in sent) / 3
        expected = mean + kept * (sent[rank][name] - mean) + made
        torch.testing.assert_close(world.weights[rank][name], expected, rtol=1e-12, atol=1e-12)
