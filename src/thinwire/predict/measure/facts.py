"""What is known of a machine, as plain data: collected here, read back from a report, or written by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.core.records import Record


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        up: whether it is switched on and has a carrier.
        kind: "loopback", "ethernet", "wireless", "bridge", "virtual" or "tunnel".
        addresses: IPv4 first, each group in the kernel's order.
        mbits: megabits per second that the driver reports; None: it reports none (most virtual ones).
        mtu: largest packet in bytes.
        packets, errors, drops: since the interface was created, both directions together.
    """

    name: str
    up: bool = True
    kind: str = "ethernet"
    addresses: tuple[str, ...] = ()
    mbits: int | None = None
    mtu: int | None = None
    packets: int = 0
    errors: int = 0
    drops: int = 0


@dataclass(frozen=True)
class Name:
    """The result of looking up a host name.

    Attributes:
        addresses: addresses that the resolver returns, in its order.
        bound: those to which a socket of this machine can be bound.
        error: the resolver's message, if it failed.
    """

    name: str
    addresses: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Facts(Record):
    """A machine, as one process on it sees it.

    Attributes:
        thinwire, python, torch: versions. platform: operating system and kernel.
        packages: version of each optional package that is installed. extras: the extras that are complete.
        backends: of torch.distributed. gpus: their names, as torch sees them.
        gpu_driver: whether a GPU driver is loaded, even if torch does not use it.
        cores: that this process may use. quota: cores that its control group grants; None: no limit.
        threads: of torch, in this process. memory_bytes: of the machine.
        interfaces: all of them. default_route: the interface that leads elsewhere.
        hostname: this machine's name, looked up. master: ``MASTER_ADDR`` looked up, if it is set.
        environment: the variables that torchrun, Gloo, NCCL and thinwire read.
        tcp: settings of the kernel. segments, retransmitted: TCP segments sent since the start, and those sent again.
        open_files: how many this process may have open, soft and hard limit; None: unknown.
        shm_bytes: size of /dev/shm; None: there is none.
        lab: with which rights the lab emulates links: "root", "user" or "loopback" (it cannot). lab_reason: why not.
        lab_congestion_control: TCP's congestion control on those links; None: unknown, or there are no links.
    """

    called: ClassVar[str] = "the output of `thinwire doctor --json`"
    alone: ClassVar[bool] = False  # doctor tells more

    thinwire: str
    python: str
    torch: str
    platform: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("gloo",)
    gpus: tuple[str, ...] = ()
    gpu_driver: bool = False
    cores: int = 1
    quota: float | None = None
    threads: int = 1
    memory_bytes: int | None = None
    interfaces: tuple[Interface, ...] = ()
    default_route: str | None = None
    hostname: Name = Name("localhost")
    master: Name | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    tcp: Mapping[str, str] = field(default_factory=dict)
    segments: int = 0
    retransmitted: int = 0
    open_files: tuple[int, int] | None = None
    shm_bytes: int | None = None
    lab: str = "loopback"
    lab_reason: str = ""
    lab_congestion_control: str | None = None

    def interface(self, name: str | None) -> Interface | None:
        """Return the interface with that name."""
        return next((one for one in self.interfaces if one.name == name), None)

    def interface_of(self, address: str) -> Interface | None:
        """Return the interface that has an address; all of 127.0.0.0/8 belongs to the loopback."""
        if address.startswith("127."):
            return next((one for one in self.interfaces if one.kind == "loopback"), None)
        return next((one for one in self.interfaces if address in one.addresses), None)
