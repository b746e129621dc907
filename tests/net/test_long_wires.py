"""Links with delay, jitter and loss, by the lab's relay. (How fast: benchmarks/link_rate.py.)"""

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from wires import CLI, MEET, collect

from alive import runs, wait_until
from thinwire.tools import lab
from thinwire.tools.lab import network

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]

# Rank 1 sends numbered datagrams, then the word "end" until rank 0 has it; rank 0 prints the numbers.
DATAGRAMS = """
import os, pathlib, socket, sys, time
count, size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # room for all, if no core is free to read
    one.bind(("", 9000))
    (folder / "ready").touch()
    found = []
    while (data := one.recv(2000)) != b"end":
        found.append(int.from_bytes(data[:4], "big"))
        assert data[4:] == bytes(size - 4)
    (folder / "end").touch()
    print(*found)
else:
    while not (folder / "ready").exists():
        time.sleep(0.01)
    for number in range(count):
        one.sendto(number.to_bytes(4, "big") + bytes(size - 4), ("node0", 9000))
    while not (folder / "end").exists():
        one.sendto(b"end", ("node0", 9000))
        time.sleep(0.05)
"""
# Both ranks send random bytes over one connection, and print the hash of what they received.
STREAM = (
    MEET
    + """
import hashlib, random, sys, threading
count, rank = int(sys.argv[1]), int(os.environ["RANK"])
def send():
    peer.sendall(random.Random(rank).randbytes(count))
    peer.shutdown(socket.SHUT_WR)
sender = threading.Thread(target=send)
sender.start()
found = hashlib.sha256()
while data := peer.recv(1 << 16):
    found.update(data)
print(found.hexdigest())
sender.join()
"""
)
# Rank 1 receives a tensor from rank 0, and prints how many connections they have.
PEERS = """
import os, queue, time
import torch
from pathlib import Path
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import Listener, connect
secret, x = b"0123456789abcdef", torch.arange(300_000, dtype=torch.int32)
if os.environ["RANK"] == "0":
    came = queue.SimpleQueue()
    listener = Listener(29400, "0.0.0.0", roles=("node",), trust=secret)
    listener.serve(lambda peer, first: came.put(peer), 4)
    peer = came.get(timeout=60)
    peer.send_tensor(x, 60)
    peer.receive_frame(4, 60)
else:
    end = time.monotonic() + 60
    while True:
        try:
            peer = connect("node0", 29400, b"1234", PeerIdentity("node", 1, secret))
            break
        except RuntimeError:
            assert time.monotonic() < end
            time.sleep(0.2)
    assert torch.equal(peer.receive_tensor(torch.zeros_like(x), 60), x)
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    print(sum(row[2].endswith(f":{29400:04X}") and row[3] == "01" for row in rows))
    peer.send_frame(b"bye!")
"""


@pytest.fixture(autouse=True)
def relayed(monkeypatch, any_mode):
    """Take the relay even where the kernel has netem; skip where it has no TUN devices for it."""
    monkeypatch.setattr(network, "has_netem", lambda *_: False)
    try:
        collect(lab.Cluster.parse(1, delay="1ms"), ["true"])
    except lab.LabError as error:
        pytest.skip(str(error))


def datagrams(cluster, count, size, folder):
    result, lines = collect(cluster, [sys.executable, "-c", DATAGRAMS, str(count), str(size), str(folder)],
                            timeout_seconds=120)  # fmt: skip
    assert result.exit_codes == (0, 0), lines
    return result.packets[1], list(map(int, lines[0][0].split()))


def test_all_datagrams_arrive_in_order_however_the_delay_changes(tmp_path):
    counts, found = datagrams(lab.Cluster.parse(2, 1, "2mbit", "20ms", "20ms"), 150, 500, tmp_path)
    assert found == list(range(150))
    assert (counts["lost"], counts["dropped"]) == (0, 0)


def test_the_same_packets_are_lost_in_every_run(tmp_path):
    counts, found = datagrams(lab.Cluster.parse(2, 1, "2mbit", "1ms", None, "0%,10%"), 150, 500, tmp_path)
    draw = random.Random(1)
    draw.random()  # for node 1's answer when the lab asked for its congestion control
    assert found == [number for number in range(150) if draw.random() >= 0.1]
    assert counts["lost"] >= 150 - len(found)
    assert counts["dropped"] == 0


def test_a_full_queue_drops_the_last(tmp_path):
    cluster = lab.Cluster.parse(2, 1, "2mbit", "1ms")
    counts, found = datagrams(cluster, 500, 1400, tmp_path)
    assert found == sorted(set(found))
    assert found[:150] == list(range(150))
    assert len(found) + counts["dropped"] >= 500
    assert counts["lost"] == 0 < counts["dropped"]


@pytest.mark.parametrize("loss", ["0", "2%"])
def test_streams_arrive_whole_both_ways_and_loss_is_by_packet(loss):
    size = 4_000_000
    cluster = lab.Cluster.parse(2, 1, "100mbit", "1ms", "500us", loss)
    result, lines = collect(cluster, [sys.executable, "-c", STREAM, str(size)], timeout_seconds=250)
    assert lines == [[hashlib.sha256(random.Random(1 - rank).randbytes(size)).hexdigest()] for rank in (0, 1)]
    for counts in result.packets:
        assert counts["forwarded"] >= size // 1448
        assert (counts["lost"] > 0) == (loss == "2%")
    assert min(result.sent_bytes) >= size


def test_three_nodes_with_links_of_their_own():
    cluster = lab.Cluster.parse(3, 1, "unlimited,20mbit,2mbit", "1ms,2ms,3ms", None, "0%,0%,1%")
    command = [sys.executable, str(Path(__file__).parent / "traffic.py"), "to-zero", "bytes", "300000"]
    result, lines = collect(cluster, command, timeout_seconds=250)
    assert sum(map(int, lines[0])) == int(lines[1][0]) + int(lines[2][0])
    assert [counts["lost"] for counts in result.packets[:2]] == [0, 0]
    assert "unlimited,20mbit,2mbit, delay 1ms,2ms,3ms, loss 0%,0%,1%" in result.note


@pytest.mark.parametrize("asked", ["cubic", "bbr", "reno"])
def test_a_congestion_control_is_used_or_refused_in_one_sentence(asked, monkeypatch):
    offered = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if asked in offered:
        assert lab.run(lab.Cluster(2, congestion=asked), ["true"]).congestion_control == asked
    monkeypatch.setattr("thinwire.tools.lab.cluster.CONGESTION_CONTROLS", ("nonesuch",))
    with pytest.raises(lab.LabError, match=f"'nonesuch', only {', '.join(offered)}: use one of them") as caught:
        lab.run(lab.Cluster(2, congestion="nonesuch"), ["true"])
    assert "\n" not in str(caught.value)


def test_a_peer_has_more_sockets_for_its_tensors_on_a_long_wire():
    cluster = lab.Cluster.parse(2, 1, "100mbit", "25ms", loss="0.1%", congestion="cubic")
    result, lines = collect(cluster, [sys.executable, "-c", PEERS], timeout_seconds=120)
    assert result.exit_codes == (0, 0), lines
    assert lines[1] == ["17"]


def children(pid):
    """Return the processes that were started by this one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_relay_ends_with_the_lab(number):
    code = "from thinwire.tools.lab import network; network.has_netem = lambda *_: False; "
    command = [sys.executable, "-c", code + CLI[2], "lab", "run", "--delay", "1ms", "--", "sh", "-c",
               "echo up; exec sleep 120"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
        started = children(process.pid)
        relays = [pid for pid in started if b"relay.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(relays) == 1
        process.send_signal(number)
        process.wait(timeout=120)
        wait_until(lambda: not any(map(runs, started)))
    lab.clean()


def test_without_tun_devices_a_delay_is_refused_in_one_sentence():
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
             'mount -t tmpfs x /dev/net && exec "$0" "$@"']  # fmt: skip
    code = "from thinwire.tools.lab import network; network.has_netem = lambda *_: False; "
    words += [sys.executable, "-c", code + CLI[2], "lab", "run", "--delay", "1ms", "--", "true"]
    answer = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "THINWIRE_LAB_MODE": "user"})
    if answer.returncode == 1:
        pytest.skip(answer.stderr)  # no user namespaces
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: a delay or loss needs the kernel's sch_netem, or /dev/net/tun for a relay")
    assert answer.stderr.count("\n") == 1
