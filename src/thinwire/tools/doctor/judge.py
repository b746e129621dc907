"""From facts to findings: a pure function, so that any machine can be judged anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.predict.measure.facts import Facts, Interface
from thinwire.predict.measure.sockets import Choice, gloo_choice, is_loopback, nccl_choice

ERROR, WARNING, NOTE = "error", "warning", "note"
"""Training cannot start or work; it works worse than it could, or fails on several machines; good to know."""


@dataclass(frozen=True)
class Finding:
    """Something found.

    Attributes:
        level: "error": it prevents training; "warning"; "note".
        code: its name in docs/doctor.md.
        what: one sentence.
        remedy: what to do.
    """

    level: str
    code: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Setting:
    """The input of the checks: the facts, what the backends will use, and the number of machines.

    ``nodes``: machines of the job; None: unknown, so that problems on several machines are only warnings.
    """

    facts: Facts
    gloo: Choice
    nccl: Choice | None
    nodes: int | None

    @property
    def several(self) -> bool:
        """Whether the job is known to run on several machines."""
        return (self.nodes or 1) > 1

    @property
    def choices(self) -> list[Choice]:
        """Choices of the backends that this machine can use."""
        return [choice for choice in (self.gloo, self.nccl) if choice is not None]

    @property
    def interface(self) -> Interface | None:
        """The interface that carries the gradients: NCCL's if there are GPUs for it, else Gloo's."""
        names = (self.nccl or self.gloo).interfaces
        return self.facts.interface(names[0]) if names else None

    def on_several(self) -> str:
        """Level of findings that matter only on several machines."""
        return ERROR if self.several else WARNING


OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 9)
_FILES = 1024
_SHARED = 256 << 20  # bytes; containers get 64 MiB by default
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_REMEDY = "Start with torchrun, which sets them all, or unset what is left from an earlier start."


def environment(setting: Setting) -> Iterator[Finding]:
    """Yield the findings on torch, limits and the lab."""
    facts = setting.facts
    for name, have, oldest in (("Python", facts.python, OLDEST_PYTHON), ("torch", facts.torch, OLDEST_TORCH)):
        if _version(have) < oldest:
            least = ".".join(map(str, oldest))
            yield Finding(
                ERROR,
                "too-old",
                f"{name} is {have}, and thinwire needs {least} or newer.",
                f"Install {name} {least} or newer, in a virtual environment if others need the old one.",
            )
    if not {"gloo", "nccl"} & set(facts.backends):
        yield Finding(
            ERROR,
            "no-backend",
            "This build of torch has neither Gloo nor NCCL, so ranks cannot communicate.",
            "Install torch from PyPI or pytorch.org; your own builds need USE_DISTRIBUTED=1.",
        )
    if facts.gpu_driver and not facts.gpus and "CUDA_VISIBLE_DEVICES" not in facts.environment:
        yield Finding(
            WARNING,
            "gpu-unused",
            f"This machine has a GPU driver, but torch {facts.torch} sees no GPU: training will run on the processor.",
            "Install a build of torch for the driver's CUDA version (pytorch.org says which).",
        )
    if facts.quota is not None and facts.quota < facts.cores and facts.threads > max(1.0, facts.quota):
        yield Finding(
            WARNING,
            "quota",
            f"The container may use {facts.quota:g} of {facts.cores} cores, but torch starts {facts.threads} "
            "threads, which will be "
            "throttled.",
            f"Set OMP_NUM_THREADS={max(1, int(facts.quota))}.",
        )
    if facts.open_files is not None and facts.open_files[0] < _FILES:
        soft, hard = facts.open_files
        yield Finding(
            WARNING,
            "open-files",
            f"This process may open {soft} files; every pair of ranks takes several sockets, data loaders more.",
            f"`ulimit -n {min(65536, hard)}` before the start"
            + (", and raise the hard limit." if hard < _FILES else "."),
        )
    if facts.shm_bytes is not None and facts.shm_bytes < _SHARED:
        yield Finding(
            WARNING,
            "shared-memory",
            f"/dev/shm holds {facts.shm_bytes / (1 << 20):.0f} MiB: DataLoader workers and NCCL's ranks on one machine "
            "exchange their data there, and die with a bus error when it is full.",
            "Start the container with --shm-size=8g or --ipc=host.",
        )
    if facts.environment.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS":
        yield Finding(
            NOTE,
            "gloo-tls",
            "GLOO_DEVICE_TRANSPORT=TCP_TLS: Gloo carries everything that ranks exchange, encrypted; thinwire's own TCP "
            "connections, which are plain and faster, are not used.",
            "Nothing to do if the network is not trusted; otherwise unset it.",
        )
    if facts.lab == "loopback":
        yield Finding(
            NOTE,
            "no-lab",
            "`thinwire lab`, `bench` and `probe` cannot emulate links here"
            + (f" ({facts.lab_reason})." if facts.lab_reason else "."),
            "Run as root, or allow user namespaces, and install iproute2; training does not need it.",
        )


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def nodes_of(facts: Facts) -> int | None:
    """Return the least number of machines that torchrun's variables imply; None if they do not say."""
    world, local = (_number(facts, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or local is None or local < 1:
        return None
    return -(-world // local)


def launch(setting: Setting) -> Iterator[Finding]:
    """Yield the findings on torchrun's variables."""
    facts = setting.facts
    there = [name for name in _NEEDED if name in facts.environment]
    missing = [name for name in _NEEDED if name not in facts.environment]
    if there and missing and {"RANK", "WORLD_SIZE"} & set(there):
        yield Finding(
            ERROR,
            "variables-missing",
            f"{', '.join(there)} is set but {', '.join(missing)} is not: init_process_group will refuse to start.",
            _REMEDY,
        )
    for name in _NUMBERS:
        value = facts.environment.get(name)
        if value is not None and _number(facts, name) is None:
            yield Finding(ERROR, "variables-wrong", f"{name}={value!r} is not a number.", _REMEDY)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        low, high = _number(facts, rank), _number(facts, size)
        most = high if rank == "LOCAL_WORLD_SIZE" else None if high is None else high - 1
        if low is not None and most is not None and low > most:
            yield Finding(
                ERROR,
                "variables-wrong",
                f"{rank}={low} does not fit {size}={high}: it must be at most {most}.",
                _REMEDY,
            )
    port = _number(facts, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        yield Finding(ERROR, "variables-wrong", f"MASTER_PORT={port} is not a port: it must be 1 to 65535.", _REMEDY)
    yield from _threads(facts)


def _threads(facts: Facts) -> Iterator[Finding]:
    ranks = _number(facts, "LOCAL_WORLD_SIZE")
    if ranks is not None and ranks > 1 and ranks * facts.threads > facts.cores and facts.threads > 1:
        fair = max(1, facts.cores // ranks)
        yield Finding(
            WARNING,
            "too-many-threads",
            f"{ranks} ranks with {facts.threads} threads each share {facts.cores} cores: they slow one another down.",
            f"Set OMP_NUM_THREADS={fair}.",
        )


def _number(facts: Facts, name: str) -> int | None:
    value = facts.environment.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() else None


_BROKEN, _DROPPED = 1e-3, 1e-2  # of the packets; the kernel also counts unwanted packets as dropped
_AGAIN = 1e-2  # of the segments
_COUNTED = 10_000  # packets: with fewer, a share means nothing
_BUFFER = 4 << 20  # bytes: fills 1 Gbit/s over 32 ms, 10 Gbit/s over 3 ms


def quality(setting: Setting) -> Iterator[Finding]:
    """Yield all findings of this file."""
    facts, one = setting.facts, setting.interface
    if one is not None and one.kind != "loopback":
        if one.packets >= _COUNTED and (one.errors > _BROKEN * one.packets or one.drops > _DROPPED * one.packets):
            yield Finding(
                WARNING,
                "losses",
                f"{one.name} has lost {one.errors + one.drops} of {one.packets} packets ({one.errors} errors, "
                f"{one.drops} "
                "dropped); TCP slows down at each loss.",
                f"Errors: change cable, port or driver. Drops: enlarge the rings (`ethtool -G {one.name}`), look at "
                "the load.",
            )
        if one.kind == "wireless":
            yield Finding(
                WARNING,
                "wireless",
                f"{one.name} is a wireless interface: its rate varies, and all its stations share it.",
                "Use a cable; if there is none, plan with half the rate that `thinwire probe` finds.",
            )
        if one.mbits is not None and one.mbits <= 100 and one.kind == "ethernet":
            yield Finding(
                WARNING,
                "slow-link",
                f"{one.name} runs at {one.mbits} Mbit/s, most likely less than its card can do.",
                "Look at the cable and at the switch's port; `ethtool` lists what both ends offer.",
            )
        if one.mbits is not None and one.mbits >= 10_000 and one.mtu is not None and one.mtu <= 1500:
            yield Finding(
                NOTE,
                "small-packets",
                f"{one.name} runs at {one.mbits} Mbit/s with packets of {one.mtu} bytes: the processor works harder "
                "than it needs to.",
                f"If all machines and switches allow it: `ip link set {one.name} mtu 9000`; measure with `thinwire "
                "probe`.",
            )
    if facts.segments >= _COUNTED and facts.retransmitted > _AGAIN * facts.segments:
        yield Finding(
            WARNING,
            "retransmissions",
            f"TCP has sent {facts.retransmitted} of {facts.segments} segments twice since this machine started: "
            "packets are lost on the way.",
            "Look for a port or link that is overloaded or broken, between this machine and those it talks to.",
        )
    small = [name for name in ("tcp_rmem", "tcp_wmem") if 0 < _largest(facts.tcp.get(name, "")) < _BUFFER]
    if small:
        values = ", ".join(f"net.ipv4.{name} ends at {_largest(facts.tcp[name])}" for name in small)
        settings = " ".join(f'net.ipv4.{name}="4096 131072 {4 * _BUFFER}"' for name in small)
        yield Finding(
            NOTE,
            "small-buffers",
            f"TCP's buffers are small ({values} bytes): on links that are fast and long one connection cannot fill "
            "them.",
            f"`sysctl -w {settings}`; compare with `thinwire probe`.",
        )


def _largest(triple: str) -> int:
    """Return the last number of such a setting."""
    last = (triple.split() or [""])[-1]
    return int(last) if last.isdecimal() else 0


_SLOW_LOOKUP = 1.0  # seconds
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel")


def reachability(setting: Setting) -> Iterator[Finding]:
    """Yield all findings of this file."""
    yield from _cannot_start(setting)
    yield from _loopback(setting)
    yield from _wrong_interface(setting)
    yield from _names(setting)
    yield from _differences(setting)


def _cannot_start(setting: Setting) -> Iterator[Finding]:
    for choice in setting.choices:
        if choice.problem:
            candidates = ", ".join(_others(setting)) or "none here"
            variable = f"{choice.backend.upper()}_SOCKET_IFNAME"
            yield Finding(
                ERROR,
                "interface-missing",
                f"{choice.title} cannot start: {choice.why}, but {choice.problem}.",
                f"Set {variable} to an interface that is up and leads to the other machines ({candidates}), or "
                "unset it.",
            )
    for choice in setting.choices:
        for name in choice.interfaces:
            one = setting.facts.interface(name)
            if one is not None and not one.up:
                yield Finding(
                    setting.on_several(),
                    "interface-down",
                    f"{choice.title} will use {name}, which is down or has no carrier.",
                    f"Switch it on (`ip link set {name} up`) and check the cable, or name another interface in "
                    f"{choice.backend.upper()}_SOCKET_IFNAME.",
                )


def _loopback(setting: Setting) -> Iterator[Finding]:
    others = _others(setting)
    if not others:
        yield Finding(
            setting.on_several(),
            "only-loopback",
            "This machine has no interface that is up and has an address, except the loopback: no other machine can "
            "reach it.",
            "Bring up a network interface; jobs on this machine alone work without one.",
        )
        return
    for choice in setting.choices:
        if choice.problem or not choice.loopback:
            continue
        variable, best = f"{choice.backend.upper()}_SOCKET_IFNAME", others[0]
        if variable in setting.facts.environment:
            yield Finding(
                setting.on_several(),
                "loopback-named",
                f"{choice.why} makes {choice.title} listen on {choice.address}, which no other machine can reach.",
                f"On several machines set {variable}={best}.",
            )
        else:
            yield Finding(
                setting.on_several(),
                "hostname-loopback",
                f"{choice.title} will listen on {choice.address}, which no other machine can reach, because "
                f"{choice.why}.",
                f"On several machines set {variable}={best}, or let the name lead to the address of {best} "
                "(in /etc/hosts; Debian writes 127.0.1.1 there).",
            )


def _wrong_interface(setting: Setting) -> Iterator[Finding]:
    """Report an interface that can be reached but is probably the wrong one."""
    one, facts = setting.interface, setting.facts
    if one is None or one.kind == "loopback":
        return
    choice = setting.nccl or setting.gloo
    variable = f"{choice.backend.upper()}_SOCKET_IFNAME"
    others = [other for name in _others(setting) if (other := facts.interface(name)) and other.name != one.name]
    if one.name.startswith(_VIRTUAL) or one.kind == "bridge":
        better = next((o.name for o in others if o.kind == "ethernet"), "the one that leads to the other machines")
        yield Finding(
            WARNING,
            "virtual-interface",
            f"{choice.title} will use {one.name} ({choice.address}), a bridge or a container's interface, because "
            f"{choice.why}.",
            f"On several machines set {variable}={better}.",
        )
    faster = [o for o in others if o.mbits and one.mbits and o.mbits > one.mbits and o.kind == "ethernet"]
    if faster:
        best = max(faster, key=lambda o: o.mbits or 0)
        yield Finding(
            WARNING,
            "slower-interface",
            f"{choice.title} will use {one.name} at {one.mbits} Mbit/s, while {best.name} has {best.mbits}.",
            f"If {best.name} leads to the other machines too, set {variable}={best.name}.",
        )
    elif (
        others
        and variable not in facts.environment
        and facts.default_route not in (None, one.name)
        and not one.name.startswith("ib")  # InfiniBand is meant for this, and has no default route
    ):
        yield Finding(
            NOTE,
            "not-the-default-route",
            f"{choice.title} will use {one.name}, while {facts.default_route} leads to the rest of the world.",
            f"Make sure that the other machines are behind {one.name}, or set {variable}.",
        )


def _names(setting: Setting) -> Iterator[Finding]:
    host, master = setting.facts.hostname, setting.facts.master
    if host.seconds > _SLOW_LOOKUP:
        yield Finding(
            WARNING,
            "slow-name",
            f"Looking up this machine's own name, {host.name}, took {host.seconds:.1f} s, and every process group "
            "does it.",
            f"Add a line with its address and {host.name} to /etc/hosts.",
        )
    if not host.addresses and not setting.gloo.problem and "GLOO_SOCKET_IFNAME" not in setting.facts.environment:
        yield Finding(
            WARNING,
            "hostname-unknown",
            f"This machine's own name, {host.name}, has no address ({host.error or 'none'}), so Gloo falls back on "
            "127.0.0.1.",
            f"Add a line with its address and {host.name} to /etc/hosts, or set GLOO_SOCKET_IFNAME.",
        )
    if master is None:
        return
    if not master.addresses:
        yield Finding(
            ERROR,
            "master-unknown",
            f"MASTER_ADDR={master.name} has no address ({master.error or 'none'}).",
            "Give rank 0's address as a number, or a name that every machine can look up.",
        )
    elif setting.several and is_loopback(master.addresses[0]):
        yield Finding(
            ERROR,
            "master-loopback",
            f"MASTER_ADDR={master.name} leads to {master.addresses[0]}: on every machine but rank 0's, that is the "
            "machine itself.",
            "Start torchrun with --master-addr (or --rdzv-endpoint) and rank 0's address on the network.",
        )
    if master.seconds > _SLOW_LOOKUP:
        yield Finding(
            WARNING,
            "slow-name",
            f"Looking up MASTER_ADDR={master.name} took {master.seconds:.1f} s.",
            "Give its address as a number, or add it to /etc/hosts.",
        )


def _differences(setting: Setting) -> Iterator[Finding]:
    gloo, nccl = setting.gloo, setting.nccl
    if nccl and not (gloo.problem or nccl.problem) and set(gloo.interfaces) != set(nccl.interfaces[:1]):
        yield Finding(
            NOTE,
            "two-interfaces",
            f"Gloo will use {', '.join(gloo.interfaces) or gloo.address}, NCCL {', '.join(nccl.interfaces)}.",
            "If that is not intended, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the same interface.",
        )
    if ":" in gloo.address and not gloo.loopback:
        yield Finding(
            NOTE,
            "ipv6",
            f"Gloo will listen on an IPv6 address, {gloo.address}, because {gloo.why}.",
            "All machines must reach one another by IPv6; for IPv4 let the name lead to an IPv4 address first.",
        )


def _others(setting: Setting) -> list[str]:
    """Return interfaces that could reach other machines: up, with an address; default route first, Ethernet next."""
    facts = setting.facts
    usable = [one for one in facts.interfaces if one.up and one.addresses and one.kind != "loopback"]
    kinds = ("ethernet", "wireless", "tunnel", "virtual", "bridge")
    usable.sort(key=lambda one: (one.name != facts.default_route, kinds.index(one.kind) if one.kind in kinds else 9))
    return [one.name for one in usable]


_ORDER = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Diagnosis:
    """The conclusions from the facts.

    Attributes:
        nodes: machines of the job, as given or as in torchrun's variables; None: unknown.
        gloo, nccl: what the backends will use; ``nccl`` is None if there is no GPU for it.
        findings: the worst first.
    """

    nodes: int | None
    gloo: Choice
    nccl: Choice | None
    findings: tuple[Finding, ...]

    @property
    def prevents_training(self) -> bool:
        """Whether some finding prevents training."""
        return any(finding.level == ERROR for finding in self.findings)


def judge(facts: Facts, nodes: int | None = None) -> Diagnosis:
    """Return the findings for a machine.

    Args:
        facts: facts of the machine.
        nodes: machines of the job; None: as in torchrun's variables, if they are set.

    Returns:
        What Gloo and NCCL will use, and the findings.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1")
    nodes = nodes or nodes_of(facts)
    gloo = gloo_choice(facts)
    nccl = nccl_choice(facts) if facts.gpus and "nccl" in facts.backends else None
    setting = Setting(facts, gloo, nccl, nodes)
    found = [finding for check in (launch, reachability, quality, environment) for finding in check(setting)]
    return Diagnosis(nodes, gloo, nccl, tuple(sorted(found, key=lambda finding: _ORDER.index(finding.level))))
