"""A run of the bench as it is heard: events of ranks, and whatever else their libraries print."""

from types import SimpleNamespace

import pytest
import torch

from thinwire.tools.bench.rows import Row, parse_rows
from thinwire.tools.bench.session import BenchError, BenchSpec, run_session
from thinwire.tools.bench.trainer import Trainer, build_trainer

SPEC = BenchSpec(model="mlp", rows=parse_rows("ddp"), workers=1, steps=1)


def test_what_a_library_prints_into_the_line_of_an_event_ends_no_run():
    lines = [
        '@@{"state": "building", "row": "ddp"}',
        '@@{"state": "step", "row": "ddp"}2026-11-26 INFO a quorum was formed',
        "@@ is how a word of somebody else's begins",
        '@@"words"',
        "RuntimeError: the last word",
    ]

    def launch(command, *, on_line, timeout_seconds):
        for line in lines:
            on_line(0, line)
        return SimpleNamespace(exit_code=1, emulated=False, note="")

    events = []
    with pytest.raises(BenchError) as error:
        run_session(SPEC, launch, events.append)
    assert [event["state"] for event in events] == ["building", "step"]
    said = str(error.value)
    assert "[0] 2026-11-26 INFO a quorum was formed" in said
    assert "[0] @@ is how a word" in said
    assert said.endswith("[0] RuntimeError: the last word")


def test_a_model_that_a_rank_cannot_build_is_one_sentence():
    def launch(command, *, on_line, timeout_seconds):
        on_line(1, '@@{"refused": "width=65 is not a multiple of heads=6"}')
        on_line(1, "Traceback of what came after")
        return SimpleNamespace(exit_code=1, emulated=False, note="")

    with pytest.raises(BenchError, match=r"^width=65 is not a multiple of heads=6$"):
        run_session(SPEC, launch)


def test_rows_options_and_variants():
    rows = parse_rows(
        "ddp, ddp-best:buckets=1/4, thinwire acp:rank=4,topk:density=0.01,ssgd,local:sync_every=4:codec=int8,"
        "local:sync_every=8:look=0.5,ssgd:collective=threshold:4"
    )
    assert rows == (
        Row("ddp", "ddp"),
        Row("ddp-best (1 MB)", "ddp", {"bucket": 1.0}, "ddp-best"),
        Row("ddp-best (4 MB)", "ddp", {"bucket": 4.0}, "ddp-best"),
        Row("acp rank=4", "acp", {"rank": 4}),
        Row("topk density=0.01", "topk", {"density": 0.01}),
        Row("ssgd", "ssgd"),
        Row("local sync_every=4 codec=int8", "local", {"sync_every": 4, "codec": "int8"}),
        Row("local sync_every=8 look=0.5", "local", {"sync_every": 8, "look": 0.5}),
        Row("ssgd collective=threshold:4", "ssgd", {"collective": "threshold:4"}),
    )
    assert [row.is_thinwire for row in rows] == [False] * 3 + [True] * 6


def test_a_row_of_ones_own():
    (row,) = parse_rows("thinwire.tools.bench.trainer:build_trainer:every=8")
    assert row == Row("thinwire.tools.bench.trainer:build_trainer every=8", row.kind, {"every": 8})
    assert (row.is_custom, row.is_thinwire) == (True, False)
    with pytest.raises(ValueError, match=r"must return a thinwire\.tools\.bench\.trainer\.Trainer, not Row"):
        build_trainer(Row("x", "thinwire.tools.bench.rows:Row"), "label", "kind")
    for period in (0, 1.5):
        with pytest.raises(ValueError, match=f"period={period} must be a whole number of at least 1"):
            Trainer(torch.nn.Identity(), None, period=period)


def test_a_spec_goes_through_json_and_refuses_nonsense():
    spec = BenchSpec("mlp", parse_rows("ddp-best,acp:rank=2"), workers=3, link="1gbit", link_bits=10**9)
    assert BenchSpec.from_json(spec.to_json()) == spec
    for wrong in ({"workers": 0}, {"steps": 0}, {"rounds": 0}, {"warmup": -1}, {"timeout_seconds": 0}):
        with pytest.raises(ValueError):
            BenchSpec("mlp", (), **wrong)
