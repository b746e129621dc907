"""The network: one namespace per node, one for the switch, and a shaped veth pair between each node and the switch."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from types import TracebackType

from thinwire.tools.lab.cleanup import new_prefix, remove
from thinwire.tools.lab.cluster import Cluster
from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.ranks import child_command
from thinwire.tools.lab.shell import Shell

INTERFACE = "eth0"
"""Name of a node's interface, in the namespace of that node."""
CONGESTION_CONTROLS = ("cubic", "reno")
"""TCP congestion controls for the links, the first available is used: CUBIC is the usual default, Reno always exists.

BBR, for example, empties a link on purpose for 0.2 s in every 10 s, and a training step stalls during that time.
"""
# A connection that is being opened already has the congestion control of its route; no answer is needed.
_ASK = """
import socket, sys
one = socket.socket()
one.setblocking(False)
one.connect_ex((sys.argv[1], 9))
print(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""


class Network:
    """The network of one run; a context manager that builds it and always takes it down.

    Even the bridge has its own namespace, so the machine's network is never touched.
    """

    def __init__(self, shell: Shell, cluster: Cluster) -> None:
        self.shell = shell
        self.cluster = cluster
        prefix = new_prefix()
        self.switch = f"{prefix}switch"
        self.nodes = [f"{prefix}node{node}" for node in range(cluster.nodes)]
        self.congestion_control = ""
        """The congestion control that TCP really uses on the links, as reported by a socket of node 0."""
        self._made: list[str] = []
        self._at_start: list[tuple[int, int]] = []

    def __enter__(self) -> Network:
        try:
            self._build()
            self.congestion_control = self._ask_congestion_control()
            self._at_start = self.counters()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}"

    def on_node(self, node: int, command: Sequence[str], cores: Sequence[int] = ()) -> list[str]:
        """Return the command line that runs `command` on a node, where the nodes are called node0, node1, ..."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in range(self.cluster.nodes):
            alias = f" {socket.gethostname()}" if other == node else ""
            lines.append(f"{self.address(other)} node{other}{alias}")
            lines.append(f"::ffff:{self.address(other)} node{other}.mapped")  # torch's store asks for this name
        return self.shell.inside(self.nodes[node], child_command(command, "\n".join(lines) + "\n", cores))

    def _build(self) -> None:
        for name in [self.switch, *self.nodes]:
            self._made.append(name)  # first, so that a half-finished creation is removed too
            self.shell.run("ip", "netns", "add", name)
        # No automatic IPv6 addresses: their discovery messages would disturb the byte counts.
        lines = ["link add switch type bridge", "link set switch addrgenmode none up"]
        for node, name in enumerate(self.nodes):
            lines.append(f"link add port{node} type veth peer name {INTERFACE} netns {name}")
            lines.append(f"link set port{node} master switch addrgenmode none up")
        self.shell.batch("ip", self.switch, lines)
        shaping: list[str] = []
        wanted = list(CONGESTION_CONTROLS)
        for node, name in enumerate(self.nodes):
            link = self.cluster.link(node)
            lines = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none gso_max_size {link.packet_bytes}",
                f"addr add {self.address(node)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            self.shell.batch("ip", name, lines)
            self._set_congestion_control(node, wanted)
            try:
                self.shell.batch("tc", name, link.egress_of_node(INTERFACE))
            except LabError as error:
                if not link.delay_seconds:
                    raise
                raise LabError(
                    f"this kernel refuses a delay (is netem available?): leave out --delay: {error}"
                ) from None
            shaping += link.egress_of_switch(f"port{node}")
        self.shell.batch("tc", self.switch, shaping)

    def _set_congestion_control(self, node: int, wanted: list[str]) -> None:
        """Set the node's route to the first of these that the kernel has; remove those that it does not have.

        A route may use any of them, the namespace's setting only those in net.ipv4.tcp_allowed_congestion_control.
        """
        route = f"route replace 10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {self.address(node)}"
        while wanted:
            try:
                self.shell.batch("ip", self.nodes[node], [f"{route} congctl {wanted[0]}"])
            except LabError:
                del wanted[0]
            else:
                return

    def _ask_congestion_control(self) -> str:
        ask = (sys.executable, "-I", "-S", "-c", _ASK, self.address(1))
        return self.shell.run("ip", "netns", "exec", self.nodes[0], *ask).strip()

    def counters(self) -> list[tuple[int, int]]:
        """Return the bytes that each node has sent and received."""
        found = []
        for name in self.nodes:
            answer = json.loads(self.shell.run("ip", "-n", name, "-s", "-j", "link", "show", "dev", INTERFACE))
            counts = answer[0]["stats64"]
            found.append((int(counts["tx"]["bytes"]), int(counts["rx"]["bytes"])))
        return found

    def traffic(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes that each node's interface sent, and received, since the network was built."""
        pairs = [(now[0] - was[0], now[1] - was[1]) for now, was in zip(self.counters(), self._at_start)]
        return tuple(sent for sent, _ in pairs), tuple(received for _, received in pairs)

    def carry(self, node: int, carries: bool) -> None:
        """Let a node's link carry packets, or none; the node is not notified, as if a cable were pulled elsewhere."""
        self.shell.batch("ip", self.switch, [f"link set port{node} {'up' if carries else 'down'}"])

    def close(self) -> None:
        """Remove everything; it is no error if something is already gone."""
        while self._made:
            with contextlib.suppress(LabError):
                remove(self.shell, self._made.pop())
