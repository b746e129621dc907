"""A link of known rate is recovered."""

import pytest

from thinwire.predict.measure import ProbeResult
from thinwire.predict.measure.machine import LoadSample
from verbs import call

pytestmark = [pytest.mark.net, pytest.mark.slow]
PAYLOAD = 1448 / 1514  # of an Ethernet frame, as the link counts it


def test_bandwidth_of_a_link_within_ten_percent(any_mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--max-bytes", 8 << 20, "--seconds", 30, "--link", "100mbit", "--json")
    watch = LoadSample()
    result, load = ProbeResult.from_json(call("probe", *words).stdout), watch.load()
    if load is not None and (busy := load.sentence(2)):
        pytest.skip(busy)
    line = result.lines["AllReduce", "world", 2]  # two ranks: the bus carries the message once each way
    assert 8 / line.seconds_per_byte == pytest.approx(100e6 * PAYLOAD, rel=0.1)
    assert result.flow_bits_per_second == pytest.approx(100e6 * PAYLOAD, rel=0.1)
