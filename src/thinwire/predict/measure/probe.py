"""Measure every collective of the language on the real process group, over message sizes, within a time budget.

All ranks gather all figures before any decision, so they use the same sizes, stop at the same time and end with the
same costs.
"""

from __future__ import annotations

import platform
from datetime import date, timedelta

import torch
import torch.distributed as dist

from thinwire.core.collectives.exchange import Lanes
from thinwire.core.collectives.groups import backend_for, backend_of_new, topology_of
from thinwire.core.program.topology import Topology
from thinwire.predict.measure.probe_run import LARGEST, ProbeRun, Progress, message_sizes
from thinwire.predict.measure.result import ProbeResult
from thinwire.predict.measure.wire import ExchangeTimer


def probe(
    process_group: dist.ProcessGroup | None = None,
    topology: Topology | None = None,
    *,
    largest_bytes: int = LARGEST,
    seconds: float = 40.0,
    kernel_seconds: float = 4.0,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    on_progress: Progress = lambda done, text: None,
) -> ProbeResult:
    """Measure this process group. Every rank of it calls this and gets the same result.

    Args:
        process_group: a Gloo or NCCL group; None: the default one.
        topology: which rank sits on which machine; None: from torchrun's LOCAL_WORLD_SIZE. With several ranks on
            several machines the groups of a machine and across machines are measured too.
        largest_bytes: largest message.
        seconds: time for the exchanges; what does not fit is left out, the largest messages first.
        kernel_seconds: time for compute, on all ranks at once; 0: leave it out.
        device: device of the messages; None: the current GPU for NCCL, else the CPU.
        timeout: time-out of the collectives; None keeps torch's.
        on_progress: see ``Progress``; called on every rank.

    Raises:
        ValueError: no process group, this rank is not in it, or numbers out of range.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("probe needs a process group: start the script with torchrun and call init_process_group")
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError("this rank is not in the group: call probe on the group's ranks alone")
    ranks = tuple(dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD))
    if not seconds > 0 or kernel_seconds < 0:
        raise ValueError(f"seconds={seconds} must be positive and kernel_seconds={kernel_seconds} not negative")
    topology = topology or topology_of(len(ranks))
    if topology.world_size != len(ranks):
        raise ValueError(f"the topology has {topology.world_size} ranks but the group has {len(ranks)}")
    if device is None:
        on_nccl = torch.cuda.is_available() and backend_for(torch.device("cuda"), process_group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_nccl else torch.device("cpu")
    backend = backend_for(device, process_group)
    if backend is None:
        raise ValueError(f"the process group ({dist.get_backend_config(process_group)}) has no backend for {device}")
    sizes = message_sizes(largest=largest_bytes)
    lanes = Lanes(ranks, topology, rank, timeout, device if backend == "nccl" else None, backend_of_new(process_group))
    broken = True
    try:
        wire = ExchangeTimer(lanes, topology, rank, device, counts_cpu=backend == "gloo")
        run = ProbeRun(wire, seconds, on_progress=on_progress)
        if len(ranks) > 1:
            for _ in run.exchanges(sizes):
                pass
            run.flow()
        source = wire.text(source_of(backend, len(ranks)))
        for _ in run.kernels(kernel_seconds, source) if kernel_seconds else ():
            pass
        broken = False
    finally:
        lanes.release(broken=broken)
    on_progress(1.0, "done")
    return run.result(backend, topology.layout, source)


def source_of(backend: str, world: int) -> str:
    """Describe the source of figures measured now, by this rank among that many."""
    return f"{platform.node()}, {date.today()}, {backend}, torch {torch.__version__}, {world} ranks"
