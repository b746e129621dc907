"""Files that are whole or not there, whoever uses them: a file that cannot be written, a kill at any moment."""

import collections
import errno
import logging
import os
import pathlib
import resource
import shutil
import stat
import sys
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from thinwire.core.checks import local_path
from thinwire.core.durable import CheckpointDirectory, read_file, user_cache, write_file, write_whole
from thinwire.engine.controller import network as prices
from thinwire.systems.federated.state import ClientStateStore
from thinwire.systems.parameter_server import checkpoint as served
from thinwire.systems.split.ends import Checkpoints
from thinwire.systems.split.errors import SessionError
from thinwire.tools.cli.console import check_path


@contextmanager
def largest_file(size):
    """A full disk, without one: EFBIG comes the way that ENOSPC comes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1, 1000, 5000, 39_000])
def test_a_file_that_cannot_be_written_is_an_oserror_with_its_name_and_the_one_before_stays(tmp_path, size):
    path = tmp_path / "kept"
    write_whole(path, {"x": torch.arange(5)})
    with largest_file(size), pytest.raises(OSError, match="File too large") as error:
        write_whole(path, {"x": torch.zeros(10_000)})
    assert error.value.filename == str(tmp_path / ".partial-kept")
    assert torch.equal(read_file(path)["x"], torch.arange(5))
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("content", [b"bytes", "text", {"x": torch.arange(3)}], ids=["bytes", "text", "tensors"])
def test_what_is_written_takes_the_place_of_what_was_there(tmp_path, content):
    path = tmp_path / "kept"
    for shared in (False, True):
        path.write_bytes(b"before")
        write_whole(path, content, shared=shared)
        if isinstance(content, dict):
            assert torch.equal(read_file(path)["x"], content["x"])
        else:
            assert path.read_text() == (content if isinstance(content, str) else content.decode())
        assert [p.name for p in tmp_path.iterdir()] == ["kept"]


PLACES = {
    "checkpoints": lambda folder: CheckpointDirectory(folder, "step").folder,
    "split": lambda folder: Checkpoints(folder, "pair").save(
        1, torch.nn.Linear(1, 1), torch.optim.Adam([torch.ones(1)])
    ),
    "parameter server": served.prepare,
    "federated": lambda folder: ClientStateStore(3, folder).folder,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_address_is_no_folder_and_the_home_directory_is_one(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for address in ("s3://bucket/run", "gs://bucket", pathlib.Path("hdfs://host/run")):
        with pytest.raises(ValueError, match="is an address, and files are kept in folders"):
            place(address)
    place("~/run")
    assert not {p.name for p in tmp_path.iterdir()} - {"home"}


def test_paths_that_are_no_addresses_stay_as_they_are(tmp_path):
    for path in ("run", "a:b/c", "C:/run", "/x/y://z", str(tmp_path)):
        assert local_path(path) == pathlib.Path(path)


def test_a_command_refuses_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("file", "folder"):
        with pytest.raises(ValueError, match="is an address"):
            check_path("--out", pathlib.Path("s3://bucket/run"), kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EIO])
def test_a_file_system_that_does_not_flush_directories_is_told_of_once(tmp_path, monkeypatch, caplog, error):
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(error, os.strerror(error))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    kept = CheckpointDirectory(tmp_path, "step")
    if error == errno.EIO:  # the disk is broken
        with pytest.raises(OSError, match="Input/output"), kept.write(1):
            pass
        return
    with caplog.at_level(logging.WARNING, "thinwire"):
        for number in (1, 2):
            with kept.write(number):
                pass
    assert list(kept.found()) == [1, 2]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "flushes no directories (Function not implemented)" in said


KINDS = {
    "directories": lambda folder, keep: CheckpointDirectory(folder, "step", keep, holds="content"),
    "files": lambda folder, keep: CheckpointDirectory(folder, "step", keep, suffix=".pt"),
}


def _write(kept, number, value):
    with kept.write(number) as partial:
        if partial.is_dir():
            write_file(partial / "more", {"value": value})
            partial /= "content"
        write_file(partial, {"value": value})


def _values(kept):
    return {n: read_file(p / "content" if p.is_dir() else p)["value"] for n, p in kept.found().items()}


def _killed_at(moment, work):
    """Whether a process that works was killed before it opened, made, renamed, removed ... so many files."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [moment]

    def hook(event, arguments):
        if event in ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    try:
        sys.addaudithook(hook)
        work()
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


@pytest.mark.parametrize(("kind", "number"), [("directories", 5), ("directories", 7), ("files", 5), ("files", 6)])
def test_a_kill_at_any_moment_leaves_a_whole_newest_one_and_the_next_clears_up(tmp_path, kind, number):
    killed, moment, seen = True, 0, set()
    while killed:
        folder = tmp_path / str(moment)
        kept = KINDS[kind](folder, 2)
        for before in (3, 4, 5):
            _write(kept, before, f"first {before}")
        killed = _killed_at(moment, lambda kept=kept: _write(kept, number, "second"))
        found = _values(kept)
        newest = max(found)
        assert {newest: found[newest]} in ({5: "first 5"}, {number: "second"})
        assert len(found) >= 2
        seen.add((newest, found[newest]))
        _write(kept, 8, "third")
        assert list(kept.found()) == [newest, 8]
        assert set(folder.iterdir()) == set(kept.found().values())
        moment += 1
    assert seen == {(5, "first 5"), (number, "second")}
    assert moment > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_while_later_ones_are_dropped_leaves_none_that_is_not_whole(tmp_path, kind):
    killed, moment = True, 0
    while killed:
        kept = KINDS[kind](tmp_path / str(moment), 0)
        for number in (3, 4, 5):
            _write(kept, number, number)
        killed = _killed_at(moment, lambda kept=kept: kept.drop_after(3))
        assert _values(kept)[3] == 3
        kept.drop_after(3)
        assert [path.name for path in kept.folder.iterdir()] == [kept.path(3).name]
        moment += 1
    assert moment > 2


def test_one_that_was_replaced_does_not_come_back_when_the_new_one_is_dropped(tmp_path):
    kept = KINDS["directories"](tmp_path, 0)
    for number in (3, 5):
        _write(kept, number, number)
    shutil.copytree(tmp_path / "step-000000005", tmp_path / ".old-step-000000005")  # a kill before it is removed
    kept.drop_after(3)
    assert _values(kept) == {3: 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("keep", "stays", "left"), [(0, None, [1, 2, 3, 9]), (1, None, [3, 9]), (2, None, [2, 3, 9]), (2, 1, [1, 3, 9])]
)
def test_as_many_stay_as_are_to_be_kept_and_those_of_others_and_later_ones(tmp_path, kind, keep, stays, left):
    others = [tmp_path / "notes", tmp_path / ".partial-mine", tmp_path / "step-x", tmp_path / "step-000000007"]
    for path in others:
        path.mkdir()
    for number in (9, 1, 2):
        _write(KINDS[kind](tmp_path, 0), number, number)
    kept = KINDS[kind](tmp_path, keep)
    with kept.write(3, stays) as partial:
        write_file(partial / "content" if partial.is_dir() else partial, {"value": 3})
    assert _values(kept) == {number: number for number in left}
    assert set(tmp_path.iterdir()) == {*others, *kept.found().values()}


def test_an_old_one_that_cannot_be_removed_is_said_and_the_new_one_is_there(tmp_path, monkeypatch, caplog):
    kept = KINDS["directories"](tmp_path, 1)
    _write(kept, 1, 1)
    rename = pathlib.Path.rename

    def busy(self, target):
        if self.name == "step-000000001":
            raise OSError(16, "Device or resource busy", str(self))
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", busy)
    _write(kept, 2, 2)
    assert _values(kept) == {1: 1, 2: 2}
    assert "an old checkpoint was not removed: [Errno 16] Device or resource busy" in caplog.text


def test_a_damaged_checkpoint_of_a_split_is_named(tmp_path):
    half, file = torch.nn.Linear(1, 1), tmp_path / "step-000000005" / "state.pt"
    Checkpoints(tmp_path, "pair").save(5, half, torch.optim.SGD(half.parameters()))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SessionError, match=f"{file} is damaged"):
        Checkpoints(tmp_path, "pair").read(5)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME"):
        user_cache()
    monkeypatch.setenv("THINWIRE_REMEMBER", "1")
    network = {"hosts": ["a", "b"]}
    prices.keep(network, None)  # training goes on; nothing is kept
    assert prices.recall(network) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "thinwire"


class Projector:
    pass


def test_numbers_of_numpy_are_written_as_pythons(tmp_path):
    state = OrderedDict(
        a={"lr": np.float64(0.5), "betas": (np.float32(0.5), 0.9)}, steps=[np.int64(2**60), np.array(3)]
    )
    vars(state).update(_metadata={"": {"version": 2}})
    write_file(tmp_path / "x", {"state": state, np.int64(7): np.bool_(True), "name": np.str_("x")})
    found = read_file(tmp_path / "x")
    assert found == {"state": OrderedDict(a={"lr": 0.5, "betas": (0.5, 0.9)}, steps=[2**60, 3]), 7: True, "name": "x"}
    assert type(found["state"]["a"]["lr"]) is float
    assert vars(found["state"]) == {"_metadata": {"": {"version": 2}}}
    assert type(state["a"]["lr"]) is np.float64, "what was given stays as it was"


@pytest.mark.parametrize(
    "thing",
    [
        Projector(),
        pathlib.Path("x"),
        np.arange(3),
        collections.deque([1]),
        collections.Counter(a=np.int64(1)),
        len,
        {np.int64(1)},
    ],
)
def test_what_could_not_be_read_again_is_refused_by_its_key_before_anything_is_written(tmp_path, thing):
    write_whole(tmp_path / "x", {"kept": 1})
    kind = type(thing).__qualname__
    with pytest.raises(
        ValueError, match=rf"^state\['0\.weight'\]\[1\] is a \S*{kind}, which .*safe_globals\(\[{kind}\]"
    ):
        write_whole(tmp_path / "x", {"state": {"0.weight": [torch.zeros(2), thing]}})
    assert read_file(tmp_path / "x") == {"kept": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_torch_is_told_to_trust_is_written_and_read(tmp_path):
    with torch.serialization.safe_globals([Projector]):
        write_file(tmp_path / "x", {"projector": Projector(), "words": collections.Counter("ab"), "set": {1}})
        assert isinstance(read_file(tmp_path / "x")["projector"], Projector)
    with pytest.raises(ValueError, match=r"x holds a \S*Projector, which torch.load\(weights_only=True\) refuses"):
        read_file(tmp_path / "x")
