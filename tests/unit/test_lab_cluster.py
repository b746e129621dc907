"""The shape of a cluster: rates and delays as they are written, links, cores."""

import os
import sys

import pytest

from thinwire.tools import lab
from thinwire.tools.lab import Cluster, LabError, format_rate, parse_delay, parse_rate
from thinwire.tools.lab.cluster import LinkSpec, parse_loss
from thinwire.tools.lab.ranks import own_cores


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 10**9), ("100mbit", 10**8), ("2.5gbit", 2_500_000_000), (" 10GBit ", 10**10), ("512kbit", 512_000),
     ("1000000bit", 10**6), ("0.4tbit", 4 * 10**11)],
)  # fmt: skip
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


WRONG_RATES = ("", "fast", "1", "1 gbit", "1gb", "-1gbit", "1e3mbit", "gbit", "1gbit2", "1,5gbit", "99kbit", "2tbit",
               "0gbit", "\u0661gbit", "100mbps")  # fmt: skip


@pytest.mark.parametrize("text", WRONG_RATES)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(LabError, match="use 100mbit" if text == "100mbps" else r"use .*\dg?m?bit"):
        parse_rate(text)  # bps: in tc, that means bytes


def test_writing_a_rate_is_the_inverse_of_reading_it():
    for text in ("1gbit", "100mbit", "2.5gbit", "10gbit", "1tbit", "1.544mbit", "100kbit", "123456.789kbit"):
        assert format_rate(parse_rate(text)) == text
    assert format_rate(None) == "unlimited"


def test_delays_are_read_and_what_is_none_is_refused_with_an_example():
    for text, seconds in (("1ms", 1e-3), ("250us", 250e-6), ("0.05s", 0.05), ("0", 0.0), ("0ms", 0.0)):
        assert parse_delay(text) == pytest.approx(seconds)
    for text in ("", "1", "ms", "1m", "-1ms", "11s", "soon"):
        with pytest.raises(LabError, match="use for example 1ms"):
            parse_delay(text)
    for text, share in (("0.1%", 1e-3), ("25 %", 0.25), ("0", 0.0), ("0%", 0.0), ("99.9%", 0.999)):
        assert parse_loss(text) == pytest.approx(share)
    for text in ("", "1", "%", "-1%", "100%", "150%", "some"):
        with pytest.raises(LabError, match=r"use for example 0\.1%"):
            parse_loss(text)


def test_one_link_serves_all_nodes_or_each_has_its_own():
    one = Cluster.parse(4, 2, "1gbit", "1ms")
    assert (one.nodes, one.links) == (2, (10**9,))
    assert [one.link(node) for node in range(2)] == [LinkSpec(10**9, 1e-3)] * 2
    several = Cluster.parse(4, 1, "1gbit, 100mbit,unlimited,none", None)
    assert several.links == (10**9, 10**8, None, None)
    assert several.link(1).rate == 10**8
    wire = Cluster.parse(2, 1, "1gbit", "25ms,5ms", "2ms", "0%,0.1%", "bbr")
    assert [wire.link(node) for node in range(2)] == [LinkSpec(10**9, 25e-3, 2e-3), LinkSpec(10**9, 5e-3, 2e-3, 1e-3)]
    assert wire.wire == "1gbit, delay 25ms,5ms, jitter 2ms, loss 0%,0.1%, bbr"
    for link in (None, "unlimited", "none"):
        assert Cluster.parse(2, 1, link).links == (None,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, 1), "workers must be at least 1"),
        ((4, 0), "ranks per node must be at least 1"),
        ((4, 3), "4 workers are not a multiple of 3 ranks per node.*--workers 6"),
        ((4, 1, "1gbit,1gbit"), "2 links for 4 nodes.*1gbit,1gbit,1gbit,1gbit"),
        ((4, 1, "1gbit,"), "link rate ''"),
        ((2, 1, None, -1.0), "outside 0 to 10 s"),
        ((2, 1, None, "1ms,2ms,3ms"), "3 delays for 2 nodes.*25ms,25ms"),
        ((2, 1, None, "1ms", "2ms"), "jitter of 2ms is outside 0 to the delay, 1ms: use at most 1ms"),
        ((2, 1, None, "5ms,1ms", "2ms"), "use at most 1ms"),
        ((2, 1, None, None, "2ms"), "give a delay too, such as --delay 25ms"),
        ((2, 1, None, None, None, "150%"), "loss '150%' is not a percentage"),
        ((2, 1, None, None, None, None, "foo"), "congestion control 'foo' is unknown: use cubic, bbr or reno"),
        ((5000, 1), "more than the 1000"),
    ],
)
def test_bad_shapes_are_refused_in_one_sentence(arguments, complaint):
    with pytest.raises(LabError, match=complaint) as caught:
        Cluster.parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("links", [(1,), (10**13,), ()])
def test_a_cluster_built_by_hand_is_checked_too(links):
    with pytest.raises(LabError):
        Cluster(2, 1, links)


@pytest.mark.parametrize("rate", [10**5, 10**7, 10**8, 10**9, 10**10, 10**12])
def test_bucket_passes_the_largest_packet_and_the_queue_holds_many(rate):
    link = LinkSpec(rate)
    assert 2 * link.packet_bytes <= link.burst_bytes
    assert link.packet_bytes >= 2 * 1500
    assert link.queue_bytes >= link.burst_bytes + 2**18
    assert link.queue_bytes < 2**32


def test_lines_for_tc():
    assert LinkSpec().egress_of_node("eth0") == LinkSpec().egress_of_switch("p") == []
    assert LinkSpec(10**9).egress_of_node("eth0") == [
        "qdisc add dev eth0 root tbf rate 1000000000bit burst 125000 limit 6375000"
    ]
    delayed = LinkSpec(10**9, 1e-3)
    assert [line.split(" ")[4:8] for line in delayed.egress_of_node("eth0")] == [
        ["root", "handle", "1:", "netem"],
        ["parent", "1:", "handle", "2:"],
    ]
    assert delayed.egress_of_switch("p") == LinkSpec(10**9).egress_of_switch("p")
    assert len(LinkSpec(None, 1e-3).egress_of_node("eth0")) == 1
    assert LinkSpec(None, 25e-3, 2e-3, 1e-3).egress_of_node("eth0") == [
        "qdisc add dev eth0 root handle 1: netem limit 1000000 "
        "delay 25000us 2000us rate 1000000000000bit loss 0.1000000%"
    ]
    assert LinkSpec(10**8, 25e-3).queue_bytes == 12_500 + 2 * 625_000  # twice what a round trip of 50 ms holds


@pytest.mark.parametrize("nodes", range(1, 9))
@pytest.mark.parametrize("cores", [(0,), (0, 1), (2, 3, 5, 7), tuple(range(16))])
def test_every_node_has_as_much_as_any_other(nodes, cores):
    dealt = [own_cores(node, nodes, cores) for node in range(nodes)]
    used = [core for own in dealt for core in own]
    assert set(used) <= set(cores)
    assert len({len(own) for own in dealt}) == 1
    assert dealt[0]
    counts = [used.count(core) for core in set(used)]
    assert max(counts) - min(counts) <= 1
    if nodes <= len(cores):
        assert max(counts) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tie processes to cores")
@pytest.mark.parametrize("share", [False, True])
def test_ranks_see_the_cores_of_their_node(share):
    lines, all_cores = {}, sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    result = lab.run(lab.Cluster(2), command, on_line=lambda rank, line: lines.update({rank: line}), share_cores=share)
    assert result.exit_code == 0
    for node in range(2):
        assert lines[node] == str(all_cores if share else list(own_cores(node, 2, all_cores)))


def test_one_of_a_thing_is_not_several():
    assert Cluster.parse(1, 1, None, None).describe() == "1 worker on 1 node, unlimited"
    assert Cluster.parse(4, 4, None, None).describe() == "4 workers on 1 node, unlimited"
