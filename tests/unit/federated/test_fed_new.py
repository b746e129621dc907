"""A folder to begin with: every command of its README runs and learns, and what is there is not written over."""

import json
import re
import shlex
import sys

import pytest
from fed_calls import call

from thinwire.systems.federated import History


@pytest.fixture
def mine(alone, monkeypatch):
    done = call("federated", "new", "mine", code=0)
    assert done.stdout.splitlines()[-1] == "next: cd mine && thinwire federated run federation:build"
    monkeypatch.chdir(alone / "mine")
    monkeypatch.syspath_prepend(str(alone / "mine"))
    monkeypatch.delitem(sys.modules, "federation", raising=False)
    return alone / "mine"


@pytest.mark.slow
def test_every_command_of_its_readme(mine):
    commands = re.findall(r"^    thinwire (federated run .*)$", (mine / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        done = call(*shlex.split(command), "--json", code=0)
        data = json.loads(done.stdout)
        for run in data.get("runs", {"": data}).values():
            history = History.from_json(json.dumps(run))
            assert history.start["accuracy"] < 0.3
            assert history.rounds[-1].evaluation["accuracy"] > 0.87
            assert not any(row.failed for row in history.rounds)
            assert ("worst tenth" in history.start) == ("--per-client" in command)
            assert (history.rounds[0].client_seconds is not None) == ("--trace" in command)
    assert (mine / "curves.png").stat().st_size > 1000


def test_it_is_not_written_over_what_is_there(alone):
    (alone / "full").mkdir()
    (alone / "full" / "notes").write_text("mine")
    for folder in ("full", "full/notes"):
        done = call("federated", "new", folder, code=2)
        assert f"{folder} already exists and is not empty" in done.output
    assert [path.name for path in (alone / "full").iterdir()] == ["notes"]
    done = call("federated", "new", "full/notes/below", code=2)
    assert "full/notes/below cannot be written" in done.output
