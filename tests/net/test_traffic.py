"""What goes over the wires, told by the byte counters. (How fast: benchmarks/link_rate.py.)"""

import json
import sys
from pathlib import Path

import pytest
from wires import MEET, collect

from thinwire.tools import lab
from thinwire.tools.lab.network import tool
from verbs import call

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]

SCRIPT = str(Path(__file__).parent / "traffic.py")
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
dist.barrier()
x = torch.full((1 << 20,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x.min().item(), x.max().item())
dist.destroy_process_group()
"""


def traffic(cluster, *arguments):
    result, lines = collect(cluster, [sys.executable, SCRIPT, *map(str, arguments)], timeout_seconds=250)
    assert result.exit_codes == (0,) * cluster.workers, lines
    return result, [[int(line) for line in of_rank] for of_rank in lines]


def between(low, value, high):
    assert low <= value <= high


def test_two_ranks_talk_over_gloo(any_mode):
    result, lines = collect(lab.Cluster.parse(2, 1, "1gbit"), [sys.executable, "-c", GLOO], timeout_seconds=250)
    assert result.exit_codes == (0, 0), lines
    assert lines == [["3.0 3.0"]] * 2
    assert result.emulated
    payload = 4 << 20  # two ranks: each sends as much as it holds
    for count in (*result.sent_bytes, *result.received_bytes):
        between(payload, count, 1.08 * payload + 100_000)  # the rest: the store, the connections of all pairs


@pytest.mark.parametrize("link", [None, "100mbit"])
def test_counters_are_payload_and_little_more(any_mode, link):
    result, lines = traffic(lab.Cluster.parse(3, 1, link), "to-zero", "bytes", 3_000_000)
    one, two = lines[1][0], lines[2][0]
    assert sum(lines[0]) == one + two
    for payload, count in [
        (one + two, result.received_bytes[0]),
        (one, result.sent_bytes[1]),
        (two, result.sent_bytes[2]),
    ]:
        between(payload, count, 1.08 * payload + 10_000)
    assert max(result.sent_bytes[0], *result.received_bytes[1:]) < 0.1 * one + 10_000  # acknowledgements


def test_ranks_of_a_node_do_not_use_its_link(any_mode):
    result, lines = traffic(lab.Cluster.parse(2, 2, "1mbit"), "to-zero", "bytes", 3_000_000)
    assert sum(lines[0]) >= 3_000_000
    assert len(result.sent_bytes) == 1
    assert result.sent_bytes[0] + result.received_bytes[0] < 10_000


@pytest.mark.parametrize("direction", ["to-zero", "from-zero"])
def test_links_of_different_rates(any_mode, direction):
    cluster = lab.Cluster.parse(3, 1, "unlimited,20mbit,2mbit")
    for seconds in (1, 4, 16):  # on a busy machine the sender of the faster link may hardly run at first
        result, _ = traffic(cluster, direction, "seconds", seconds)
        counts = result.sent_bytes if direction == "to-zero" else result.received_bytes
        for node in (1, 2):
            link = cluster.link(node)
            assert 0 < counts[node] <= link.rate / 8 * result.seconds + 2 * link.burst_bytes
        if counts[1] > 2 * counts[2]:
            return
    pytest.fail(f"node 1 has ten times the rate of node 2 and sent no more: {counts}")


def test_nodes_have_names_and_the_machine_keeps_its_own(any_mode):
    before = Path("/etc/hosts").read_text()
    code = "import socket; n = socket.gethostbyname; print(n('node0'), n('node1'), n(socket.gethostname()))"
    _, lines = collect(lab.Cluster(2), [sys.executable, "-c", code])
    assert lines == [["10.77.0.1 10.77.0.2 10.77.0.1"], ["10.77.0.1 10.77.0.2 10.77.0.2"]]
    assert Path("/etc/hosts").read_text() == before


def test_each_node_has_its_own_rate(any_mode):
    result, lines = collect(lab.Cluster.parse(4, 2, "1gbit,100mbit"), [tool("tc"), "qdisc", "show", "dev", "eth0"])
    assert result.exit_code == 0
    for rank, rate in enumerate(["1Gbit", "1Gbit", "100Mbit", "100Mbit"]):
        assert " tbf " in lines[rank][0]
        assert f" rate {rate} " in lines[rank][0]


def test_a_delay_is_the_kernels_or_else_the_relays(any_mode):
    cluster = lab.Cluster.parse(2, 1, "100mbit", "2ms", "1ms", "0.1%")
    try:
        result, lines = collect(cluster, [tool("tc"), "qdisc", "show", "dev", "eth0"])
    except lab.LabError as error:
        pytest.skip(str(error))
    assert result.exit_code == 0
    netem = [line.split()[1] for line in lines[0]] == ["netem", "tbf"]
    assert netem == (result.packets is None)


CONGESTION = (
    MEET
    + """
if os.environ["RANK"] != "0":
    peer.recv(1)
print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""
)


@pytest.mark.parametrize("wanted", [None, ("no-such", "reno"), ("no-such",)])
def test_the_lab_says_which_congestion_control_its_sockets_have(any_mode, wanted, monkeypatch):
    own, known = (Path(f"/proc/sys/net/ipv4/tcp_{name}congestion_control").read_text() for name in ("", "available_"))
    if wanted:
        monkeypatch.setattr("thinwire.tools.lab.network.CONGESTION_CONTROLS", wanted)
    result, lines = collect(lab.Cluster.parse(2, 1, "1gbit"), [sys.executable, "-c", CONGESTION], timeout_seconds=250)
    assert lines == [[result.congestion_control]] * 2
    assert result.note.endswith(f"TCP with {result.congestion_control}")
    assert json.loads(result.to_json())["congestion_control"] == result.congestion_control
    if wanted is None and "cubic" in known.split():  # loaded, whether or not this machine allows it elsewhere
        assert result.congestion_control == "cubic"
    if wanted and "reno" in wanted:
        assert result.congestion_control == "reno"
    assert Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text() == own


def test_doctor_says_which_congestion_control_the_lab_has(any_mode):
    result, _ = collect(lab.Cluster(2), ["true"])
    assert json.loads(call("doctor", "--json").stdout)["lab_congestion_control"] == result.congestion_control
    assert f"TCP with {result.congestion_control}" in call("doctor", env={"COLUMNS": "200"}).stdout
