"""The link of a node, cut for a while."""

import sys

import pytest
from wires import collect

from thinwire.tools import lab

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]

WATCH = """
import os, pathlib, time
carrier, found = pathlib.Path("/sys/class/net/eth0/carrier"), []
while os.environ["RANK"] == "1" and found[-3:] != ["1", "0", "1"]:
    now = carrier.read_text().strip()
    found += [now] * (found[-1:] != [now])
    time.sleep(0.005)
"""


@pytest.mark.parametrize("delay", [None, "1ms"])
def test_a_cut_link_carries_nothing_and_then_carries_again(any_mode, delay, monkeypatch):
    monkeypatch.setattr("thinwire.tools.lab.network.has_netem", lambda *_: False)  # a delay is the relay's
    cuts = ["1:1s:500ms", "1:3s:1s", "1:8s:5s", "1:20s:10s"]  # the first that a busy machine sees begin and end
    faults = lab.parse_pauses("cut", cuts)
    result, lines = collect(
        lab.Cluster.parse(2, delay=delay), [sys.executable, "-c", WATCH], timeout_seconds=60, faults=faults
    )
    assert result.exit_codes == (0, 0), lines
    assert [(x.rank, x.what) for x in result.happenings[:2]] == [(1, "cut off"), (1, "connected again")]
