"""Namespaces, one per node and one for the switch: the rights to make them, links (rate, delay, loss), removal."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from thinwire.tools.lab import relay
from thinwire.tools.lab.cluster import Cluster, LabError
from thinwire.tools.lab.ranks import child_command

_TIMEOUT_SECONDS = 60.0
_FOLDER = Path("/run/netns")
NAME = re.compile(r"tw(\d+)-(\d+)-\d+-\w+")
_RELAY_QUEUE = 10_000  # packets that a node may hand over while the relay waits for a core
_serial = itertools.count()
_MODES = ("root", "user", "loopback")
# `ip netns` keeps names in /run/netns. `cat` holds the namespaces open for as long as the lab holds its standard input.
_HOLD = """
[ -d /run/netns ] && mount -t tmpfs tw /run/netns || { mount -t tmpfs tw /run && mkdir /run/netns; } || exit
echo ready
exec cat
"""
INTERFACE = "eth0"
"""Name of a node's interface, in the namespace of that node."""
CONGESTION_CONTROLS = ("cubic", "reno")
"""What TCP uses on the links unless asked, the first available: CUBIC is the usual default, Reno always exists.

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


def tool(name: str) -> str:
    """Return the absolute path of a system tool; also looks where an ordinary user's PATH does not."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise LabError(f"the tool {name!r} is missing: install the package {package}")
    return found


@dataclass(frozen=True)
class Shell:
    """A place to run commands: this process's own namespaces, or those that `enter` leads to."""

    enter: tuple[str, ...] = ()

    def run(self, *command: str, stdin: str = "") -> str:
        """Run one command and return its output; raise `LabError` with its error message."""
        done = subprocess.run(
            [*self.enter, tool(command[0]), *command[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            start_new_session=True,  # ctrl-C in the terminal is for the lab, not for its tools
        )
        if done.returncode:
            complaint = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
            raise LabError(f"`{' '.join(command)}` failed: {complaint}")
        return done.stdout

    def batch(self, program: str, namespace: str, lines: Iterable[str]) -> None:
        text = "".join(line + "\n" for line in lines)
        if text:
            self.run(program, "-n", namespace, "-batch", "-", stdin=text)

    def inside(self, namespace: str, command: Sequence[str]) -> list[str]:
        """Return the command line of that command in a namespace; it keeps its process id."""
        return [*self.enter, tool("ip"), "netns", "exec", namespace, *command]


def new_prefix() -> str:
    return f"tw{os.getpid()}-{_start_ticks(os.getpid())}-{next(_serial)}-"


def _start_ticks(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def clean(*, all: bool = False) -> list[str]:
    """Remove what killed runs left behind: their namespaces, links and any process still inside.

    Runs in a user namespace leave nothing behind: the kernel removes it with its last process.

    Args:
        all: also remove those of runs whose process is still alive.

    Returns:
        The names of the removed namespaces.

    Raises:
        LabError: some cannot be removed, for lack of rights.
    """
    names = sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []
    removed = []
    for name in names:
        match = NAME.fullmatch(name)
        if match and (all or _start_ticks(int(match[1])) != int(match[2])):
            try:
                remove(Shell(), name)
            except LabError:
                if (_FOLDER / name).exists():  # otherwise its owner removed it first
                    raise
            removed.append(name)
    return removed


def remove(shell: Shell, name: str) -> None:
    """Remove one namespace; first kill processes still inside it, or it would live on without a name."""
    for _ in range(40):
        inside = [int(word) for word in shell.run("ip", "netns", "pids", name).split()]
        if not inside:
            break
        for pid in inside:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                raise LabError(f"no permission to end process {pid} in namespace {name}: run as root") from None
        time.sleep(0.05)
    shell.run("ip", "netns", "delete", name)


def available() -> str:
    """Return with which rights namespaces can be made, after a trial: "root", "user" or "loopback" (none)."""
    return find_mode()[0]


def find_mode() -> tuple[str, str]:
    forced = os.environ.get("THINWIRE_LAB_MODE") or None
    if forced not in (None, *_MODES):
        raise LabError(f"THINWIRE_LAB_MODE={forced!r} is not one of {', '.join(_MODES)}: unset it")
    return _try_modes(forced)


@functools.cache
def _try_modes(forced: str | None) -> tuple[str, str]:
    if forced == "loopback":
        return forced, "THINWIRE_LAB_MODE=loopback"
    reason = ""
    for mode in ("root", "user") if forced is None else (forced,):
        if mode == "root" and os.geteuid() != 0:
            reason = "not root"
            continue
        try:
            with open_shell(mode) as shell:
                _trial(shell)
        except (LabError, OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        else:
            return mode, ""
    return "loopback", reason


def _trial(shell: Shell) -> None:
    name = new_prefix() + "trial"
    try:
        shell.run("ip", "netns", "add", name)
        shell.batch("ip", name, ["link add tw0 type veth peer name tw1", "link add tw2 type bridge"])
        shell.batch("tc", name, ["qdisc add dev tw0 root tbf rate 1mbit burst 8192 limit 65536"])
        subprocess.run(
            shell.inside(name, [tool("true")]), check=True, capture_output=True, timeout=30, start_new_session=True
        )
    finally:
        with contextlib.suppress(LabError):
            remove(shell, name)


@contextlib.contextmanager
def open_shell(mode: str) -> Iterator[Shell]:
    """Open a shell that may create namespaces; in mode "user" everything it made disappears when it is closed."""
    if mode == "root":
        yield Shell()
        return
    command = [tool("unshare"), "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _HOLD]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != b"ready\n":
                complaint = holder.stderr.read().decode(errors="replace").strip().splitlines()
                raise LabError("no user namespace: " + (complaint[-1] if complaint else "the kernel refuses it"))
            target = ("--target", str(holder.pid), "--user", "--mount", "--net")
            yield Shell((tool("nsenter"), "--preserve-credentials", *target))
        finally:
            holder.kill()


def has_netem(shell: Shell, namespace: str) -> bool:
    """Try whether the kernel can delay packets by itself."""
    try:
        shell.batch("tc", namespace, ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except LabError:
        return False
    return True


class RelayProcess:
    """The process that carries the packets of long links where the kernel cannot; it dies with this one."""

    def __init__(self, network: Network) -> None:
        links = [network.cluster.link(node) for node in range(network.cluster.nodes)]
        told = [
            {
                "namespace": name, "device": INTERFACE, "address": network.address(node), "rate": link.rate,
                "queue": link.queue_bytes, "delay": link.delay_seconds, "jitter": link.jitter_seconds,
                "loss": link.loss,
            }
            for node, (name, link) in enumerate(zip(network.nodes, links))
        ]  # fmt: skip
        command = child_command([sys.executable, "-I", "-S", str(Path(relay.__file__))])
        self._process = subprocess.Popen(
            network.shell.inside(network.switch, command), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        try:
            if (answer := self.ask(json.dumps(told))) != "ready":
                raise LabError(
                    f"a delay or loss needs the kernel's sch_netem, or /dev/net/tun for a relay, and both are refused "
                    f"({answer}): run modprobe tun, or let this user read and write the device (docker run --device "
                    "/dev/net/tun)"
                )
        except BaseException:
            self.close()
            raise

    def ask(self, request: str) -> str:
        """Send one line and return the line of the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        if answer := self._process.stdout.readline():
            return answer.decode().strip()
        last = self._process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise LabError(f"the relay of the lab's links has ended: {last[0] if last else 'it was killed'}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Network:
    """The network of one run, built and always taken down; even the bridge has a namespace of its own.

    Links with a delay or loss are shaped by netem; where the kernel has none, a relay takes the place of the bridge.
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
        self._relay: RelayProcess | None = None
        self._at_start: list[tuple[int, int]] = []

    def __enter__(self) -> Network:
        try:
            self._build()
            ask = (sys.executable, "-I", "-S", "-c", _ASK, self.address(1))
            self.congestion_control = self.shell.run("ip", "netns", "exec", self.nodes[0], *ask).strip()
            self._at_start = self.counters()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
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
        links = [self.cluster.link(node) for node in range(self.cluster.nodes)]
        if any(link.long for link in links) and not has_netem(self.shell, self.switch):
            self._relay = RelayProcess(self)
        else:
            # No automatic IPv6 addresses: their discovery messages would disturb the byte counts.
            lines = ["link add switch type bridge", "link set switch addrgenmode none up"]
            for node, name in enumerate(self.nodes):
                lines.append(f"link add port{node} type veth peer name {INTERFACE} netns {name}")
                lines.append(f"link set port{node} master switch addrgenmode none up")
            self.shell.batch("ip", self.switch, lines)
        shaping: list[str] = []
        for node, (name, link) in enumerate(zip(self.nodes, links)):
            offload = f"gso_max_size {link.packet_bytes}"
            if self._relay is not None:
                offload += f" txqueuelen {_RELAY_QUEUE}"
            elif link.loss:
                offload += " gso_max_segs 1"  # netem loses whole offloaded packets
            lines = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none {offload}",
                f"addr add {self.address(node)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            self.shell.batch("ip", name, lines)
            self._set_congestion_control(node)
            if self._relay is None:
                self.shell.batch("tc", name, link.egress_of_node(INTERFACE))
                shaping += link.egress_of_switch(f"port{node}")
        self.shell.batch("tc", self.switch, shaping)

    def _set_congestion_control(self, node: int) -> None:
        """Use what was asked for, or the first that the kernel has; set on the route, which may use any."""
        route = f"route replace 10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {self.address(node)}"
        asked = self.cluster.congestion
        for one in [asked] if asked else CONGESTION_CONTROLS:
            with contextlib.suppress(LabError):
                self.shell.batch("ip", self.nodes[node], [f"{route} congctl {one}"])
                return
        if asked:
            known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            raise LabError(
                f"this kernel does not offer the congestion control {asked!r}, only {', '.join(known)}: "
                f"use one of them, or load it with modprobe tcp_{asked}"
            )

    def counters(self) -> list[tuple[int, int]]:
        found = []
        for name in self.nodes:
            answer = json.loads(self.shell.run("ip", "-n", name, "-s", "-j", "link", "show", "dev", INTERFACE))
            counts = answer[0]["stats64"]
            found.append((int(counts["tx"]["bytes"]), int(counts["rx"]["bytes"])))
        return found

    def traffic(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pairs = [(now[0] - was[0], now[1] - was[1]) for now, was in zip(self.counters(), self._at_start)]
        return tuple(sent for sent, _ in pairs), tuple(received for _, received in pairs)

    def carry(self, node: int, carries: bool) -> None:
        """Let a node's link carry packets, or none; the node is not notified, as if a cable were pulled elsewhere."""
        if self._relay is not None:
            self._relay.ask(f"carry {node} {int(carries)}")
        else:
            self.shell.batch("ip", self.switch, [f"link set port{node} {'up' if carries else 'down'}"])

    def packets(self) -> tuple[dict[str, int], ...] | None:
        """Return what the relay did with each node's packets: forwarded, lost, dropped; None: there is no relay."""
        return None if self._relay is None else tuple(json.loads(self._relay.ask("counts")))

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        while self._made:
            with contextlib.suppress(LabError):
                remove(self.shell, self._made.pop())
