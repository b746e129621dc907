"""Layers that leave by a calendar on real ranks, which agree on it by what they have measured."""

import copy
import sys
from pathlib import Path

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.engine.local import Local, Nesterov

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "local"))
from local_ranks import Ranks

EVERY = 2
WAITED, TRIED = 3 * EVERY, 9 * EVERY  # steps, until nothing is waited for, and until the last calendar was tried
START = 2 * EVERY  # steps of rounds that are exact, before topk begins: they are waited for, and not measured
STEPS = TRIED + START + 5
CODECS = {"none": None, "int8": tw.Cast("int8"), "topk": tw.TopK(0.1)}


def _settings(codec, **options):
    return Local(EVERY, codec, schedule="dream", outer=Nesterov(0.7, 0.5), **options)


def _change(shape, rank, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return 0.01 * torch.randn(shape, generator=draw, dtype=torch.float64)


def _walk(rank, size):
    """Weights that change without regard to what is exchanged, so that the same may be done in one process."""
    rows = {}
    for name, codec in CODECS.items():
        net = cases.model().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        start = {n: p.detach().clone() for n, p in net.named_parameters()}
        outer, calendars, settled = [], [], []
        with tw.attach(net, optimizer, _settings(codec), keep_dense="none", detect_desync=True) as sync:
            for step in range(STEPS):
                with torch.no_grad():
                    for p in net.parameters():
                        p.sub_(_change(p.shape, rank, step))
                optimizer.step()
                with sync.outer_weights():
                    outer += cases.weights(net)
                settled.append(sync.stats().settled)
                if step % EVERY == EVERY - 1:
                    calendars.append(sync.state_dict()["outer"]["calendar"])  # of the next period
            apart = {n: p.detach().clone() for n, p in net.named_parameters()}
            note = sync.stats().note
            sync.finish()
            rows[name] = start, outer, settled, apart, calendars, note, cases.weights(net)
    return rows


@pytest.mark.dist
def test_ranks_follow_one_calendar_and_do_what_rounds_without_an_engine_do():
    found = run(_walk, 2, seconds=200)
    for name, codec in CODECS.items():
        (start, outer, settled, _, calendars, note, ended), other = found[0][name], found[1][name]
        assert other[4] == calendars
        for calendar in calendars:
            assert sorted({layer for leaving in calendar for layer in leaving}) == [0, 1, 2, 3]
        assert all(torch.equal(a, b) for a, b in zip(outer, other[1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ended, other[6], strict=True))
        exact = START if name == "topk" else 0
        ends = 2 * WAITED - 1 + exact, TRIED - 1 + exact  # nothing leaves again, or that was tried too
        assert settled.index(True) in ends
        assert settled == sorted(settled)
        assert note.split("measured: ")[1].startswith("a step takes ")
        world = Ranks(_settings(codec), [{n: x.clone() for n, x in start.items()} for _ in range(2)])
        for step in range(STEPS):
            if step >= WAITED + exact and step % EVERY == 0:
                for rounds in world.rounds:
                    rounds.trial, rounds.calendar = True, calendars[step // EVERY - 1]
            for rank, own in enumerate(world.weights):
                for x in own.values():
                    x.sub_(_change(x.shape, rank, step))
            world.step()
        for rank, own in enumerate(world.weights):
            for n, x in own.items():
                torch.testing.assert_close(found[rank][name][3][n], x, rtol=1e-12, atol=1e-12)


def _resumed(rank, size):
    rows = []
    for codec, more in ((None, 1), (tw.ACP(rank=2, min_rate=1.0), 2), (tw.TopK(0.1), 3)):
        stop = TRIED + START + more
        net = cases.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with tw.attach(net, optimizer, _settings(codec)) as sync:
            cases.walk(net, optimizer, rank, 0, stop)
            saved = sync.state_dict(), copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
            cases.walk(net, optimizer, rank, stop, stop + 7)
            through = cases.weights(net)
        again = cases.model()
        other = torch.optim.AdamW(again.parameters(), lr=1e-2)
        with tw.attach(again, other, _settings(codec)) as sync:
            again.load_state_dict(saved[1])
            other.load_state_dict(saved[2])
            sync.load_state_dict(saved[0])
            cases.walk(again, other, rank, stop, stop + 7)
        under_way = [fragment["due"] for fragment in saved[0]["outer"]["fragments"] if fragment["due"] is not None]
        rows.append((through, cases.weights(again), len(under_way)))
    return rows


@pytest.mark.dist
def test_training_goes_on_bit_for_bit_by_the_same_calendar():
    for rows in run(_resumed, 2, seconds=200):
        for through, again, under_way in rows:
            assert under_way
            assert all(torch.equal(a, b) for a, b in zip(through, again, strict=True))
