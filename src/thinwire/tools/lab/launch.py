"""Run a command as the ranks of an emulated cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.core.records import Record
from thinwire.core.secret_file import VARIABLE, fresh_secret_file
from thinwire.tools.lab.cluster import Cluster, LabError
from thinwire.tools.lab.network import INTERFACE, Network, find_mode, open_shell
from thinwire.tools.lab.ranks import (
    RankProcesses,
    check_command,
    child_command,
    loopback_port,
    own_cores,
    rank_environment,
    usable_cores,
)
from thinwire.tools.lab.supervise import DeferredSignals, FaultTimeline, Happening, RankFault, check_faults, supervise

_DEFAULT_PORT = 29500  # in a new namespace every port is free
_RANK_BYTES = 200 << 20  # of a process that has imported torch


def run(
    cluster: Cluster,
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    grace_seconds: float = 30.0,
    timeout_seconds: float | None = None,
    master_port: int | None = None,
    share_cores: bool = False,
    slow: Mapping[int, float] | None = None,
    faults: Sequence[RankFault] = (),
    faults_begin: Callable[[int, str], bool] | None = None,
    on_fault: Callable[[Happening], None] | None = None,
) -> LabResult:
    """Run a command once per worker of an emulated cluster and wait for the end.

    Each rank gets torchrun's environment variables, and in THINWIRE_SECRET_FILE a new secret for this run, unless one
    is set. Whatever happens, everything the lab made is removed: ctrl-C, SIGTERM and SIGHUP are held back until then
    (in the main thread only, as Python requires) and then raised again.

    Args:
        cluster: the shape of the cluster.
        command: what every rank runs, without a shell.
        env: variables to set on top of this process's own.
        on_line: called with a rank and each of its lines, in the calling thread; None prints ``[rank] line``.
        grace_seconds: how long the other ranks may go on after one failed.
        timeout_seconds: when to end the run; None means never.
        master_port: port of rank 0; None picks a free one.
        share_cores: every node may use all cores; otherwise each has its own, like separate machines.
        slow: how many times slower ranks compute, by pauses of tens of milliseconds: 2 is half the speed.
        faults: faults of ranks during the run.
        faults_begin: called with a rank and each of its lines: whether the times of ``faults`` count from now on; None:
            they count from the start. on_fault: called with each event that happened; None prints it on stderr.

    Raises:
        LabError: the command, the port or the machine does not allow it; nothing is left behind.
    """
    environment = {**os.environ, **(env or {})}
    check_command(command, environment)
    if master_port is not None and not 1 <= master_port <= 65535:
        raise LabError(f"master port {master_port} is not between 1 and 65535: use for example --master-port 29500")
    if not grace_seconds >= 0 or (timeout_seconds is not None and not timeout_seconds > 0):
        raise LabError(
            "grace must not be negative and the timeout must be positive: use for example --grace 30 --timeout 600"
        )
    with DeferredSignals() as signals, contextlib.ExitStack() as stack:
        if not environment.get(VARIABLE):
            environment[VARIABLE] = stack.enter_context(fresh_secret_file())
        if cluster.workers > (most := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _RANK_BYTES):
            print(f"note: {cluster.workers} ranks: this machine's memory holds about {most} that import torch; "
                  "so many take minutes to start", file=sys.stderr, flush=True)  # fmt: skip
        mode, reason = find_mode()
        check_faults(faults, cluster, slow or {}, emulated=mode != "loopback")
        network: Network | None = None
        if mode == "loopback":
            note = f"ranks on plain loopback, links not emulated: neither root nor a user namespace here ({reason})"
            print(f"note: {note}", file=sys.stderr, flush=True)
            address, port, interface = "127.0.0.1", loopback_port(master_port), "lo"
        else:
            network = stack.enter_context(Network(stack.enter_context(open_shell(mode)), cluster))
            note = f"{cluster.describe()}, in network namespaces ({mode}), TCP with {network.congestion_control}"
            address, port, interface = network.address(0), master_port or _DEFAULT_PORT, INTERFACE
        cores = [] if share_cores else usable_cores()
        began = time.monotonic()
        tell_line = on_line or (lambda rank, line: print(f"[{rank}] {line}", flush=True))

        def heard(rank: int, line: str) -> None:
            if timeline.began is None and faults_begin is not None and faults_begin(rank, line):
                timeline.began = time.monotonic()
            tell_line(rank, line)

        def carry(rank: int, carries: bool) -> None:
            assert network is not None
            network.carry(rank // cluster.ranks_per_node, carries)

        with RankProcesses(heard) as ranks:
            timeline = FaultTimeline(faults, ranks, carry, on_fault or _tell, slow or {})
            for rank in range(cluster.workers):
                if signals.received is not None:
                    break
                variables = rank_environment(
                    environment, cluster, rank, master_address=address, master_port=port, interface=interface
                )
                node = rank // cluster.ranks_per_node
                own = own_cores(node, cluster.nodes, cores) if cores else ()
                line = network.on_node(node, command, own) if network else child_command(command, cores=own)
                ranks.start(line, variables)
            if faults_begin is None:
                timeline.began = time.monotonic()
            code = supervise(ranks, signals, timeline, grace_seconds=grace_seconds, timeout_seconds=timeout_seconds)
        seconds = time.monotonic() - began
        nothing = (0,) * cluster.nodes
        packets = network.packets() if network is not None else None
        sent, received = network.traffic() if network is not None else (nothing, nothing)
        codes = tuple(code or 0 for code in ranks.exit_codes)
    control = network.congestion_control if network is not None else None
    if timeline.left:
        print(f"note: the run ended before rank {timeline.left[0].rank} was {timeline.left[0].what} at "
              f"{timeline.left[0].seconds:g} s", file=sys.stderr, flush=True)  # fmt: skip
    happened, stood = tuple(timeline.happened), timeline.slow.stopped_shares
    return LabResult(code, codes, seconds, network is not None, note, sent, received, control, happened, packets, stood)


def _tell(happening: Happening) -> None:
    print(f"note: {happening.seconds:.1f} s: rank {happening.rank} {happening.what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LabResult(Record):
    """How the ranks ended, and the traffic on the links.

    Attributes:
        exit_code: the worst code of the ranks that ended by themselves; 124 if time ran out.
        exit_codes: one per rank; 128 + signal for a rank that a signal ended. An intended death does not
            count in ``exit_code``.
        seconds: from the start of the first rank to the end of the last.
        emulated: False if the ranks ran on plain loopback, without links.
        note: how it ran, in one sentence.
        sent_bytes: per node, bytes its interface sent, with headers; an offloaded packet counts its headers once.
            All zero on plain loopback.
        received_bytes: per node, bytes its interface received.
        congestion_control: TCP's congestion control on the links; None on plain loopback.
        happenings: what happened to ranks, in order.
        packets: per node, how many of the packets that it sent were "forwarded", "lost" by the wire, or "dropped" by a
            full queue; None where no relay carried them.
        stopped_shares: of each slow rank, the measured share of its life that it stood still: 0.5 is half the speed.
    """

    called: ClassVar[str] = "the result of a run in the lab"
    exit_code: int
    exit_codes: tuple[int, ...]
    seconds: float
    emulated: bool
    note: str
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    congestion_control: str | None = None
    happenings: tuple[Happening, ...] = ()
    packets: tuple[dict[str, int], ...] | None = None
    stopped_shares: dict[int, float] = field(default_factory=dict)
