"""A line per step: continued, whole, and never in the way of the training."""

import json
import logging
import math
import sys
from pathlib import Path
from threading import current_thread

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.engine.stats import BucketStats, Stats
from thinwire.tools.report.log import read_log


class Counter:
    """Counts as if a step sent 100 bytes where S-SGD sends 400."""

    def __init__(self, rank=0, start=0):
        self.rank, self.done = rank, start

    def step(self):
        self.done += 1

    def stats(self):
        return Stats(
            "acp", "", 4, rank=self.rank, steps=self.done, bytes_sent=100 * self.done, dense_bytes=400 * self.done,
            exposed_seconds=0.25 * self.done, buckets=(BucketStats(("w",), 100, False, 100),),
        )  # fmt: skip


def train(sync, path, steps, **options):
    with tw.StepLog(sync, path, **options) as log:
        for _ in range(steps):
            sync.step()
            log.write(loss=torch.tensor(1.0 / sync.done, requires_grad=True))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_step(tmp_path):
    path = tmp_path / "steps.jsonl"
    train(Counter(), path, 3)
    first, plan, *steps = lines(path)
    assert (first["kind"], first["method"], first["world_size"]) == ("run", "acp", 4)
    assert plan["buckets"] == [{"names": ["w"], "elements": 100, "dense": False, "bytes_per_step": 100}]
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert all((one["bytes_sent"], one["dense_bytes"], one["exposed_seconds"]) == (100, 400, 0.25) for one in steps)
    assert [one["values"]["loss"] for one in steps] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert all(one["seconds"] > 0 and one["steps"] == 1 for one in steps)
    assert read_log(path) == steps


def test_a_log_goes_on_and_the_later_run_counts(tmp_path):
    path = tmp_path / "steps.jsonl"
    train(Counter(), path, 5)
    whole = path.read_text()
    path.write_text(whole[:-20])  # killed while it wrote
    train(Counter(start=3), path, 4)  # from the checkpoint after step 3
    assert path.read_text().startswith(whole.rpartition("\n")[0].rpartition("\n")[0])
    assert all(isinstance(one, dict) for one in lines(path))
    assert [one["step"] for one in read_log(path)] == list(range(1, 8))
    assert sum(one["kind"] == "run" for one in lines(path)) == 2


def test_every_few_steps_a_line_that_covers_them(tmp_path):
    train(Counter(), tmp_path / "steps.jsonl", 7, every=3)
    found = read_log(tmp_path / "steps.jsonl")
    assert [(one["step"], one["steps"], one["bytes_sent"]) for one in found] == [(3, 3, 300), (6, 3, 300)]


def test_rank_0_writes_alone_unless_each_has_a_file(tmp_path):
    for rank in range(2):
        train(Counter(rank), tmp_path / "one.jsonl", 2)
        train(Counter(rank), tmp_path / "rank-{rank}.jsonl", 2)
    assert len(read_log(tmp_path / "one.jsonl")) == 2
    assert [one["kind"] for one in lines(tmp_path / "one.jsonl")].count("run") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"one.jsonl", "rank-0.jsonl", "rank-1.jsonl"}


def test_nothing_ends_the_training(tmp_path, caplog):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    caplog.set_level(logging.WARNING, "thinwire")
    real = Path.open

    def on_a_full_disk(path, mode="r", **options):
        return real(Path("/dev/full") if mode == "a" else path, mode, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", on_a_full_disk)
        log = tw.StepLog(Counter(), tmp_path / "steps.jsonl")
    with log:
        for _ in range(3):
            log.write(loss=1.0)
    (said,) = [record.getMessage() for record in caplog.records if record.threadName == current_thread().name]
    assert "No space left" in said
    caplog.clear()
    with tw.StepLog(Counter(), tmp_path / "other.jsonl") as log:
        log.write(loss="low", each=torch.ones(2), step=7)
    assert "leaves out loss" in caplog.text
    assert "'low'" in caplog.text
    written = read_log(tmp_path / "other.jsonl")
    assert [(one["step"], one["values"]) for one in written] == [(7, {"loss": None, "each": None})]


class Unwilling:
    """As a tensor whose device has failed."""

    def __float__(self):
        raise MemoryError("the device has failed")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"step": torch.tensor(3), "loss": torch.tensor(0.5, requires_grad=True)}, (3, {"loss": 0.5})),
        ({"step": np.int64(3), "loss": np.float32(0.5)}, (3, {"loss": 0.5})),
        ({"loss": 10**400, "norm": math.inf}, (1, {"loss": None, "norm": math.inf})),
        ({"step": math.nan, "loss": 1j}, (1, {"loss": None})),
        ({"step": "x", "loss": Unwilling()}, (1, {"loss": None})),
    ],
)
def test_any_kind_of_number(given, kept, tmp_path):
    sync = Counter()
    with tw.StepLog(sync, tmp_path / "a.jsonl") as log:
        sync.step()
        log.write(**given)
    assert "Infinity" not in (tmp_path / "a.jsonl").read_text()
    assert [(one["step"], one["values"]) for one in read_log(tmp_path / "a.jsonl")] == [kept]


def test_a_log_that_somebody_changed_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"kind": "step", "step": 4, "values": {"loss": "low"}}')
    with pytest.raises(ValueError, match=f"{path} is not a step log: could not convert"):
        read_log(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "needs a path"), ({"path": "a", "every": 0}, "at least 1"), ({"path": "no/a"}, "cannot be opened")],
)
def test_wrong_options(options, says):
    with pytest.raises(ValueError, match=says):
        tw.StepLog(Counter(), **options)


def test_on_one_rank_of_the_engine(tmp_path):
    model = torch.nn.Linear(4, 2)
    sync = tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "ssgd")
    with tw.StepLog(sync, tmp_path / "steps.jsonl") as log:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            log.write()
    sync.close()
    assert [(one["step"], one["steps"]) for one in read_log(tmp_path / "steps.jsonl")] == [(1, 1), (2, 1)]


def test_tensorboard_shows_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(Counter(), tmp_path / "steps.jsonl", 3, tensorboard=tmp_path / "board")
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    written = read_log(tmp_path / "steps.jsonl")
    for name in ("bytes_sent", "dense_bytes", "exposed_seconds", "seconds"):
        shown = [(event.step, event.value) for event in board.Scalars(f"thinwire/{name}")]
        assert shown == [(one["step"], pytest.approx(one[name])) for one in written]
    assert [event.value for event in board.Scalars("loss")] == [pytest.approx(1 / n) for n in (1, 2, 3)]


def test_a_function_gets_the_same_figures_on_rank_0_and_its_failure_is_one_warning(tmp_path, caplog):
    told = []
    train(Counter(), tmp_path / "steps.jsonl", 3, on_step=lambda step, figures: told.append((step, figures)))
    train(Counter(rank=1), None, 3, on_step=lambda step, figures: told.append((step, figures)))
    written = read_log(tmp_path / "steps.jsonl")
    assert [step for step, _ in told] == [1, 2, 3]
    assert [one["thinwire/bytes_sent"] for _, one in told] == [one["bytes_sent"] for one in written]
    assert [one["loss"] for _, one in told] == [one["values"]["loss"] for one in written]
    train(Counter(), None, 3, on_step=lambda step, figures: 1 / 0)
    (warning,) = caplog.messages
    assert "the figures of step 1 could not be passed on: division by zero" in warning


def test_without_tensorboard_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'thinwire\[tensorboard\]'"):
        tw.StepLog(Counter(), tensorboard=tmp_path)
