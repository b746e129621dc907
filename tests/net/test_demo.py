"""The demonstration over a real emulated link: what it says is what it has measured."""

import json

import pytest

from thinwire.tools import lab
from verbs import call

pytestmark = pytest.mark.net


def test_what_it_says_is_what_it_measured(tmp_path):
    done = call("demo", "--quick", "--steps", 3, "--out", tmp_path)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    ddp, ours = found["rows"]
    assert (ddp["label"], ours["label"]) == ("ddp", "thinwire local")
    assert ddp["steps"] <= 3
    assert found["target"] == found["curves"]["ddp"][-1]["validation"]
    assert ours["bytes_per_step"] < 0.3 * ddp["bytes_per_step"] or lab.available() == "loopback"
    if ours["seconds"] is None:
        assert "No row reached DDP's loss" in done.stdout
        assert min(p["validation"] for p in found["curves"]["thinwire local"]) > found["target"]
    elif ours["seconds"] < 0.9 * ddp["seconds"]:
        assert f"in {ours['seconds']:.1f} s instead of {ddp['seconds']:.1f} s" in done.stdout
        assert 'sync = tw.attach(model, optimizer, "local")' in done.stdout
    else:
        assert "no gain over DDP" in done.stdout
