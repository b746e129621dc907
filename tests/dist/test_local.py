"""Local steps on real ranks: torch's own averager, the formula, what is measured, refusals; more is in tests/fuzz."""

import contextlib
import copy
import gc
import logging
import pickle
import threading
import weakref

import cases
import pytest
import thinwire.checkpoint
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import thinwire as tw
from spawned import run
from thinwire.core.methods.cast import Cast
from thinwire.engine.local import Local, Nesterov
from thinwire.engine.local.settings import local_settings
from thinwire.engine.local.sync import chosen
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.services import attached_to

pytestmark = pytest.mark.dist


def _train(net, optimizer, rank, steps, first=0, every=None):
    for step in range(first, first + steps):
        cases.loss_of(net, rank, step).backward()
        optimizer.step()
        if every is not None:
            every(step)
        optimizer.zero_grad()


def _adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _averagers(rank, size):
    """torch's PeriodicModelAverager, which averages after steps 0, H, 2 H: so ours begins one step earlier."""
    ours, theirs = cases.model(), cases.model()
    sync = tw.attach(ours, first := _adamw(ours), Local(4))
    _train(ours, first, rank, 12)
    averager, second = PeriodicModelAverager(period=4, warmup_steps=0), _adamw(theirs)
    averager.step = 1
    _train(theirs, second, rank, 12, every=lambda _: averager.average_parameters(list(theirs.parameters())))
    stats = sync.stats()
    sync.close()
    return cases.weights(ours), cases.weights(theirs), stats.as_dict()


def test_averaging_is_bit_for_bit_torchs():
    for ours, theirs, stats in run(_averagers, 2, seconds=120):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert stats["method"] == "local"
        assert stats["steps"] == 12
        assert stats["rejected_steps"] == 0


def _method(codec):
    return tw.Cast(codec) if isinstance(codec, str) else codec


def _finished_again(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, "diloco", sync_every=4) as sync:
        _train(net, optimizer, rank, 14)
        mean = cases.weights(net)
        for x in mean:
            dist.all_reduce(x)
            x.div_(size)
        sync.finish()
        once = cases.weights(net)
        sync.finish()
        return mean, once, cases.weights(net)


def test_finish_averages_the_weights_and_an_outer_momentum_moves_them_no_further():
    for mean, once, twice in run(_finished_again, 2, seconds=120):
        torch.testing.assert_close(once, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(twice, once, rtol=0, atol=1e-6)


LAST = [("int8", {}), ("int2", {}), (tw.TopK(0.1), {}), ("int2", {"start_compression_step": 0})]


def _last_round(rank, size):
    """Ten steps of SGD, the last two after the second round: what finish() gives, and what all steps sum up to."""
    rows = []
    for codec, options in LAST:
        net = cases.model(width=64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        due = cases.weights(net)
        with tw.attach(net, optimizer, "local", sync_every=4, codec=codec, keep_dense="none", **options) as sync:
            for step in range(10):
                cases.loss_of(net, rank, step, width=64).backward()
                optimizer.step()
                for x, p in zip(due, net.parameters()):
                    x.sub_(p.grad, alpha=0.05)
                optimizer.zero_grad()
            before = sync.stats().bytes_sent
            sync.finish()
            sent = sync.stats().bytes_sent - before
        for x in due:
            dist.all_reduce(x)
            x.div_(size)
        start = cases.weights(cases.model(width=64))
        moved = max(float((a - b).abs().max()) for a, b in zip(start, due))
        missed = max(float((a - b).abs().max()) for a, b in zip(cases.weights(net), due))
        rows.append((sent / sum(x.nbytes for x in due), missed / moved, cases.weights(net)))
    return rows


def test_finish_sends_what_a_codec_has_held_back_in_8_bits_or_exactly_if_the_start_is():
    by_rank = run(_last_round, 2, seconds=120)
    for a, b in zip(*([weights for *_, weights in rows] for rows in by_rank), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for rows in by_rank:
        for (codec, options), (sent, missed, _) in zip(LAST, rows, strict=True):
            assert sent == pytest.approx(1.0 if options else 0.255, rel=0.01), codec
            assert missed < (1e-5 if options else 0.03), codec


PERIOD, SOME_STEPS, RATE, PARTS = 6, 20, 0.1, (4, 6)
FORMULA = [(2, 2, 0.5), (1, 5, 0.0), (2, 5, 0.25)]  # fragments, delay, share of the own weights


def _drift(theta, rank, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return 0.3 * theta + torch.randn(sum(PARTS), generator=draw, dtype=torch.float64)


def _start():
    return torch.linspace(0, 1, sum(PARTS), dtype=torch.float64)


def _streaming(rank, size):
    rows = []
    for fragments, delay, alpha in FORMULA:
        model = nn.ParameterList(nn.Parameter(part.clone()) for part in _start().split(PARTS))
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        settings = Local(PERIOD, outer=Nesterov(0.7, 0.9), fragments=fragments, fragment_sync_delay=delay,
                         fragment_update_alpha=alpha)  # fmt: skip
        with tw.attach(model, inner, settings, keep_dense="none"):
            for step in range(SOME_STEPS):
                theta = torch.cat([p.detach() for p in model])
                for p, g in zip(model, _drift(theta, rank, step).split(PARTS)):
                    p.grad = g
                inner.step()
            rows.append(torch.cat([p.detach() for p in model]))
    return rows


def _streaming_by_formula(size, fragments, delay, alpha):
    """Streaming DiLoCo in one process, with torch's outer optimizer; fragments may be under way together."""
    every, theta = PERIOD // fragments, [_start() for _ in range(size)]
    cuts = [slice(0, sum(PARTS))] if fragments == 1 else [slice(0, PARTS[0]), slice(PARTS[0], sum(PARTS))]
    anchors = [_start()[cut].clone() for cut in cuts]
    outers = [torch.optim.SGD([a], lr=0.7, momentum=0.9, nesterov=True) for a in anchors]
    under_way = {}
    for step in range(1, SOME_STEPS + 1):
        for rank, x in enumerate(theta):
            x -= RATE * _drift(x, rank, step - 1)
        for part, mean in under_way.pop(step, []):
            anchors[part].grad = mean
            outers[part].step()
            for x in theta:
                x[cuts[part]] = alpha * x[cuts[part]] + (1 - alpha) * anchors[part]
        if step % every == 0:
            part = (step // every - 1) % fragments
            mean = sum(anchors[part] - x[cuts[part]] for x in theta) / size
            under_way.setdefault(step + delay, []).append((part, mean))
    return theta


def test_streaming_is_the_formula():
    found = run(_streaming, 2, seconds=120)
    for place, case in enumerate(FORMULA):
        for rank, expected in enumerate(_streaming_by_formula(2, *case)):
            torch.testing.assert_close(found[rank][place], expected, rtol=1e-12, atol=1e-12)


def _lost_moments(rank, size):
    """A single loss of rank 1 is NaN, and its Adam remembers it for ever."""
    net, lines = cases.model(), cases.logged()
    optimizer = _adamw(net)
    with tw.attach(net, optimizer, Local(2)) as sync:
        for step in range(12):
            cases.down(cases.loss_of(net, rank, step) * (torch.nan if rank == 1 and step == 3 else 1.0), optimizer)
        return lines, sync.stats().rejected_steps


def test_it_is_said_when_no_round_is_kept_any_more():
    for rank, (said, rejected) in enumerate(run(_lost_moments, 2, seconds=120)):
        assert rejected == 5
        (line,) = [one for one in said if "nothing was averaged" in one]
        assert f"last 3 rounds: {('another', 'this')[rank]} rank's weights were not finite" in line


def _loaded_late(rank, size):
    """Trained weights, loaded before attach or after it; and with a first step that a GradScaler skips."""
    trained, rows = cases.model(), []
    _train(trained, torch.optim.SGD(trained.parameters(), lr=0.05), 0, 40)
    for options, late, skipped in (
        ({}, False, False), ({}, True, False), ({}, True, True), ({"codec": "none"}, True, False),
    ):  # fmt: skip
        net, lines, scaler = cases.model(), cases.logged(), torch.amp.GradScaler("cpu", enabled=skipped)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        if not late:
            net.load_state_dict(trained.state_dict())
        with tw.attach(net, optimizer, "local", sync_every=2, **options) as sync:
            net.load_state_dict(trained.state_dict())
            with sync.outer_weights():
                kept = all(torch.equal(a, b) for a, b in zip(cases.weights(net), cases.weights(trained), strict=True))
            for step in range(4):
                scaler.scale(cases.loss_of(net, rank, step) * (torch.inf if skipped and step == 0 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        rows.append((kept, sum("weights were changed after attach" in line for line in lines)))
    return rows


def test_it_is_said_when_weights_are_loaded_after_attach():
    """And until the first step they are the outer weights: who evaluates meanwhile gets what was loaded."""
    for rows in run(_loaded_late, 2, seconds=120):
        assert rows == [(True, 0), (True, 1), (True, 1), (True, 0)]


def _thawed(rank, size):
    """A layer is trained from some step on; and what is said is done."""
    net = cases.model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, "local", sync_every=2) as sync:
        _train(net, optimizer, rank, 3)
        net[0].requires_grad_(True)
        words = cases.said(lambda: _train(net, optimizer, rank, 1))
        sync.finish()
    with tw.attach(net, optimizer, "local", sync_every=2) as sync:
        _train(net, optimizer, rank, 3, first=3)
        sync.finish()
    return words, cases.weights(net)


def test_a_layer_that_is_trained_later_is_refused_and_what_to_do_is_said():
    (words, first), (_, second) = run(_thawed, 2)
    assert "0.weight, 0.bias: trainable now" in words
    assert "Call finish() and close(), and attach again" in words
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _then_exact(rank, size):
    """After local steps another method, with the same optimizer, with a new one, and with one that has no state."""
    told = []
    for momentum, new in ((0.9, False), (0.9, True), (0.0, False)):
        net, lines = cases.model(), cases.logged()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
        with tw.attach(net, optimizer, "local", sync_every=2) as sync:
            _train(net, optimizer, rank, 4)
            sync.finish()
        if new:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
        with tw.attach(net, optimizer, "ssgd"):
            _train(net, optimizer, rank, 2, first=4)
        told.append(sum("its state differs between ranks" in line for line in lines))
    return told


def test_it_is_said_that_an_optimizer_of_local_steps_moves_equal_weights_apart():
    assert run(_then_exact, 2) == [[1, 0, 0]] * 2


def _uncounted(rank, size):
    """Of two optimizers one never steps; another one makes the steps of both; and each fifth step is the second's."""
    said = []
    for case in ("one never", "another", "by turns"):
        net, lines = cases.model(), cases.logged()
        named = [torch.optim.SGD(some, lr=0.01) for some in (net[:4].parameters(), net[4:].parameters())]
        other = torch.optim.SGD(net.parameters(), lr=0.01)
        with tw.attach(net, named, Local(2)):
            for step in range(150):
                cases.loss_of(net, rank, step).backward()
                late = case == "by turns" and step % 5 == 4
                (other if case == "another" else named[late]).step()
        said.append(sum("a step counts when every optimizer" in line for line in lines))
    return said


def test_it_is_said_when_optimizers_step_and_nothing_counts():
    assert run(_uncounted, 2, seconds=120) == [[1, 0, 0]] * 2


def test_one_rank_says_nothing_of_steps_that_do_not_count(caplog):
    """There nothing would be averaged anyway."""
    net = cases.model()
    named = [torch.optim.SGD(some, lr=0.01) for some in (net[:4].parameters(), net[4:].parameters())]
    with tw.attach(net, named, Local(2)):
        for _ in range(150):
            named[0].step()
    assert "a step counts when" not in caplog.text


def _lent(rank, size, folder):
    """Inside outer_weights, also after an inner one, nothing takes what is lent for this rank's own."""
    said, net = [], cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, Local(4)) as sync:
        _train(net, optimizer, rank, 6)
        own, state = cases.weights(net), sync.state_dict()
        with sync.outer_weights():
            with sync.outer_weights():
                pass
            for call in (
                optimizer.step,
                sync.finish,
                sync.state_dict,
                lambda: sync.load_state_dict(state),
                lambda: tw.checkpoint.save(folder, net, optimizer, sync, 6),
            ):
                with pytest.raises((RuntimeError, OSError)) as error:
                    call()
                said.append(str(error.value))
        kept = all(torch.equal(a, b) for a, b in zip(own, cases.weights(net), strict=True))
    return said, kept


def test_what_is_lent_is_not_taken_for_the_own(tmp_path):
    for said, kept in run(_lent, 2, str(tmp_path), seconds=120):
        assert kept
        for sentence, words in zip(said, ("step", "finish()", "state_dict()", "load_state_dict()", "state_dict()")):
            assert f"{words} inside outer_weights()" in sentence or "optimizer.step() inside" in sentence


def _moments(rank, size):
    """Weights every 2 steps, the first moment every second round, the other every third; by hand beside it."""
    ours, theirs = cases.model(), cases.model()
    first, second = _adamw(ours), _adamw(theirs)
    settings = Local(2, moments={"exp_avg": 2, "exp_avg_sq": 3})
    with tw.attach(ours, first, settings) as sync:
        _train(ours, first, rank, 14)
        bytes_sent = sync.stats().bytes_sent
    for step in range(14):
        _train(theirs, second, rank, 1, first=step)
        if step % 2:
            round_ = (step + 1) // 2
            some = list(theirs.parameters())
            some += [second.state[p]["exp_avg"] for p in theirs.parameters() if round_ % 2 == 0]
            some += [second.state[p]["exp_avg_sq"] for p in theirs.parameters() if round_ % 3 == 0]
            with torch.no_grad():
                for x in some:
                    dist.all_reduce(x.data)
                    x.div_(size)
    states = [[o.state[p][k] for p in m.parameters() for k in ("exp_avg", "exp_avg_sq")]
              for m, o in ((ours, first), (theirs, second))]  # fmt: skip
    kept, optimizer = cases.weights(ours), torch.optim.SGD(ours.parameters(), lr=0.1)
    with (
        tw.attach(ours, optimizer, Local(2, moments={"exp_avg": 1})),
        pytest.raises(ValueError, match="moments") as said,
    ):
        _train(ours, optimizer, rank, 2)
    return kept, cases.weights(theirs), states, bytes_sent, str(said.value)


def test_moments_are_averaged_at_periods_of_their_own():
    for ours, theirs, (own, other), bytes_sent, said in run(_moments, 2, seconds=120):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
        elements = sum(x.numel() for x in ours)
        assert bytes_sent == pytest.approx((7 + 3 + 2) * 4 * elements, rel=0.01)
        assert said == "moments: the optimizer has no state 'exp_avg'; it has none"
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _inside(rank, size):
    """Two machines of two ranks: against gradients and weights averaged by hand, and against S-SGD over all."""
    rows = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for every, codec in ((3, None), (3, "int8"), (1, None)):
        ours, theirs = cases.model().double(), cases.model().double()
        first, second = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.0 if every == 1 else 0.9)
                         for m in (ours, theirs))  # fmt: skip
        settings = Local(every, codec and _method(codec), inside=tw.SSGD(), fragment_sync_delay=2 if codec else 0)
        with tw.attach(ours, first, settings, topology=tw.Topology(4, 2)) as sync:
            for step in range(7):
                cases.down(cases.loss_of(ours, rank, step, dtype=torch.float64), first)
            apart = cases.weights(ours)
            sync.finish()
            stats = sync.stats()
        for step in range(7):
            cases.loss_of(theirs, rank, step, dtype=torch.float64).backward()
            for p in theirs.parameters():
                dist.all_reduce(p.grad, group=pairs[rank // 2])
                p.grad.div_(2)
            second.step()
            second.zero_grad()
            if (step + 1) % every == 0 or step == 6:
                for p in theirs.parameters():
                    dist.all_reduce(p.data)
                    p.data.div_(size)
        rows.append((apart, cases.weights(ours), cases.weights(theirs), stats.as_dict()))
    return rows


def test_machines_are_apart_and_their_ranks_together():
    by_rank = run(_inside, 4, seconds=200)
    for rows in zip(*by_rank, strict=True):
        for (apart, ended, _, stats), rank in zip(rows, range(4)):
            for a, b in zip(apart, rows[rank // 2 * 2][0], strict=True):
                assert torch.equal(a, b)  # as the other rank of this machine
            for a, b in zip(ended, rows[0][1], strict=True):
                assert torch.equal(a, b)
            assert stats["method"] == "local"
        assert rows[0][3]["bytes_sent"] > rows[1][3]["bytes_sent"]  # the first ranks alone speak across
    for _, ended, theirs, _ in (by_rank[0][0], by_rank[3][2]):
        for a, b in zip(ended, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not all(torch.equal(a, b) for a, b in zip(by_rank[0][0][0], by_rank[2][0][0]))


def _resumed_inside(rank, size):
    """The method inside machines has a residual of its own."""
    settings = Local(3, tw.Cast("int8"), inside=tw.TopK(0.1), fragment_sync_delay=2)
    attach = {"topology": tw.Topology(4, 2), "start_compression_step": 0}
    net = cases.model()
    optimizer = _adamw(net)
    with tw.attach(net, optimizer, settings, **attach) as sync:
        _train(net, optimizer, rank, 7)
        saved = sync.state_dict(), copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        _train(net, optimizer, rank, 6, first=7)
        through = cases.weights(net)
    again = cases.model()
    other = _adamw(again)
    with tw.attach(again, other, settings, **attach) as sync:
        again.load_state_dict(saved[1])
        other.load_state_dict(saved[2])
        sync.load_state_dict(saved[0])
        _train(again, other, rank, 6, first=7)
    return through, cases.weights(again)


def test_what_is_owed_inside_a_machine_is_saved_too():
    for through, again in run(_resumed_inside, 4, seconds=240):
        assert all(torch.equal(a, b) for a, b in zip(through, again, strict=True))


def _bare(rank, size):
    """attach(..., "local"): rounds are waited for until all ranks take the same period, then they overlap."""
    net = cases.model()
    optimizer = _adamw(net)
    rows = []
    with tw.attach(net, optimizer, "local", detect_desync=True) as sync:
        for step in range(30):
            _train(net, optimizer, rank, 1, first=step)
            rows.append((sync.period, sync.stats().settled))
        pinned = chosen(sync)
        note, saved = sync.stats().note, sync.state_dict()
        sync.finish()
    again = cases.model()
    with tw.attach(again, _adamw(again), "local") as sync:
        sync.load_state_dict(saved)
        return rows, note, sync.stats().settled, sync.period, pinned, cases.weights(net)


def test_the_period_is_measured_once_and_equal_on_all_ranks():
    (rows, note, settled, period, found, weights), *others = run(_bare, 3, seconds=120)
    first = [done for _, done in rows].index(True)
    assert first in (5, 11)  # after three rounds in 2 bits, and three in 4 unless those took long
    assert rows[:first] == [(2, False)] * first
    assert all(done for _, done in rows[first:])
    assert len({count for count, _ in rows[first + 2 :]}) == 1
    assert 2 <= rows[-1][0] <= 64
    assert f"every {rows[-1][0]} steps" in note
    assert "; measured: a step takes " in note
    assert note.endswith("; local steps want about 1.7 times the learning rate that is best for DDP")  # root of 3 ranks
    assert (settled, period) == (True, rows[-1][0])
    pinned = local_settings("local", found)
    assert (pinned.sync_every, pinned.codec) in [(period, Cast("int2")), (period, Cast("int4"))]
    assert ", merged " in note if pinned.fragment_sync_delay else ", merged " not in note
    assert f" in {found['codec']};" in note
    for other_rows, _, _, _, others_found, theirs in others:
        assert (other_rows, others_found) == (rows, found)
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def _loaded_while_measuring(rank, size):
    """Three rounds had been measured, and maybe decided on, when it goes back to where two had."""
    net = cases.model()
    optimizer = _adamw(net)
    with tw.attach(net, optimizer, "local") as sync:
        _train(net, optimizer, rank, 4)
        saved = sync.state_dict()
        _train(net, optimizer, rank, 2, first=4)
        sync.load_state_dict(saved)
        settled = []
        for step in range(4, 20):
            _train(net, optimizer, rank, 1, first=step)
            settled.append(sync.stats().settled)
        return settled


def test_what_was_measured_before_a_state_was_loaded_does_not_count():
    settled, others = run(_loaded_while_measuring, 2, seconds=120)
    first = settled.index(True)
    assert first in (5, 11)  # three rounds more, or six
    assert all(settled[first:])
    assert others == settled


def _late(rank, size):
    """A named period: three of it are waited for, then what comes is merged as many steps later as all agree on."""
    net = cases.model()
    optimizer = _adamw(net)
    with tw.attach(net, optimizer, "local", sync_every=4, fragment_sync_delay="auto", detect_desync=True) as sync:
        settled = []
        for step in range(26):
            _train(net, optimizer, rank, 1, first=step)
            settled.append(sync.stats().settled)
        sync.finish()
        assert set(chosen(sync)) == {"sync_every", "fragment_sync_delay"}  # the codec was named, or is the preset's
        return settled, sync.period, sync.stats().note.partition("steps")[0], cases.weights(net)


def test_a_named_period_is_kept_and_its_delay_is_measured():
    (settled, period, note, weights), *others = run(_late, 3, seconds=120)
    assert settled == [False] * 11 + [True] * 15
    assert period == 4
    assert note == "7 rounds, every 4 "
    for *rest, theirs in others:
        assert rest == [settled, period, note]
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def _measured_after_a_start(rank, size):
    net = cases.model()
    optimizer = _adamw(net)
    options = {"sync_every": 2, "fragment_sync_delay": "auto", "start_compression_step": 4}
    with tw.attach(net, optimizer, "local", **options) as sync:
        settled = []
        for step in range(20):
            _train(net, optimizer, rank, 1, first=step)
            settled.append(sync.stats().settled)
        return settled


def test_rounds_that_are_exact_at_first_say_nothing_of_the_codec():
    for settled in run(_measured_after_a_start, 2, seconds=120):
        assert settled == [False] * (2 * (4 + 3) - 1) + [True] * 7


def _lost_while_attaching(rank, size):
    net, before = cases.model(), {*threading.enumerate()}  # a test before in these processes may have left some
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "side_stream", lambda self: self.run(_of_nobody(), "none"))
        with pytest.raises(RuntimeError, match="it was lost"):
            tw.attach(net, _adamw(net), Local(4, fragments=2, fragment_sync_delay=1))
    return [one.name for one in {*threading.enumerate()} - before if one.name == "thinwire-communicator"]


def _of_nobody():
    raise RuntimeError("it was lost")
    yield


def test_an_attach_that_fails_when_its_channels_are_there_leaves_no_thread_behind():
    assert run(_lost_while_attaching, 2, seconds=120) == [[], []]


def _refusals(rank, size):
    said = []
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for arguments, options in (
        ((net, None, "local"), {}),
        ((net, optimizer, "local"), {"sync_every": 0}),
        ((net, optimizer, "local"), {"period": 4}),
        ((net, optimizer, "local"), {"codec": "zip"}),
        ((net, optimizer, "local"), {"codec": "dgc"}),
        ((net, optimizer, "local"), {"lossy": True}),
        ((net, optimizer, Local(4)), {"sync_every": 8}),
        ((net, optimizer, "local"), {"sync_every": 4 + rank}),
        ((net, optimizer, "local"), {"sync_every": 4, "fragment_sync_delay": 4}),
        ((net, optimizer, "local"), {"inside": "ssgd", "topology": tw.Topology(2, 2)}),
        ((net, optimizer, "local"), {"inside": "dear"}),
    ):
        with pytest.raises(ValueError, match="") as error:
            tw.attach(*arguments, **options)
        said.append(str(error.value))
    sync = tw.attach(net, optimizer, "diloco", sync_every=3)
    with pytest.raises(ValueError, match="sync_every") as error:
        sync.load_state_dict(sync.state_dict() | {"local steps": "Local(sync_every=9)"})
    with sync.outer_weights(), pytest.raises(RuntimeError, match="call it outside"):
        optimizer.step()
    if rank:
        next(net.parameters()).data[0] = torch.nan
    with pytest.raises(RuntimeError, match="some rank's weights are not finite"):
        sync.finish()
    net.add_module("late", nn.Linear(2, 2))
    optimizer.add_param_group({"params": net.late.parameters()})
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="late") as late:
        optimizer.step()
    said.append(str(late.value))
    sync.close()
    with pytest.raises(RuntimeError, match="closed"):
        sync.finish()
    dist.barrier()
    return said


WORDS = (
    "pass the optimizer", "sync_every=0", "unknown option of local: 'period'", "zip", "dgc cannot be a codec", "lossy",
    "carries its own", "sync_every", "below sync_every=4", "inside= is for several machines",
    "not decoupled", "late",
)  # fmt: skip


def test_what_cannot_be_is_refused():
    for said in run(_refusals, 2, seconds=120):
        for sentence, words in zip(
            said,
            WORDS,
            strict=True,
        ):
            assert words in sentence


def test_one_rank_is_plain_training():
    weights = []
    for attached in (False, True):
        net = cases.model()
        optimizer = _adamw(net)
        sync = tw.attach(net, optimizer, "diloco", sync_every=2, codec="int8") if attached else contextlib.nullcontext()
        with sync:
            _train(net, optimizer, 0, 7)
            if attached:
                sync.finish()
                assert sync.stats().steps == 7
        weights.append(cases.weights(net))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _one_leaves(rank, size, delay):
    """Rank 1's own code fails before a round that rank 0 waits for."""
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    said = ""
    try:
        with tw.attach(net, optimizer, "local", sync_every=3, fragment_sync_delay=delay, timeout=20):
            for step in range(9):
                if rank == 1 and step == 5:
                    raise KeyError("a batch that is not there")
                _train(net, optimizer, rank, 1, first=step)
    except (RuntimeError, KeyError) as error:
        said = str(error)
    return said


@pytest.mark.parametrize("delay", [0, 2])
def test_who_has_left_is_named(delay):
    waited, left = run(_one_leaves, 2, delay, fresh=True)
    assert "a batch that is not there" in left
    assert "Rank 1 has left at step 5 with KeyError" in waited


def _fewer_steps(rank, size, delay):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    options = {"sync_every": 4, "fragment_sync_delay": delay, "timeout": 30, "detect_desync": True}
    try:
        with tw.attach(net, optimizer, "local", **options) as sync:
            _train(net, optimizer, rank, 10 if rank else 14)
            sync.finish()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("delay", [0, 3])
def test_who_finishes_after_fewer_steps_is_told_with_detect_desync(delay):
    for said in run(_fewer_steps, 2, delay, seconds=20):
        assert "optimizer steps: 12 against 10" in said


def _rounds_apart(rank, size, delay):
    """Rank 0 is in a round of its own when rank 1 has finished: in other bits, whose bytes mean nothing there."""
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    options = {"sync_every": 4, "codec": "int2", "fragment_sync_delay": delay, "timeout": 10}
    said = "a round failed"
    with contextlib.suppress(RuntimeError), tw.attach(net, optimizer, "local", **options) as sync:
        _train(net, optimizer, rank, 10 if rank else 13)
        said = cases.said(sync.finish)
    return said


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_nobody_finishes_while_another_rank_is_in_a_round(delay):
    for said in run(_rounds_apart, 2, delay, seconds=60, fresh=True):
        assert said
        if delay:
            assert said == (
                "ValueError: rank 0 has made 13 steps and rank 1 10, so a round of one waits for the other: give all "
                "ranks as many batches (DistributedSampler, drop_last=True), or wrap the loop in `with sync.join():`"
            )


def _by_one_rank(rank, size, call, folder):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = tw.attach(net, optimizer, "local", sync_every=4, timeout=20)
    _train(net, optimizer, rank, 4)
    calls = {"finish": sync.finish, "save": lambda: tw.checkpoint.save(folder, net, optimizer, sync, 4)}
    said = "" if rank else cases.said(calls[call])
    sync.close()
    return said


@pytest.mark.parametrize("call", ["finish", "save"])
def test_what_one_rank_alone_calls_is_told_to_be_everybodys(tmp_path, call):
    said, _ = run(_by_one_rank, 2, call, tmp_path, fresh=True)
    assert said.endswith(f" All ranks must call {call}().")


def _closed(rank, size, steps, finishes):
    """What the log says at close()."""
    told, net = [], cases.model()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, "local", sync_every=4) as sync:
        _train(net, optimizer, rank, steps)
        if finishes:
            sync.finish()
    sync.close()
    logging.getLogger("thinwire").removeHandler(handler)
    return told


@pytest.mark.parametrize(("steps", "finishes", "times"), [(6, False, 1), (6, True, 0), (4, False, 0), (0, False, 0)])
def test_who_closes_without_the_last_average_is_told_once(steps, finishes, times):
    for told in run(_closed, 2, steps, finishes):
        assert sum("call finish() on all ranks before close()" in text for text in told) == times


def _forgotten(rank, size):
    """The handle is a temporary: model and optimizer hold it, and what holds it ends with close() or with them."""
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    tw.attach(net, optimizer, "local", sync_every=2)
    gc.collect()
    _train(net, optimizer, rank, 4)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(optimizer)]
    handle = weakref.ref(attached_to(net))
    apart = cases.spread(net)
    free = [attached_to(one) is None for one in copies[:2]]
    del net, optimizer
    gc.collect()
    return apart, free, handle() is None


def test_a_handle_that_nobody_keeps_lives_as_long_as_its_model():
    assert run(_forgotten, 2) == [(0.0, [True, True], True)] * 2


class OwnRate(torch.optim.SGD):
    """A rate of its own, as Adafactor's: ``lr`` is None, or missing."""

    def __init__(self, parameters, **given):
        super().__init__(parameters, lr=0.0)
        for group in self.param_groups:
            del group["lr"]
            group.update(given)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.05)


def _without_rate(rank, size):
    found = []
    for given in ({"lr": None}, {}):
        net = cases.model()
        optimizer = OwnRate(net.parameters(), **given)
        with tw.attach(net, optimizer, "local", sync_every=2) as sync:
            _train(net, optimizer, rank, 4)
            sync.finish()
            found.append(cases.spread(net))
        with tw.attach(net, optimizer, "local", sync_every=tw.QSR(0.1)):
            found.append(cases.said(lambda: _train(net, optimizer, rank, 1)))  # noqa: B023
    return found


def test_a_learning_rate_is_asked_for_only_where_the_period_follows_it():
    for first, refused, second, refused_too in run(_without_rate, 2):
        assert first == second == 0.0
        assert refused == refused_too
        assert refused == "ValueError: sync_every=QSR needs the learning rate, and OwnRate has no lr"


class InTwoParts(torch.optim.SGD):
    """As schedule-free ones: the weights are x = w + z in ``eval()``, w in ``train()``; z is in the state."""

    def eval(self):
        self._move(1.0, False)

    def train(self):
        self._move(-1.0, True)

    def _move(self, sign, mode):
        for group in self.param_groups:
            if group.get("train_mode", True) is not mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    p.data.add_(self.state[p].setdefault("z", torch.randn_like(p)), alpha=sign)


def _in_two_parts(rank, size):
    torch.manual_seed(rank)
    net = cases.model()
    optimizer = InTwoParts(net.parameters(), lr=0.05)
    optimizer.param_groups[0]["train_mode"] = True
    with tw.attach(net, optimizer, "local", sync_every=2) as sync:
        _train(net, optimizer, rank, 3)
        refused = [cases.said(sync.finish), cases.said(lambda: sync.outer_weights().__enter__())]
        optimizer.eval()
        sync.finish()
    optimizer.eval()
    return refused, cases.spread(net)


def test_an_optimizer_that_keeps_a_part_of_the_weights_is_asked_for_it_before_the_last_average():
    for refused, apart in run(_in_two_parts, 2):
        assert all("InTwoParts is in training mode" in said and "call optimizer.eval()" in said for said in refused)
        assert apart == 0.0


def test_one_rank_does_not_train_what_is_lent():
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with tw.attach(net, optimizer, Local(2)) as sync, sync.outer_weights():
        assert "inside outer_weights()" in cases.said(optimizer.step)
