"""One rank's means of communication for one GradientSync: group, lanes, ledger, executor, words on failure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.bounded import seconds_of
from thinwire.collectives.lanes import Lane, Lanes
from thinwire.collectives.ledger import Ledger
from thinwire.collectives.transport import Pending, all_gather_flat, issue, pairwise
from thinwire.engine.agreement import agree, broadcast_tensors, gather_bytes
from thinwire.engine.executor import Executor, executor_for
from thinwire.engine.late import LateRanks
from thinwire.engine.wire import Failure, MakeProgram, Wire
from thinwire.measure.cores import place, spare_places
from thinwire.program import NextForward, Program, Scope, Topology
from thinwire.program.ops import AllGather, Broadcast, Collective
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
        if self.backend == "nccl":
            _check_whole(group)
        self.device = device
        self.timeout = timeout = timeout or _timeout_of(group, device)
        self.ledger = Ledger()
        self._topology = topology
        self._two_levels = topology.two_levels
        self._lanes = self.lanes_of(topology)
        label = f"{next(_numbers)}/{'-'.join(map(str, self.ranks[:64]))}"
        self._late = LateRanks(self.ranks, self.rank, label, seconds_of(timeout))
        with self._meeting("connecting"):
            self.control: Lane = self._lanes.get("agreement", Scope.WORLD, 0)
        self._wire = Wire(self._lanes, self.ledger, self._note)
        self.watch_order = False  # for ``detect_desync``
        self._order: dict[str, Any] = {}  # per lane: between lanes the order is free
        self._step = 0
        self._names: Sequence[Sequence[str]] = ()
        self._spare: bool | None = None
        self.executor: Executor

    def lanes_of(self, topology: Topology) -> Lanes:
        """Lanes of these ranks, none yet; where NCCL carries them, few of its communicators."""
        return Lanes(self.ranks, topology, self.rank, self.timeout, self.device if self.backend == "nccl" else None)

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise ``ValueError``, naming the difference, unless all ranks bring the same facts."""
        with self._meeting("agreeing on the plan"):
            agree(facts, self.control, self.device)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        with self._meeting("sending the weights"):
            broadcast_tensors(tensors, self.control)

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order."""
        with self._meeting("gathering"):
            return gather_bytes(message, self.control, self.device)

    def spare_cores(self) -> bool:
        """Whether this rank's communicator thread has a core of its own; the first time all ranks must ask."""
        if self._spare is None:
            self._spare = spare_places(self.gather(place()), self.rank)
        return self._spare

    def gather_tensor(self, x: Tensor) -> Tensor:
        """Every rank's 1-D tensor, of one length on all: ``[k]`` -> ``[W, k]``; one exchange, ordered on the device."""
        return self.gather_later(x)()

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """The same; between CPUs with connections of our own, only who calls what is returned waits."""
        with self._meeting("gathering"):
            if self.device.type == "cpu" and "AllGather" in pairwise(self._topology):
                lane = self._lanes.get("answers", Scope.WORLD, 0, bare=True)
                return self._told(issue(AllGather(x), lane), "gathering")
            everyone = x.new_empty(self.control.size * x.numel())
            all_gather_flat(everyone, x, group=self.control.group)
        return lambda: everyone.view(self.control.size, -1)

    def broadcast_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Rank 0's 1-D tensor, in place; who calls what is returned waits. All ranks must call it in the same order."""
        bare = self.device.type == "cpu" and "AllGather" in pairwise(self._topology)
        with self._meeting("sending the buffers"):
            lane = self._lanes.get("buffers", Scope.WORLD, 0, bare=True) if bare else self.control
            return self._told(issue(Broadcast(x), lane), "sending the buffers")

    def start(self) -> None:
        """Start the executor; after everything at ``attach`` that can fail."""
        self.executor = executor_for(self.backend, self._wire, self.device)

    def open_lanes(self, programs: Iterable[Sequence[Step]]) -> None:
        """Make the process groups that a plan's programs need, in the same order on all ranks."""
        deepest: dict[Scope, int] = {}
        paired: set[int] = set()  # rounds of the world in which ranks send to one another
        for steps in programs:
            kinds = [step.kind for step in steps if step.scope is Scope.WORLD]
            if self.backend != "nccl":
                paired.update(k for k, kind in enumerate(kinds) if kind in pairwise(self._topology))
            counts = Counter(step.scope for step in steps if step.scope is not None)
            for scope, count in counts.items():
                deepest[scope] = max(deepest.get(scope, 0), 1 if self.backend == "nccl" else count)
        if self._two_levels:  # a leader's program has more exchanges, but torch names groups by how many a rank has
            rows = self.gather(bytes(deepest.get(scope, 0) for scope in Scope))
            most = {scope: max(row[i] for row in rows) for i, scope in enumerate(Scope)}
            deepest = {scope: count for scope, count in most.items() if count}
        with self._meeting("connecting"):
            for scope in sorted(deepest, key=lambda s: s.value):
                for round_ in range(deepest[scope]):
                    two_way = scope is Scope.WORLD and round_ in paired
                    bare = two_way and self.device.type == "cpu"
                    self._lanes.get("bucket", scope, round_, two_way=two_way, bare=bare)

    def begin(self, step: int, names: Sequence[Sequence[str]], make: MakeProgram, *, pause: bool = False) -> None:
        """Open a step; ``pause``: its programs stop at their ``NextForward``, see the executors."""
        self._refuse_graphs()
        self._step, self._names = step, names
        self.executor.begin(len(names), make, pause=pause)

    def begin_open(
        self, step: int, names: Sequence[Sequence[str]], make: MakeProgram, failed: Callable[[], None]
    ) -> None:
        """Open a step whose ``names`` grow until a bucket is ready as the last; ``failed``: see the executors."""
        self._refuse_graphs()
        self._step, self._names = step, names
        self.executor.begin(None, make, failed)

    def _refuse_graphs(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "thinwire cannot be captured in a CUDA graph, which would repeat one step's seeds and phases for ever: "
                "capture the model's forward and backward inside sync.no_sync(), and exchange outside"
            )

    def finish(self) -> str | None:
        """Wait for the step's programs. Returns a sentence if one failed."""
        return self.sentence(self.executor.finish())

    def wait(self, bucket: int) -> str | None:
        """Wait for the rest of a paused program that has been resumed. Returns a sentence if one failed."""
        return self.sentence(self.executor.wait(bucket))

    def sentence(self, failure: Failure | None, names: Sequence[Sequence[str]] | None = None) -> str | None:
        """A failure in words, with who was late; ``names``: of the buckets, if not those of the step."""
        if failure is None:
            return None
        bucket = "none"
        if failure.bucket is not None:
            inside = (self._names if names is None else names)[failure.bucket]
            bucket = f"{failure.bucket} ({inside[0]}{', ...' if len(inside) > 1 else ''})"
        kind, words = _cause(failure.error, self._late.report(self._step, bucket, failure.where))
        return (
            f"rank {self.ranks[self.rank]}: the exchange failed at step {self._step}, bucket {bucket}, "
            f"{failure.where}: {kind}: {words}"
        )

    def _told(self, pending: Pending, doing: str) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            with self._meeting(doing):
                return pending.wait()

        return wait

    @contextmanager
    def _meeting(self, doing: str) -> Iterator[None]:
        """Exchanges outside of programs: what the network does to them is told in the same words."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            kind, words = _cause(error, self._late.report(0, "none", doing))
            raise RuntimeError(f"rank {self.ranks[self.rank]}: {doing} failed: {kind}: {words}") from error

    def run(self, program: Program, purpose: str, step: int | None = None) -> Any:
        """Run a program to its end in the calling thread, on lanes of its own. ``step``: what a failure names."""
        self._step = self._step if step is None else step
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
        if not self.watch_order:
            return
        lane = self._order.setdefault(f"{scope.value}/{round_}", hashlib.blake2b(digest_size=8))
        lane.update(f"{bucket}/{type(op).__name__}/{op.tensor.numel()};".encode())

    def check_order(self) -> None:
        """Raise ``RuntimeError`` unless all ranks have issued the same ops per lane since ``watch_order``."""
        mine = {name: digest.hexdigest() for name, digest in sorted(self._order.items())}
        everyone = self.gather(json.dumps(mine).encode())
        if len(set(everyone)) == 1:
            return
        lanes = [json.loads(text) for text in everyone]
        for rank, issued in enumerate(lanes):  # a lane's own ranks must agree: a node's leader may issue more
            for name in issued:
                members = self._topology.members(Scope(name.split("/")[0]), rank)
                if len({lanes[other].get(name) for other in members}) > 1:
                    raise RuntimeError(f"the ranks have issued different collectives by step {self._step}")

    def leave(self, why: str) -> None:
        """Tell the others, if they come to ask, that this rank goes on no more, and why."""
        self._late.leave(why)

    def close(self, *, broken: bool) -> None:
        """End the executor and give the process groups back."""
        if hasattr(self, "executor"):
            self.executor.close()
        self._late.close()
        self._lanes.release(broken=broken)


def _cause(error: BaseException, who: str) -> tuple[str, str]:
    """The kind of an error; and its text, with who was late."""
    first = str(error).split("\n")[0].split(". ")[0]  # Gloo goes on with advice, and a greeting
    text = re.sub(r"^\[[^\]]*\]\s*", "", first)[:200].rstrip(". ")
    return type(error).__name__, f"{text}. {who[0].upper()}{who[1:]}."


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """That of the user's group, where its backend says it."""
    whole: Any = group if group is not None else dist.group.WORLD
    try:
        found = whole._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Which backend serves this device's tensors."""
    name = str(dist.get_backend(group))
    if ":" in name:  # "cpu:gloo,cuda:nccl"
        name = dict(part.split(":") for part in name.split(","))[device.type]
    if name not in ("gloo", "nccl"):
        raise ValueError(f"the process group's backend is {name}; thinwire runs on gloo and nccl")
    if name == "gloo" and device.type != "cpu":
        raise ValueError(
            f"the parameters are on {device}, but the process group's backend for it is gloo, which sends from CPUs: "
            'call init_process_group("cpu:gloo,cuda:nccl")'
        )
    return name


def _check_whole(group: dist.ProcessGroup | None) -> None:
    """Raise ``ValueError`` where torch would wait for ranks that do not come.

    With a device bound to the default group, torch makes every other group by splitting its communicator: a call of all
    its ranks (``distributed_c10d._new_process_group_helper``).
    """
    whole: Any = dist.group.WORLD
    if group is None or getattr(whole, "bound_device_id", None) is None:
        return
    if dist.get_world_size(group) != dist.get_world_size():
        raise ValueError(
            "a group of some of the ranks cannot be split further where init_process_group was given a device_id: "
            "leave device_id out, and call torch.cuda.set_device"
        )
