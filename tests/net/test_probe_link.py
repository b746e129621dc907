"""A link of known rate is recovered."""

import json
import sys

import pytest

from thinwire.predict.measure import ProbeResult
from thinwire.predict.measure.machine import LoadWatch
from thinwire.tools import lab

pytestmark = [pytest.mark.net, pytest.mark.slow]
PAYLOAD = 1448 / 1514  # of an Ethernet frame, as the link counts it


def test_bandwidth_of_a_link_within_ten_percent(any_mode, tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "thinwire.predict.measure.worker", "--out", str(out)]
    command += ["--largest-bytes", str(8 << 20), "--seconds", "30"]
    lines, watch = [], LoadWatch()
    launched = lab.run(
        lab.Cluster.parse(2, 1, "100mbit"), command, on_line=lambda rank, line: lines.append(line), timeout_seconds=110
    )
    assert launched.exit_code == 0, lines
    result, load = ProbeResult.from_json(out.read_text()), watch.load()
    if load is not None and (busy := load.sentence(2)):
        pytest.skip(busy)
    line = result.lines["AllReduce", "world", 2]  # two ranks: the bus carries the message once each way
    assert 8 / line.seconds_per_byte == pytest.approx(100e6 * PAYLOAD, rel=0.1)
    assert result.flow_bits_per_second == pytest.approx(100e6 * PAYLOAD, rel=0.1)
    assert json.loads(lines[-1].removeprefix("@@"))["done"] == 1.0
