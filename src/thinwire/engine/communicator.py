"""One rank's means of communication for one GradientSync: group, lanes, ledger, executor, words on failure."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.lanes import Lane, Lanes
from thinwire.collectives.ledger import Ledger
from thinwire.engine.agreement import gather_bytes
from thinwire.engine.executor import Executor, StreamExecutor, ThreadExecutor
from thinwire.engine.late import LateRanks
from thinwire.engine.wire import MakeProgram, Wire
from thinwire.program import NextForward, Program, Scope, Topology
from thinwire.program.ops import Collective
from thinwire.program.trace import Step

_numbers = itertools.count()


class Communicator:
    """Everything of an attached model that touches torch.distributed.

    Args:
        group: the user's process group, None for the default one.
        topology: of its ranks.
        device: of the gradients.
        timeout: of the collectives; None keeps torch's.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, topology: Topology, device: torch.device, timeout: timedelta | None
    ) -> None:
        self.user_group = group
        self.ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        self.rank = dist.get_rank(group)
        self.backend = _backend(group, device)
        self.device = device
        self.ledger = Ledger()
        self._lanes = Lanes(self.ranks, topology, self.rank, timeout)
        self.control: Lane = self._lanes.get("agreement", Scope.WORLD, 0)
        self._wire = Wire(self._lanes, self.ledger, self._note)
        self._late = LateRanks(self.ranks, self.rank, f"{next(_numbers)}/{'-'.join(map(str, self.ranks[:64]))}")
        self._order: dict[str, Any] = {}  # per lane: between lanes the order is free
        self._step = 0
        self._names: Sequence[Sequence[str]] = ()
        self.executor: Executor

    def start(self) -> None:
        """Start the executor; after everything at ``attach`` that can fail."""
        kind = StreamExecutor if self.backend == "nccl" else ThreadExecutor
        self.executor = kind(self._wire, self.device)

    def open_lanes(self, programs: Iterable[Sequence[Step]]) -> None:
        """Make the process groups that a plan's programs need, in the same order on all ranks."""
        deepest: dict[Scope, int] = {}
        for steps in programs:
            counts = Counter(step.scope for step in steps if step.scope is not None)
            for scope, count in counts.items():
                deepest[scope] = max(deepest.get(scope, 0), 1 if self.backend == "nccl" else count)
        for scope in sorted(deepest, key=lambda s: s.value):
            for round_ in range(deepest[scope]):
                self._lanes.get("bucket", scope, round_)

    def begin(self, step: int, names: Sequence[Sequence[str]], make: MakeProgram) -> None:
        """Open a step."""
        self._step, self._names = step, names
        self.executor.begin(len(names), make)

    def begin_open(
        self, step: int, names: Sequence[Sequence[str]], make: MakeProgram, failed: Callable[[], None]
    ) -> None:
        """Open a step whose ``names`` grow until a bucket is ready as the last; ``failed``: see the executors."""
        self._step, self._names = step, names
        self.executor.begin(None, make, failed)

    def finish(self) -> str | None:
        """Wait for the step's programs. Returns a sentence if one failed."""
        failure = self.executor.finish()
        if failure is None:
            return None
        bucket = "none"
        if failure.bucket is not None:
            names = self._names[failure.bucket]
            bucket = f"{failure.bucket} ({names[0]}{', ...' if len(names) > 1 else ''})"
        who = self._late.report(self._step, bucket, failure.where)
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(failure.error).split("\n")[0])[:200].rstrip(". ")
        return (
            f"rank {self.ranks[self.rank]}: the exchange failed at step {self._step}, bucket {bucket}, "
            f"{failure.where}: {type(failure.error).__name__}: {text}. {who[0].upper()}{who[1:]}."
        )

    def run(self, program: Program, purpose: str) -> Any:
        """Run a program to its end in the calling thread, on lanes of its own."""
        rounds: dict[Scope, int] = {}
        value: Any = None
        while True:
            try:
                op = program.send(value)
            except StopIteration as end:
                return end.value
            value = None
            if not isinstance(op, NextForward):
                round_ = 0 if self.backend == "nccl" else rounds.get(op.group, 0)
                rounds[op.group] = round_ + 1
                value = self._wire.issue(op, op.group, round_, 0, purpose).wait()

    def _note(self, op: Collective, scope: Scope, round_: int, bucket: int) -> None:
        lane = self._order.setdefault(f"{scope.value}/{round_}", hashlib.blake2b(digest_size=8))
        lane.update(f"{bucket}/{type(op).__name__}/{op.tensor.numel()};".encode())

    def check_order(self) -> None:
        """Raise ``RuntimeError`` unless all ranks have issued the same sequence of ops per lane since ``attach``."""
        lanes = sorted((name, digest.hexdigest()) for name, digest in self._order.items())
        digests = gather_bytes(hashlib.blake2b(repr(lanes).encode(), digest_size=8).digest(), self.control, self.device)
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks have issued different collectives by step {self._step}")

    def close(self, *, broken: bool) -> None:
        """End the executor and give the process groups back."""
        if hasattr(self, "executor"):
            self.executor.close()
        self._lanes.release(broken=broken)


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Which backend serves this device's tensors."""
    name = str(dist.get_backend(group))
    if ":" in name:  # "cpu:gloo,cuda:nccl"
        name = dict(part.split(":") for part in name.split(","))[device.type]
    if name not in ("gloo", "nccl"):
        raise ValueError(f"the process group's backend is {name}; thinwire runs on gloo and nccl")
    return name
