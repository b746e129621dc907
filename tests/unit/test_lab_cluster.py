import pytest

from thinwire.tools.lab import Cluster, LabError
from thinwire.tools.lab.cluster import LinkSpec


def test_one_link_serves_all_nodes():
    cluster = Cluster.parse(4, 2, "1gbit", "1ms")
    assert cluster.nodes == 2
    assert cluster.links == (10**9,)
    assert [cluster.link(node) for node in range(2)] == [LinkSpec(10**9, 1e-3)] * 2


def test_links_may_differ_per_node():
    cluster = Cluster.parse(4, 1, "1gbit, 100mbit,unlimited,none", None)
    assert cluster.links == (10**9, 10**8, None, None)
    assert cluster.link(1).rate == 10**8
    assert cluster.link(3).rate is None


@pytest.mark.parametrize("link", [None, "unlimited", "none"])
def test_no_link_is_no_limit(link):
    assert Cluster.parse(2, 1, link).links == (None,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, 1), "workers must be at least 1"),
        ((4, 0), "ranks per node must be at least 1"),
        ((4, 3), "4 workers are not a multiple of 3 ranks per node.*--workers 6"),
        ((4, 1, "1gbit,1gbit"), "2 links for 4 nodes.*1gbit,1gbit,1gbit,1gbit"),
        ((4, 1, "1gbit,"), "link rate ''"),
        ((4, 1, "slow"), "link rate 'slow'"),
        ((2, 1, None, "1"), "delay '1'"),
        ((2, 1, None, -1.0), "outside 0 to 10 s"),
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
