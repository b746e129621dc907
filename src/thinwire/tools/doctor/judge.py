"""From facts to findings: a pure function, so that any machine can be judged anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.predict.measure.facts import Facts, Interface
from thinwire.predict.measure.network import Choice, gloo_choice, is_loopback, nccl_choice

ERROR, WARNING, NOTE = "error", "warning", "note"
"""Training cannot start or work; it works worse than it could, or fails on several machines; good to know."""
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 9)

_FILES = 1024
_SHARED = 256 << 20  # bytes; containers get 64 MiB by default
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_BROKEN, _DROPPED = 1e-3, 1e-2  # of the packets; the kernel also counts unwanted packets as dropped
_AGAIN = 1e-2  # of the segments
_COUNTED = 10_000  # packets: with fewer, a share means nothing
_BUFFER = 4 << 20  # bytes: fills 1 Gbit/s over 32 ms, 10 Gbit/s over 3 ms
_SLOW_LOOKUP = 1.0  # seconds
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel")


@dataclass(frozen=True)
class Finding:
    """Something found.

    Attributes:
        level: "error": it prevents training; "warning"; "note".
        code: its name in docs/commands.md.
        what: one sentence.
        remedy: what to do.
    """

    level: str
    code: str
    what: str
    remedy: str


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
    """Return what Gloo and NCCL will use on a machine, and the findings.

    Args:
        facts: facts of the machine.
        nodes: machines of the job; None: as in torchrun's variables, if they are set.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1")
    world, local = (_number(facts, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nodes is None and world is not None and local:
        nodes = -(-world // local)  # the least that torchrun's variables imply
    gloo = gloo_choice(facts)
    nccl = nccl_choice(facts) if facts.gpus and "nccl" in facts.backends else None
    setting = _Setting(facts, gloo, nccl, nodes)
    checks = (_launch, _cannot_start, _loopback, _wrong_interface, _names, _differences, _link, _tcp, _torch, _limits)
    found = [finding for check in checks for finding in check(setting)]
    return Diagnosis(nodes, gloo, nccl, tuple(sorted(found, key=lambda one: (ERROR, WARNING, NOTE).index(one.level))))


@dataclass(frozen=True)
class _Setting:
    """The input of the checks; without ``nodes``, problems on several machines are only warnings."""

    facts: Facts
    gloo: Choice
    nccl: Choice | None
    nodes: int | None

    @property
    def choices(self) -> list[Choice]:
        return [choice for choice in (self.gloo, self.nccl) if choice is not None]

    @property
    def interface(self) -> Interface | None:
        """The interface that carries the gradients: NCCL's if there are GPUs for it, else Gloo's."""
        names = (self.nccl or self.gloo).interfaces
        return self.facts.interface(names[0]) if names else None

    @property
    def several(self) -> bool:
        return (self.nodes or 1) > 1

    def on_several(self) -> str:
        return ERROR if self.several else WARNING

    @property
    def others(self) -> list[Interface]:
        """Interfaces that could reach other machines: up, with an address; default route first, Ethernet next."""
        kinds = ["ethernet", "wireless", "tunnel", "virtual", "bridge"]

        def place(one: Interface) -> tuple[bool, int]:
            return one.name != self.facts.default_route, kinds.index(one.kind) if one.kind in kinds else 9

        usable = [one for one in self.facts.interfaces if one.up and one.addresses and one.kind != "loopback"]
        return sorted(usable, key=place)


def _variable(choice: Choice) -> str:
    return f"{choice.backend.upper()}_SOCKET_IFNAME"


def _launch(setting: _Setting) -> Iterator[Finding]:
    facts = setting.facts
    remedy = "Start with torchrun, which sets them all, or unset what is left from an earlier start."
    there = [name for name in _NEEDED if name in facts.environment]
    missing = [name for name in _NEEDED if name not in facts.environment]
    if there and missing and {"RANK", "WORLD_SIZE"} & set(there):
        what = f"{', '.join(there)} is set but {', '.join(missing)} is not: init_process_group will refuse to start."
        yield Finding(ERROR, "variables-missing", what, remedy)
    for name in _NUMBERS:
        value = facts.environment.get(name)
        if value is not None and _number(facts, name) is None:
            yield Finding(ERROR, "variables-wrong", f"{name}={value!r} is not a number.", remedy)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        low, high = _number(facts, rank), _number(facts, size)
        most = high if rank == "LOCAL_WORLD_SIZE" else None if high is None else high - 1
        if low is not None and most is not None and low > most:
            what = f"{rank}={low} does not fit {size}={high}: it must be at most {most}."
            yield Finding(ERROR, "variables-wrong", what, remedy)
    port = _number(facts, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        yield Finding(ERROR, "variables-wrong", f"MASTER_PORT={port} is not a port: it must be 1 to 65535.", remedy)
    ranks = _number(facts, "LOCAL_WORLD_SIZE")
    if ranks is not None and ranks > 1 and ranks * facts.threads > facts.cores and facts.threads > 1:
        what = f"{ranks} ranks with {facts.threads} threads each share {facts.cores} cores: they slow one another down."
        yield Finding(WARNING, "too-many-threads", what, f"Set OMP_NUM_THREADS={max(1, facts.cores // ranks)}.")


def _number(facts: Facts, name: str) -> int | None:
    value = facts.environment.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() else None


def _cannot_start(setting: _Setting) -> Iterator[Finding]:
    for choice in setting.choices:
        if choice.problem:
            candidates = ", ".join(one.name for one in setting.others) or "none here"
            what = f"{choice.title} cannot start: {choice.why}, but {choice.problem}."
            remedy = (
                f"Set {_variable(choice)} to an interface that is up and leads to the other machines ({candidates})"
            )
            yield Finding(ERROR, "interface-missing", what, f"{remedy}, or unset it.")
        for name in choice.interfaces:
            one = setting.facts.interface(name)
            if one is not None and not one.up:
                what = f"{choice.title} will use {name}, which is down or has no carrier."
                remedy = f"Switch it on (`ip link set {name} up`) and check the cable, or name another interface in"
                yield Finding(setting.on_several(), "interface-down", what, f"{remedy} {_variable(choice)}.")


def _loopback(setting: _Setting) -> Iterator[Finding]:
    if not setting.others:
        what = (
            "This machine has no interface that is up and has an address, except the loopback: no other machine can "
            "reach it."
        )
        remedy = "Bring up a network interface; jobs on this machine alone work without one."
        yield Finding(setting.on_several(), "only-loopback", what, remedy)
        return
    for choice in setting.choices:
        if choice.problem or not choice.loopback:
            continue
        variable, best = _variable(choice), setting.others[0].name
        remedy = f"On several machines set {variable}={best}"
        if variable in setting.facts.environment:
            what = f"{choice.why} makes {choice.title} listen on {choice.address}, which no other machine can reach."
            yield Finding(setting.on_several(), "loopback-named", what, f"{remedy}.")
        else:
            what = f"{choice.title} will listen on {choice.address}, which no other machine can reach, because"
            remedy += f", or let the name lead to the address of {best} (in /etc/hosts; Debian writes 127.0.1.1 there)."
            yield Finding(setting.on_several(), "hostname-loopback", f"{what} {choice.why}.", remedy)


def _wrong_interface(setting: _Setting) -> Iterator[Finding]:
    one, facts = setting.interface, setting.facts
    if one is None or one.kind == "loopback":
        return
    choice = setting.nccl or setting.gloo
    variable = _variable(choice)
    others = [other for other in setting.others if other.name != one.name]
    if one.name.startswith(_VIRTUAL) or one.kind == "bridge":
        better = next((o.name for o in others if o.kind == "ethernet"), "the one that leads to the other machines")
        what = f"{choice.title} will use {one.name} ({choice.address}), a bridge or a container's interface, because"
        remedy = f"On several machines set {variable}={better}."
        yield Finding(WARNING, "virtual-interface", f"{what} {choice.why}.", remedy)
    faster = [o for o in others if o.mbits and one.mbits and o.mbits > one.mbits and o.kind == "ethernet"]
    if faster:
        best = max(faster, key=lambda o: o.mbits or 0)
        what = f"{choice.title} will use {one.name} at {one.mbits} Mbit/s, while {best.name} has {best.mbits}."
        remedy = f"If {best.name} leads to the other machines too, set {variable}={best.name}."
        yield Finding(WARNING, "slower-interface", what, remedy)
    elif (
        others
        and variable not in facts.environment
        and facts.default_route not in (None, one.name)
        and not one.name.startswith("ib")  # InfiniBand is meant for this, and has no default route
    ):
        what = f"{choice.title} will use {one.name}, while {facts.default_route} leads to the rest of the world."
        remedy = f"Make sure that the other machines are behind {one.name}, or set {variable}."
        yield Finding(NOTE, "not-the-default-route", what, remedy)


def _names(setting: _Setting) -> Iterator[Finding]:
    host, master = setting.facts.hostname, setting.facts.master
    line = f"Add a line with its address and {host.name} to /etc/hosts"
    if host.seconds > _SLOW_LOOKUP:
        what = f"Looking up this machine's own name, {host.name}, took {host.seconds:.1f} s, and every process group"
        yield Finding(WARNING, "slow-name", f"{what} does it.", f"{line}.")
    if not host.addresses and not setting.gloo.problem and "GLOO_SOCKET_IFNAME" not in setting.facts.environment:
        what = f"This machine's own name, {host.name}, has no address ({host.error or 'none'}), so Gloo falls back on"
        yield Finding(WARNING, "hostname-unknown", f"{what} 127.0.0.1.", f"{line}, or set GLOO_SOCKET_IFNAME.")
    if master is None:
        return
    if not master.addresses:
        what = f"MASTER_ADDR={master.name} has no address ({master.error or 'none'})."
        remedy = "Give rank 0's address as a number, or a name that every machine can look up."
        yield Finding(ERROR, "master-unknown", what, remedy)
    elif setting.several and is_loopback(master.addresses[0]):
        what = f"MASTER_ADDR={master.name} leads to {master.addresses[0]}: on every machine but rank 0's, that is the"
        remedy = "Start torchrun with --master-addr (or --rdzv-endpoint) and rank 0's address on the network."
        yield Finding(ERROR, "master-loopback", f"{what} machine itself.", remedy)
    if master.seconds > _SLOW_LOOKUP:
        what = f"Looking up MASTER_ADDR={master.name} took {master.seconds:.1f} s."
        yield Finding(WARNING, "slow-name", what, "Give its address as a number, or add it to /etc/hosts.")


def _differences(setting: _Setting) -> Iterator[Finding]:
    gloo, nccl = setting.gloo, setting.nccl
    if nccl and not (gloo.problem or nccl.problem) and set(gloo.interfaces) != set(nccl.interfaces[:1]):
        what = f"Gloo will use {', '.join(gloo.interfaces) or gloo.address}, NCCL {', '.join(nccl.interfaces)}."
        remedy = "If that is not intended, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the same interface."
        yield Finding(NOTE, "two-interfaces", what, remedy)
    if ":" in gloo.address and not gloo.loopback:
        what = f"Gloo will listen on an IPv6 address, {gloo.address}, because {gloo.why}."
        remedy = "All machines must reach one another by IPv6; for IPv4 let the name lead to an IPv4 address first."
        yield Finding(NOTE, "ipv6", what, remedy)


def _link(setting: _Setting) -> Iterator[Finding]:
    one = setting.interface
    if one is None or one.kind == "loopback":
        return
    if one.packets >= _COUNTED and (one.errors > _BROKEN * one.packets or one.drops > _DROPPED * one.packets):
        what = (
            f"{one.name} has lost {one.errors + one.drops} of {one.packets} packets ({one.errors} errors, {one.drops} "
            "dropped); TCP slows down at each loss."
        )
        rings = f"enlarge the rings (`ethtool -G {one.name}`), look at the load."
        yield Finding(WARNING, "losses", what, f"Errors: change cable, port or driver. Drops: {rings}")
    if one.kind == "wireless":
        what = f"{one.name} is a wireless interface: its rate varies, and all its stations share it."
        remedy = "Use a cable; if there is none, plan with half the rate that `thinwire probe` finds."
        yield Finding(WARNING, "wireless", what, remedy)
    if one.mbits is not None and one.mbits <= 100 and one.kind == "ethernet":
        what = f"{one.name} runs at {one.mbits} Mbit/s, most likely less than its card can do."
        remedy = "Look at the cable and at the switch's port; `ethtool` lists what both ends offer."
        yield Finding(WARNING, "slow-link", what, remedy)
    if one.mbits is not None and one.mbits >= 10_000 and one.mtu is not None and one.mtu <= 1500:
        what = (
            f"{one.name} runs at {one.mbits} Mbit/s with packets of {one.mtu} bytes: the processor works harder than "
            "it needs to."
        )
        remedy = f"If all machines and switches allow it: `ip link set {one.name} mtu 9000`; measure with"
        yield Finding(NOTE, "small-packets", what, f"{remedy} `thinwire probe`.")


def _tcp(setting: _Setting) -> Iterator[Finding]:
    facts = setting.facts
    if facts.segments >= _COUNTED and facts.retransmitted > _AGAIN * facts.segments:
        what = (
            f"TCP has sent {facts.retransmitted} of {facts.segments} segments twice since this machine started: "
            "packets are lost on the way."
        )
        remedy = "Look for a port or link that is overloaded or broken, between this machine and those it talks to."
        yield Finding(WARNING, "retransmissions", what, remedy)
    largest = {name: (facts.tcp.get(name, "").split() or [""])[-1] for name in ("tcp_rmem", "tcp_wmem")}
    small = {name: value for name, value in largest.items() if value.isdecimal() and 0 < int(value) < _BUFFER}
    if small:
        values = ", ".join(f"net.ipv4.{name} ends at {int(value)}" for name, value in small.items())
        settings = " ".join(f'net.ipv4.{name}="4096 131072 {4 * _BUFFER}"' for name in small)
        what = f"TCP's buffers are small ({values} bytes): on links that are fast and long one connection cannot fill"
        remedy = f"`sysctl -w {settings}`; compare with `thinwire probe`."
        yield Finding(NOTE, "small-buffers", f"{what} them.", remedy)


def _torch(setting: _Setting) -> Iterator[Finding]:
    facts = setting.facts
    for name, have, oldest in (("Python", facts.python, OLDEST_PYTHON), ("torch", facts.torch, OLDEST_TORCH)):
        if _version(have) < oldest:
            least = ".".join(map(str, oldest))
            remedy = f"Install {name} {least} or newer, in a virtual environment if others need the old one."
            yield Finding(ERROR, "too-old", f"{name} is {have}, and thinwire needs {least} or newer.", remedy)
    if not {"gloo", "nccl"} & set(facts.backends):
        what = "This build of torch has neither Gloo nor NCCL, so ranks cannot communicate."
        remedy = "Install torch from PyPI or pytorch.org; your own builds need USE_DISTRIBUTED=1."
        yield Finding(ERROR, "no-backend", what, remedy)
    if facts.gpu_driver and not facts.gpus and "CUDA_VISIBLE_DEVICES" not in facts.environment:
        what = (
            f"This machine has a GPU driver, but torch {facts.torch} sees no GPU: training will run on the processor."
        )
        remedy = "Install a build of torch for the driver's CUDA version (pytorch.org says which)."
        yield Finding(WARNING, "gpu-unused", what, remedy)
    if facts.environment.get("GLOO_DEVICE_TRANSPORT", "").upper() == "TCP_TLS":
        what = (
            "GLOO_DEVICE_TRANSPORT=TCP_TLS: Gloo carries everything that ranks exchange, encrypted; thinwire's own TCP "
            "connections, which are plain and faster, are not used."
        )
        yield Finding(NOTE, "gloo-tls", what, "Nothing to do if the network is not trusted; otherwise unset it.")


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _limits(setting: _Setting) -> Iterator[Finding]:
    facts = setting.facts
    if facts.quota is not None and facts.quota < facts.cores and facts.threads > max(1.0, facts.quota):
        what = f"The container may use {facts.quota:g} of {facts.cores} cores, but torch starts {facts.threads} threads"
        remedy = f"Set OMP_NUM_THREADS={max(1, int(facts.quota))}."
        yield Finding(WARNING, "quota", f"{what}, which will be throttled.", remedy)
    if facts.open_files is not None and facts.open_files[0] < _FILES:
        soft, hard = facts.open_files
        what = f"This process may open {soft} files; every pair of ranks takes several sockets, data loaders more."
        remedy = f"`ulimit -n {min(65536, hard)}` before the start"
        yield Finding(WARNING, "open-files", what, remedy + (", and raise the hard limit." if hard < _FILES else "."))
    if facts.shm_bytes is not None and facts.shm_bytes < _SHARED:
        what = (
            f"/dev/shm holds {facts.shm_bytes / (1 << 20):.0f} MiB: DataLoader workers and NCCL's ranks on one machine "
            "exchange their data there, and die with a bus error when it is full."
        )
        remedy = "Start the container with --shm-size=8g or --ipc=host."
        yield Finding(WARNING, "shared-memory", what, remedy)
    if facts.lab == "loopback":
        reason = f" ({facts.lab_reason})." if facts.lab_reason else "."
        remedy = "Run as root, or allow user namespaces, and install iproute2; training does not need it."
        yield Finding(NOTE, "no-lab", "`thinwire lab`, `bench` and `probe` cannot emulate links here" + reason, remedy)
