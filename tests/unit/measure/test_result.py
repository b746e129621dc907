import dataclasses

import pytest

from thinwire.core.pricing.costs import KINDS, Costs, Linear, assumed_compute
from thinwire.predict.measure import ProbeResult, verdict
from thinwire.predict.measure.kernels import KERNELS
from thinwire.predict.measure.result import Measurement

SIZES = [4096 << n for n in range(13)]


def result(bend=1.0, **changes):
    """Two ranks at 1 Gbit/s; above 1 MiB each further byte costs ``bend`` times as much."""
    rows = [
        Measurement(kind, "world", 2, x, 1e-4 + 8e-9 * (min(x, 1 << 20) + bend * max(0, x - (1 << 20))), 5, 1e-10 * x)
        for kind in KINDS
        for x in SIZES
    ]
    found = ProbeResult("here", "gloo", (1, 1), tuple(rows), (), 1e9, assumed_compute(), 12.0)
    return dataclasses.replace(found, **changes)


def test_json_round_trip():
    found = result(dropped=(("AllGather", "world", 2, 32 << 20),))
    again = ProbeResult.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.costs.hash == found.costs.hash
    assert Costs.from_json(found.costs.to_json()) == found.costs
    for text in ("{}", "[]", "no", '{"source": 1}'):
        with pytest.raises(ValueError, match="not the result"):
            ProbeResult.from_json(text)


def test_costs_are_the_measured_table_and_go_on_beyond_it():
    found = result()
    curve = found.costs.lookup("AllReduce", "world", 2)
    assert curve.provenance == "measured here"
    assert curve.source.startswith("here")
    assert [curve(m.bytes) for m in found.series["AllReduce", "world", 2]] == pytest.approx(
        [m.seconds for m in found.series["AllReduce", "world", 2]]
    )
    assert curve(256 << 20) == pytest.approx(1e-4 + 8e-9 * (256 << 20))
    assert set(found.costs.cpu_share) == set(KINDS)
    share = found.costs.cpu_share["Exchange"]
    assert isinstance(share, Linear)
    assert share.seconds_per_byte == pytest.approx(1e-10, rel=0.01)
    line = found.lines["AllReduce", "world", 2]
    assert (line.startup_seconds, line.seconds_per_byte) == (pytest.approx(1e-4), pytest.approx(8e-9))
    assert found.costs.compute == assumed_compute()


@pytest.mark.parametrize(
    "kind, algbw, busbw",
    [
        ("AllReduce", 1000, 1500),
        ("ReduceScatter", 1000, 750),
        ("AllGather", 4000, 3000),  # nccl-tests' size is everybody's message
        ("AllToAll", 1000, 750),
        ("Broadcast", 1000, 1000),
        ("Exchange", 1000, 1000),
    ],
)
def test_bandwidths_as_nccl_tests_counts_them(kind, algbw, busbw):
    row = Measurement(kind, "world", 4, 2000, 2.0, 1).row()
    assert (row["algbw"], row["busbw"]) == (algbw, busbw)
    assert (row["count"], row["dtype"]) == (500, "float32")


def test_verdict_says_the_line_and_what_is_unusual():
    plain = verdict(result())
    assert plain[0] == "all-reduce over 2 ranks: start-up 100 us, bus bandwidth 999 Mbit/s at 16 MiB"
    assert len(plain) == 2
    assert "selection" in plain[1]
    bent = " ".join(verdict(result(bend=4.0)))
    assert "falls from" in bent
    assert "no straight line fits AllReduce" in bent
    assert "one flow alone carries 4 Gbit/s" in " ".join(verdict(result(flow_bits_per_second=4e9)))
    left = verdict(result(dropped=(("AllGather", "world", 2, 32 << 20), ("AllGather", "world", 2, 6000))))
    assert "there was not enough time above 16 MiB for AllGather (world): extrapolated" in left
    assert "there was not enough time for 1 of 79 points between others: interpolated" in left
    alone = ProbeResult("here", "gloo", (1,), ())
    assert verdict(alone) == ["one rank only: nothing is exchanged; probe with at least two to measure exchanges"]
    assert alone.costs.lookup("AllReduce", "world", 1)(1e6) == 0
    assert set(KERNELS) == set(assumed_compute())
