"""Prices of the network: measured between the first steps, remembered for the next start, never in the way."""

import json
import logging
import os
from pathlib import Path

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.pricing.costs import KINDS
from thinwire.engine.controller import network, pilot
from thinwire.predict.measure.gradual import GradualProbe

pytestmark = pytest.mark.dist
ALWAYS = len(KINDS) * 2  # sizes of each kind


def _start(rank, folder, *, tolerance=1e9, steps=12, **attach):
    """One start of a script; what it has measured, and said."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    before, network.TOLERANCE = network.TOLERANCE, tolerance
    try:
        net = cases.model(width=64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with tw.attach(net, optimizer, "auto", **attach) as sync:
            for step in range(steps):
                cases.down(cases.loss_of(net, rank, step, width=64), optimizer)
            found = sync.services.controller.network
            return found.measured, found.checked, sync.stats().why, found.costs.to_json()
    finally:
        network.TOLERANCE = before


def _twice(rank, size, folder):
    return [_start(rank, folder) for _ in range(2)] + [_start(rank, folder, tolerance=-1.0)]


def test_the_second_start_measures_nothing_and_says_from_when_its_prices_are(tmp_path):
    ranks = run(_twice, 2, tmp_path)
    assert ranks[0] == ranks[1]
    first, second, third = ranks[0]
    assert first[0] >= ALWAYS
    assert first[1] == 0
    assert first[2][-1].startswith("prices: measured in ")
    assert second[:2] == (0, 5)
    assert second[2][-1].startswith("prices: remembered from 20")
    assert json.loads(second[3])["exchanges"] == json.loads(first[3])["exchanges"]
    assert third[0] >= ALWAYS
    assert third[1] == 5
    assert "measured again" in third[2][-1]
    (kept,) = (tmp_path / "thinwire").iterdir()
    assert json.loads(kept.read_text())["costs"]["exchanges"] == json.loads(third[3])["exchanges"]


def _lossy(rank, size, folder):
    return [_start(rank, folder, lossy=lossy) for lossy in (False, True, True)]


def test_compute_is_measured_where_it_is_asked_for_and_remembered_too(tmp_path):
    exact, lossy, again = run(_lossy, 2, tmp_path)[0]
    provenance = [{k: v["provenance"] for k, v in json.loads(row[3])["compute"].items()} for row in (exact, lossy)]
    assert provenance[0] == {**dict.fromkeys(provenance[0], "assumed"), "memory": "measured here"}
    assert set(provenance[1].values()) == {"measured here"}
    assert [row[0] for row in (lossy, again)] == [0, 0]
    assert json.loads(again[3]) == json.loads(lossy[3])


def _damaged(rank, size, folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("thinwire")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _start(rank, folder)
        for path in (Path(folder) / "thinwire").iterdir() if rank == 0 else ():
            path.write_text('{"day": ')
        damaged = _start(rank, folder)
        if rank == 0:
            (Path(folder) / "file").write_text("")
        nowhere = _start(rank, Path(folder) / "file")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return damaged[0], nowhere[0], [line for line in lines if "remembered" in line and "prices" not in line]


def test_a_file_that_cannot_be_read_or_written_is_a_line_in_the_log(tmp_path):
    ranks = run(_damaged, 2, tmp_path)
    assert all(count >= ALWAYS for row in ranks for count in row[:2])
    read, written = ranks[0][2]
    assert "cannot be read" in read
    assert "cannot be remembered" in written
    assert ranks[1][2] == []  # rank 0's alone


def _off(rank, size, folder):
    os.environ["THINWIRE_REMEMBER"] = "0"
    try:
        return [_start(rank, folder)[0] for _ in range(2)]
    finally:
        del os.environ["THINWIRE_REMEMBER"]


def test_remembering_can_be_turned_off(tmp_path):
    assert all(count >= ALWAYS for row in run(_off, 2, tmp_path) for count in row)
    assert list(tmp_path.iterdir()) == []


def _pieces(rank, size, folder):
    """After which steps it is measured, and how often at once."""
    seen = []
    advance = GradualProbe.advance

    def counted(self):
        before = self.measured
        advance(self)
        seen.append(self.measured - before)

    GradualProbe.advance = counted
    try:
        measured = _start(rank, folder)[0]
    finally:
        GradualProbe.advance = advance
    return seen, measured


def test_the_measurement_is_spread_over_the_steps_that_are_timed(tmp_path):
    ranks = run(_pieces, 2, tmp_path)
    assert ranks[0] == ranks[1]
    pieces, measured = ranks[0]
    assert len(pieces) == pilot.PROFILE_STEPS
    assert sum(pieces) == measured
    assert pieces[0] > 0


def _machines(rank, size, folder):
    return _start(rank, folder, topology=tw.Topology(size, [2, 1]))


def test_groups_of_machines_have_prices_too(tmp_path):
    ranks = run(_machines, 3, tmp_path)
    keys = {tuple(key) for key, _ in json.loads(ranks[0][3])["exchanges"]}
    assert keys == {(kind, *group) for kind in KINDS for group in (("world", 3), ("node", 2), ("cross", 2))}
    assert len({row[3] for row in ranks}) == 1


def _dies(rank, size, folder):
    if rank == 1:
        GradualProbe.advance = lambda self: os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        _start(rank, folder, timeout=20)
    return str(caught.value)


def test_a_rank_that_dies_while_it_is_measured_is_named(tmp_path):
    said, _ = run(_dies, 2, tmp_path, expect_exit={1: 3})
    assert "measuring the network failed" in said
    assert "Rank 1 did not report" in said
