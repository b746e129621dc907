"""Checkpoints on one rank: damaged files, wrong arguments, what a failed or killed writer leaves, two jobs."""

import json
import logging
import os
import shutil
from threading import current_thread

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from spawned import fork
from thinwire.core.program import State
from thinwire.engine.session import warn_if_state_missing
from thinwire.systems.kfac import KFAC, Variant


def _job(method="ssgd", width=4, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, tw.attach(net, optimizer, method, **options)


def _train(net, optimizer, steps=1):
    for _ in range(steps):
        net(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def two_steps(tmp_path):
    """A directory with steps 1 and 2, and the weights of both."""
    net, optimizer, sync = _job()
    weights = {}
    for step in (1, 2):
        _train(net, optimizer)
        tw.checkpoint.save(tmp_path, net, optimizer, sync, step)
        weights[step] = [p.detach().clone() for p in net.parameters()]
    sync.close()
    return tmp_path, weights


def _same(net, weights):
    return all(torch.equal(a, b) for a, b in zip(net.parameters(), weights))


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(3000)),
    "one bit": _flip,
    "foreign": lambda path: torch.save({"epoch": 3}, path),
    "a list": lambda path: torch.save([1, 2], path),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


FILES = ["model.pt", "rank-00000.pt", "files.json"]
ANOTHER_FAULT = [("missing", "model.pt"), ("one bit", "files.json")]
"""The first is no checkpoint at all, the second names the file whose sum it has changed."""


@pytest.mark.parametrize(
    "damage, name", [(damage, name) for damage in DAMAGES for name in FILES if (damage, name) not in ANOTHER_FAULT]
)
def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(two_steps, caplog, damage, name):
    folder, weights = two_steps
    file = folder / "step-000000002" / name
    DAMAGES[damage](file)
    net, optimizer, sync = _job()
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert tw.checkpoint.load(folder, net, optimizer, sync) == 1
    assert _same(net, weights[1])
    (said,) = [record.getMessage() for record in caplog.records if record.threadName == current_thread().name]
    assert str(file) in said
    assert "continuing from" in said
    net, optimizer, sync = _job()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError) as error:
        tw.checkpoint.load(folder, net, optimizer, sync, step=2)
    assert str(file) in str(error.value)
    assert _same(net, before)


def _state(net, optimizer, sync):
    return [p.detach().clone() for p in net.parameters()], optimizer.state_dict()["state"], sync.services.state.step


@pytest.mark.parametrize("what", ["model", "optimizer", "method"])
def test_what_does_not_fit_changes_nothing(tmp_path, what):
    net, optimizer, sync = _job("acp", rank=2)
    _train(net, optimizer, 2)
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    sync.close()
    net, optimizer, sync = _job("topk" if what == "method" else "acp", width=5 if what == "model" else 4,
                                **({"density": 0.1} if what == "method" else {"rank": 2}))  # fmt: skip
    if what == "optimizer":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    _train(net, optimizer)
    before = _state(net, optimizer, sync)
    with pytest.raises(ValueError, match=r"does not fit|by 'acp'|the model's parameter has \[5, 6\]"):
        tw.checkpoint.load(tmp_path, net, optimizer, sync)
    after = _state(net, optimizer, sync)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_older_step_is_not_taken_where_the_newest_does_not_fit(tmp_path):
    net, optimizer, sync = _job()
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 1)
    sync.close()
    wide, wide_optimizer, wide_sync = _job(width=5)
    tw.checkpoint.save(tmp_path, wide, wide_optimizer, wide_sync, 2)
    net, optimizer, sync = _job()
    with pytest.raises(ValueError, match="step-000000002 does not fit"):
        tw.checkpoint.load(tmp_path, net, optimizer, sync)


@pytest.mark.parametrize(
    "options", [{"step": -1}, {"step": 1.5}, {"step": None}, {"step": True}, {"step": "3"}, {"step": 3, "keep": -1},
                {"step": 3, "keep": None}, {"step": 3, "keep": 0.5}],
)  # fmt: skip
def test_wrong_numbers_are_refused_before_anything_is_written(tmp_path, options):
    net, optimizer, sync = _job()
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number of at least 0"):
        tw.checkpoint.save(tmp_path / "new", net, optimizer, sync, **options)
    assert not (tmp_path / "new").exists()


def test_whole_numbers_of_other_kinds_are_taken(tmp_path):
    net, optimizer, sync = _job()
    for step in (np.int64(3), torch.tensor(4)):
        tw.checkpoint.save(tmp_path, net, optimizer, sync, step)
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync, np.int64(3)) == 3
    with pytest.raises(ValueError, match="step=-1 must be"):
        tw.checkpoint.load(tmp_path, net, optimizer, sync, -1)


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    net, optimizer, sync = _job()
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is not a directory"):
        tw.checkpoint.load(file, net, optimizer, sync)
    with pytest.raises(OSError, match=r"no checkpoint was written at .*file is not a directory"):
        tw.checkpoint.save(file, net, optimizer, sync, 1)
    with pytest.raises(OSError, match=r"no checkpoint was written at .*Not a directory: "):
        tw.checkpoint.save(file / "below", net, optimizer, sync, 1)
    assert file.read_text() == "mine"


def test_what_killed_writers_left_is_removed_and_later_steps_are_left_alone(two_steps):
    folder, _ = two_steps
    shutil.copytree(folder / "step-000000001", folder / ".partial-step-000000007")
    shutil.copytree(folder / "step-000000001", folder / ".old-step-000000001")
    shutil.copytree(folder / "step-000000001", folder / "step-000000009")
    (folder / "notes").mkdir()
    net, optimizer, sync = _job()
    for step in (2, 3, 4):
        tw.checkpoint.save(folder, net, optimizer, sync, step, keep=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".lock", "notes", "step-000000004", "step-000000009"]


def test_who_went_back_goes_on_from_what_was_written_last(two_steps, caplog):
    folder, _ = two_steps
    net, optimizer, sync = _job()
    for step in (3, 5):
        tw.checkpoint.save(folder, net, optimizer, sync, step, keep=0)
    assert tw.checkpoint.load(folder, net, optimizer, sync, step=2) == 2
    _train(net, optimizer, 7)
    weights = [p.detach().clone() for p in net.parameters()]
    tw.checkpoint.save(folder, net, optimizer, sync, 4, keep=0)
    sync.close()
    net, optimizer, sync = _job()
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert tw.checkpoint.load(folder, net, optimizer, sync) == 4
    assert "step-000000004 counts, which was written last, and not the later 5" in caplog.text
    assert _same(net, weights)
    assert [path.name[-1] for path in tw.checkpoint.complete(folder)] == ["1", "2", "3", "5", "4"]
    tw.checkpoint.save(folder, net, optimizer, sync, 6, keep=0)
    caplog.clear()
    assert tw.checkpoint.load(folder, net, optimizer, sync) == 6
    assert not caplog.records


def test_a_bucket_and_a_home_directory_are_no_local_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    net, optimizer, sync = _job()
    for call in (
        lambda: tw.checkpoint.save("s3://bucket/run", net, optimizer, sync, 1),
        lambda: tw.checkpoint.load("s3://bucket/run", net, optimizer, sync),
        lambda: tw.StepLog(sync, "s3://bucket/steps.jsonl"),
    ):
        with pytest.raises(ValueError, match="is an address"):
            call()
    tw.checkpoint.save("~/run", net, optimizer, sync, 1)
    assert tw.checkpoint.load("~/run", net, optimizer, sync) == 1
    with tw.StepLog(sync, "~/steps.jsonl") as log:
        log.write()
    assert [p.name for p in tmp_path.iterdir()] == ["home"]
    assert {p.name for p in (tmp_path / "home").iterdir()} == {"run", "steps.jsonl"}
    sync.close()


def test_steps_are_sorted_as_numbers(tmp_path):
    net, optimizer, sync = _job()
    for step in (999_999_999, 1_000_000_000):
        tw.checkpoint.save(tmp_path, net, optimizer, sync, step)
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync) == 1_000_000_000


def _as_other_job(pipe, folder):
    """Saves once, and then goes on by a word at a time."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer)
    try:
        tw.checkpoint.save(folder, net, optimizer, sync, 1)
        pipe.send("saved")
    except OSError as error:
        pipe.send(str(error))
    pipe.recv()


@pytest.fixture
def other_job():
    started = []

    def start(folder):
        here, there = fork.Pipe()
        process = fork.Process(target=_as_other_job, args=(there, folder))
        process.start()
        started.append((process, here, there))
        return process, here.recv()

    yield start
    for process, *ends in started:
        process.kill()
        process.join()
        for end in ends:
            end.close()


def test_a_second_job_in_one_directory_is_refused_until_the_first_is_dead(tmp_path, other_job):
    other, said = other_job(tmp_path)
    assert said == "saved"
    net, optimizer, sync = _job()
    with pytest.raises(OSError, match=f"no checkpoint was written at .*another job .* in {tmp_path}") as error:
        tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    assert f"process {other.pid} on " in str(error.value)
    assert [path.name for path in tw.checkpoint.complete(tmp_path)] == ["step-000000001"]
    other.kill()
    other.join()
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    _, said = other_job(tmp_path)  # a third: this process has it now
    assert f"process {os.getpid()} on " in said
    sync.close()
    assert other_job(tmp_path)[1] == "saved"


def test_a_detached_sync_gives_the_directory_back_and_another_of_this_process_keeps_it(tmp_path, other_job):
    jobs = [_job(), _job()]
    for net, optimizer, sync in jobs:
        tw.checkpoint.save(tmp_path, net, optimizer, sync, 1)
    jobs[0][2].close()
    assert "another job" in other_job(tmp_path)[1]
    jobs[1][2].close()
    assert other_job(tmp_path)[1] == "saved"


def test_a_job_that_was_passed_over_is_refused(tmp_path):
    """As where the file system has no locks: the job that came last has the directory."""
    net, optimizer, sync = _job()
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 1)
    (tmp_path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 12, "since": "today"}))
    with pytest.raises(OSError, match="process 12 on 'elsewhere', since 'today'"):
        tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    assert [path.name for path in tw.checkpoint.complete(tmp_path)] == ["step-000000001"]
    (tmp_path / ".lock").unlink()
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)


def test_a_companion_that_does_not_fit_changes_nothing(tmp_path):
    def job(scaling):
        net, optimizer, sync = _job()
        return net, optimizer, sync, KFAC(net, sync, damping=0.1, variant=Variant(scaling=scaling))

    net, optimizer, sync, _ = job("authors")
    _train(net, optimizer, 2)
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    sync.close()
    net, optimizer, sync, kfac = job("reference")
    _train(net, optimizer)
    before, passes = _state(net, optimizer, sync), kfac.passes
    with pytest.raises(ValueError, match="saved with scaling='authors'"):
        tw.checkpoint.load(tmp_path, net, optimizer, sync)
    torch.testing.assert_close(_state(net, optimizer, sync), before, rtol=0, atol=0)
    assert kfac.passes == passes


def test_what_is_saved_of_something_that_is_not_here_is_named(tmp_path, caplog):
    net, optimizer, sync = _job()
    KFAC(net, sync)
    _train(net, optimizer, 2)
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    sync.close()
    net, optimizer, sync = _job()
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert tw.checkpoint.load(tmp_path, net, optimizer, sync) == 2
    assert "the state holds that of kfac, which is not here: it is left out" in caplog.text
    sync.close()


def test_a_restarted_job_that_has_loaded_a_state_is_not_told_that_it_has_not(caplog, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    method, state = tw.method("acp", rank=2), State(0, tw.Topology(2))
    state.restore({"step": 0, "residual": {}, "shared": {}})  # one rank, which counts no steps, has saved it
    warn_if_state_missing(method, state)
    assert "has loaded no state" not in caplog.text
    warn_if_state_missing(method, State(0, tw.Topology(2)))
    assert "has loaded no state" in caplog.text


def test_several_optimizers_or_none_are_saved_and_loaded(tmp_path):
    def job(several=True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        optimizers = [torch.optim.AdamW(net[0].parameters()), torch.optim.SGD(net[1].parameters(), 0.1, momentum=0.9)]
        return net, optimizers, tw.attach(net, optimizers if several else None)

    def train(net, optimizers):
        net(torch.ones(2, 6)).square().sum().backward()
        for o in optimizers:
            o.step()
            o.zero_grad()

    net, optimizers, sync = job()
    train(net, optimizers)
    tw.checkpoint.save(tmp_path, net, optimizers, sync, 1)
    train(net, optimizers)
    other, others, other_sync = job()
    assert tw.checkpoint.load(tmp_path, other, others, other_sync) == 1
    train(other, others)
    assert _same(other, net.parameters())
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(ValueError, match="it holds the state of 2 optimizers, and 1 are here"):
        tw.checkpoint.load(tmp_path, other, others[:1], other_sync)
    assert _same(other, before)
    bare, _, bare_sync = job(several=False)
    tw.checkpoint.save(tmp_path / "bare", bare, None, bare_sync, 1)
    assert tw.checkpoint.load(tmp_path / "bare", bare, None, bare_sync) == 1
    with pytest.raises(TypeError, match="takes the optimizer, a list of them, or None, not a dict"):
        tw.checkpoint.save(tmp_path, net, {"first": optimizers[0]}, sync, 2)


def _scheduled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)


def test_schedulers_and_values_of_ones_own_are_saved_and_loaded(tmp_path):
    net, optimizer, sync = _job()
    scheduler, seen = _scheduled(optimizer), []
    for step in range(8):
        _train(net, optimizer)
        scheduler.step()
        if step == 3:
            extra = {"scheduler": scheduler, "epoch": 3, "order": [torch.arange(3), {"name": "a"}]}
            tw.checkpoint.save(tmp_path, net, optimizer, sync, 4, extra=extra)
        seen.append(optimizer.param_groups[0]["lr"])
    weights = [p.detach().clone() for p in net.parameters()]
    sync.close()
    net, optimizer, sync = _job()
    extra = {"scheduler": _scheduled(optimizer), "epoch": 0, "order": None}
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync, extra=extra) == 4
    assert extra["epoch"] == 3
    assert torch.equal(extra["order"][0], torch.arange(3))
    assert extra["order"][1] == {"name": "a"}
    rates = []
    for _ in range(4):
        _train(net, optimizer)
        extra["scheduler"].step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == seen[4:]
    assert _same(net, weights)


def test_what_was_not_saved_changes_nothing(tmp_path):
    net, optimizer, sync = _job()
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2, extra={"epoch": 3})
    _train(net, optimizer)
    scheduler, before = _scheduled(optimizer), [p.detach().clone() for p in net.parameters()]
    extra = {"epoch": 5, "scheduler": scheduler}
    with pytest.raises(ValueError, match="it was saved without extra 'scheduler'; it has epoch"):
        tw.checkpoint.load(tmp_path, net, optimizer, sync, extra=extra)
    assert extra == {"epoch": 5, "scheduler": scheduler}
    assert _same(net, before)
    with pytest.raises(ValueError, match=r"extra\['place'\] is a pathlib\._?\w*\.?PosixPath"):
        tw.checkpoint.save(tmp_path, net, optimizer, sync, 3, extra={"place": tmp_path})
    assert [path.name for path in tw.checkpoint.complete(tmp_path)] == ["step-000000002"]


def test_an_object_in_the_state_is_refused_and_the_checkpoint_before_stays(tmp_path):
    net, optimizer, sync = _job()
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    _train(net, optimizer)
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 1)
    optimizer.param_groups[0]["schedule"] = tmp_path
    with pytest.raises(
        ValueError, match=r"rank 0: optimizer\['param_groups'\]\[0\]\['schedule'\] is a pathlib.PosixPath"
    ):
        tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-000000001"]
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
