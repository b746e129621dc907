"""A leader whose machine breaks down before it has said HELLO to the server: no word of its end comes to the shards."""

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.net

APART = ["unshare", "--map-root-user", "--net"]
SCRIPT = """
import pathlib, queue, subprocess, time
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import Listener
from thinwire.systems.link.listener import connect
from thinwire.systems.link.codec import FRAME
from thinwire.systems.parameter_server.messages import encode
from thinwire.systems.parameter_server.messages import Ticket
from thinwire.systems.parameter_server.shard import ShardDriver

for what in ("time", "intvl", "probes"):  # Linux's own: two hours, and eleven minutes more
    pathlib.Path(f"/proc/sys/net/ipv4/tcp_keepalive_{what}").write_text("1")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
told = queue.SimpleQueue()
shard = ShardDriver(0)
shard.tell = lambda what, leader, value=None: told.put(what)
listener = Listener(roles=("node",))
listener.serve(lambda pair, first: shard.take(pair, 5), FRAME.size)
leader = connect("127.0.0.1", listener.port, encode(Ticket(5)), PeerIdentity("node", 0))
leader.receive_frame(FRAME.size, 60.0)
print(told.get(timeout=60.0))
while any(row.split()[4][:8] != "00000000" for row in open("/proc/net/tcp").readlines()[1:]):
    time.sleep(0.01)  # what was sent is still to be acknowledged
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
print(told.get(timeout=30.0))
"""


def test_a_leader_that_vanished_before_it_was_a_member_is_not_kept():
    if shutil.which("ip") is None or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not to be had here")
    done = subprocess.run([*APART, sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["came", "left"], done.stderr
