"""Every method and every way through the engine on the simulated card.

No race, no early free, no wrong device. How often a steady step waits for the card and how much it launches there is
exact, in ``counts.json``; after a change that is meant, write it anew::

    python tests/simcuda/test_sim_cases.py
"""

import functools
import gc
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parent), str(here.parent / "unit")]

from sim_cases import CASES, DILOCO, LOCAL, STEPS, WAITING
from training import training

import thinwire as tw
from thinwire.engine.local.memory import predict_memory
from thinwire.engine.local.settings import local_settings

GOLDEN = Path(__file__).with_name("counts.json")
COUNTED = 2
"""Steps, the last ones: low rank takes turns, and K-FAC inverts in every second."""


@functools.cache
def ran(name):
    """What is found, where the counted steps wait, and how much they launch."""
    with CASES[name]() as run:
        for step in range(STEPS):
            if step == STEPS - COUNTED:
                run.card.waits.clear()
                run.card.names.clear()
            run.step()
        waits = [one for one in run.card.waits if not one.where.startswith(("test: ", "torch.optim/"))]
        launches = run.card.launches
        generators = run.card.names["torch.Generator"]
    return Counter(map(str, run.card.findings)), Counter(map(str, waits)), launches, generators


def counts(name):
    _, waits, launches, _ = ran(name)
    return {"waits": sum(waits.values()), "launches": launches}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name):
    assert not ran(name)[0]


@pytest.mark.parametrize("name", CASES)
def test_counts(name):
    pytest.importorskip("triton", reason="a kernel is one launch, torch's are several")
    assert counts(name) == json.loads(GOLDEN.read_text())[name], ran(name)[1]


@pytest.mark.parametrize("name", sorted(set(CASES) - set(WAITING)))
def test_a_steady_step_never_waits(name):
    assert not ran(name)[1]


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "DDP, qsgd"])
def test_no_generator_is_made_in_a_step(name):
    assert ran(name)[3] == 0


@pytest.mark.parametrize("name", [name for name in WAITING if name.startswith("unused")])
def test_what_nobody_uses_is_read_once_a_step(name):
    assert sum(ran(name)[1].values()) == COUNTED


@pytest.mark.parametrize("name", [name for name in WAITING if "K-FAC" in name and "eigen" not in name])
def test_inverting_waits_for_no_single_factor(name):
    """``torch.linalg.eigh`` waits by itself."""
    assert not any("core/kernels/symmetric.py" in one for one in ran(name)[1])


@pytest.mark.parametrize("name", ["acp-rank=2-min_rate=1.0", "powersgd-rank=2-min_rate=1.0"])
def test_low_rank_waits_once_to_compare_its_bases(name):
    with CASES[name]() as run:
        run.step()  # the plan is made again
        run.card.waits.clear()
        for _ in range(STEPS):
            run.step()
        assert [one.where.split(":")[0] for one in run.card.waits] == ["core/methods/lowrank.py"]


@pytest.mark.parametrize("name", [name for name in WAITING if "in host memory" in name])
def test_a_steady_step_waits_for_no_copy_and_pins_nothing(name):
    with CASES[name]() as run:
        for step in range(2 * STEPS):
            if step == STEPS:
                run.card.waits.clear()
                run.card.pinned.clear()
            run.step()
        assert {one.where.split(":")[0] for one in run.card.waits} == {"core/program/state.py"}  # if a round counts
        assert not [place for place in run.card.pinned if place.startswith("engine/local/")]


@pytest.mark.parametrize(
    "options",
    [
        {**LOCAL, "fragment_sync_delay": 1, "look": 0.5},
        {**LOCAL, "outer": tw.Nesterov()},
        {**DILOCO, "outer": tw.Nesterov()},
    ],
    ids=str,
)
def test_local_steps_in_host_memory_have_the_same_bits(options):
    found = []
    for anchors in ("device", "cpu"):
        with training("local", anchors=anchors, **options) as run:
            for _ in range(STEPS):
                run.step()
            run.sync.finish()
            found.append([p.detach().inner.clone() for p in run.model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("first", [3, 4])  # between rounds of a fragment, and within one
def test_host_memory_continues_bit_for_bit(first):
    found = []
    for again in (False, True):
        with CASES["diloco, late, in host memory"]() as run:
            for step in range(2 * STEPS):
                if again and step == first:
                    held, state = run.card.bytes, run.sync.state_dict()
                    run.sync.load_state_dict(state)
                    del state
                    assert run.card.bytes <= held
                run.step()
            assert not run.card.findings
            with run.sync.outer_weights():
                found.append([p.detach().inner.clone() for p in run.model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def _layers():
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 128), *(nn.Linear(128, 128) for _ in range(5)))


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "int8", "outer": tw.Nesterov()},
        {"codec": "int8", "outer": tw.Nesterov(), "anchors": "cpu"},
        {"codec": "int2", "look": 0.5},
        {"codec": "powersgd"},
        {"codec": "powersgd", "anchors": "cpu"},
        {"codec": "none"},
    ],
    ids=str,
)
def test_the_memory_between_rounds_is_what_was_counted(options):
    with training(
        "local", model=_layers, optimizer=torch.optim.AdamW, sync_every=2, start_compression_step=0, **options
    ) as run:
        for _ in range(STEPS):
            run.step()
        gc.collect()
        rows = {row.kind: row for row in run.sync.memory()}
        shapes = [(name, tuple(p.shape)) for name, p in run.model.named_parameters()]
        before = predict_memory(
            local_settings("local", {"sync_every": 2, **options}), shapes, sites=4, dtype=torch.float32
        )
        assert [row.kind for row in before] == list(rows)
        for row in before:  # but for the steps that Adam counts
            assert (row.device, row.host) == pytest.approx((rows[row.kind].device, rows[row.kind].host), rel=0.001)
        counted = sum(row.device for kind, row in rows.items() if kind not in ("gradients", "under way, at most"))
        assert run.card.bytes == pytest.approx(counted, rel=0.01)
        assert sum(row.host for row in rows.values()) > 0 or "anchors" not in options


def test_a_card_holds_no_more_than_what_is_under_way():
    """The fragment that travels is there whole, and nothing of the others."""
    with training(
        "diloco", model=_layers, optimizer=torch.optim.AdamW, codec="int8", sync_every=8, fragments=4,
        fragment_sync_delay=1, start_compression_step=0, anchors="cpu",
    ) as run:  # fmt: skip
        for _ in range(16):
            run.step()
        found = {True: [], False: []}
        for _ in range(8):
            run.step()
            gc.collect()
            found[bool(run.sync.pending)].append(run.card.bytes)
        under_way = {row.kind: row.device for row in run.sync.memory()}["under way, at most"]
        assert [len(x) for x in found.values()] == [4, 4]
        assert max(found[False]) == min(found[False])
        assert 0.8 * under_way < max(found[True]) - max(found[False]) <= under_way


def test_the_file_has_no_other_cases():
    assert list(json.loads(GOLDEN.read_text())) == list(CASES)


if __name__ == "__main__":
    rows = [f"  {json.dumps(name)}: {json.dumps(counts(name))}" for name in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
