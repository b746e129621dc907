"""Files that are whole or not there, whoever uses them: a file that cannot be written, a kill between two renames."""

import pathlib
import re
import resource
from contextlib import contextmanager

import pytest
import torch

from thinwire.engine.durable import finished, put_in_place, read_file, write_whole
from thinwire.federated import checkpoint as rounds
from thinwire.federated.history import History
from thinwire.split import store
from thinwire.split.errors import SessionError


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


class Killed(BaseException):
    pass


def _split(folder, value):
    store.save(folder, 5, {"value": torch.tensor(value)})


def _federated(folder, value):
    rounds.save(folder, 5, {"value": torch.tensor(value)}, None, History(), {"seed": 1})


KEEPERS = {
    "split": (_split, lambda folder: store.load(folder, store.steps(folder)[-1])["value"]),
    "federated": (_federated, lambda folder: rounds.load(folder, {"seed": 1}).server["value"]),
}


@pytest.mark.parametrize("save, load", KEEPERS.values(), ids=KEEPERS)
def test_a_kill_between_the_renames_leaves_the_one_before(tmp_path, monkeypatch, save, load):
    save(tmp_path, 1)
    rename = pathlib.Path.rename

    def die(self, target):
        if self.name.startswith(".partial"):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", die)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # a kill clears nothing up
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert int(load(tmp_path)) == 1
    save(tmp_path, 3)
    assert int(load(tmp_path)) == 3
    assert [p.name for p in tmp_path.iterdir()] == [finished(tmp_path, re.compile(r"\w+-(\d+)"))[0].name]


@pytest.mark.parametrize("save, load", KEEPERS.values(), ids=KEEPERS)
def test_one_that_cannot_be_written_leaves_nothing_but_the_one_before(tmp_path, save, load):
    save(tmp_path, 1)
    with largest_file(20), pytest.raises(OSError, match="File too large"):
        save(tmp_path, 2)
    assert int(load(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_half_removed_is_not_read(tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / ".new").mkdir()
        (tmp_path / ".new" / "content").write_text(str(number))
        put_in_place(tmp_path / ".new", tmp_path / f"step-{number}")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    from thinwire.engine.durable import remove

    remove(tmp_path / "step-1")
    assert [path.name for path in finished(tmp_path, re.compile(r"step-(\d+)"))] == ["step-2"]


def test_a_damaged_checkpoint_of_a_split_is_named(tmp_path):
    _split(tmp_path, 1)
    file = tmp_path / "step-000000005" / "state.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SessionError, match=f"{file} is damaged"):
        store.load(tmp_path, 5)
