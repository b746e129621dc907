"""What one rank uses to communicate for one handle: group, lanes, ledger, executor, words for failures.

A single rank has a communicator too, ``SingleRank``, whose exchanges are the identity.
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.core.collectives.circle import circle_of, place_in
from thinwire.core.collectives.exchange import ByteCounter, Lane, LanePool, Pending, all_gather_flat, issue, pairwise
from thinwire.core.collectives.groups import backend_for, backends_to_ask_for, seconds_of
from thinwire.core.collectives.meeting import identity
from thinwire.core.kernels.lowrank import arithmetic
from thinwire.core.program import Method, NextForward, Program, Scope, Topology
from thinwire.core.program.ops import AllGather, Broadcast, Op, drive, own_modes
from thinwire.core.program.trace import TracedExchange, depths
from thinwire.core.sockets import MESH_RANKS
from thinwire.engine.executors.alone import AloneExecutor, run_alone
from thinwire.engine.executors.events import Failure, typical
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.engine.executors.threads import Issuer, ThreadExecutor
from thinwire.engine.ranks.agreement import (
    Disagreement,
    OrderCheck,
    agree,
    broadcast_tensors,
    deepest_of_all,
    gather_bytes,
)
from thinwire.engine.ranks.late_ranks import LateRanks, NoFailureNotes, in_words, refused
from thinwire.predict.measure.machine import place, spare_places

if TYPE_CHECKING:
    from thinwire.predict.measure.gradual import GradualProbe

Executor = ThreadExecutor | StreamExecutor | AloneExecutor
Names = Sequence[Sequence[str]]
"""For each bucket of a step, the names of what it contains."""
logger = logging.getLogger("thinwire")
_PLACE = re.compile(r"^\[[^\]]*\]\s*((?<=\] )\S+ [!=<>]+ \S+\. \S+ vs \S+\. )?")
"""Where in its source Gloo has failed, and by which comparison; the system's words follow."""
_numbers: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def _labels() -> Counter[str]:
    """Return how many meetings there were of the same ranks, since the default group was made."""
    return _numbers.setdefault(dist.group.WORLD, Counter())


def _next_label(ranks: Sequence[int]) -> str:
    of = f"{len(ranks)}: {'-'.join(map(str, ranks[:64]))}"
    _labels()[of] += 1
    return f"{_labels()[of]}/{of}"


@contextmanager
def meeting_in_attach(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the other ranks if this one raises before it has met them: they would wait for it."""
    several = dist.is_available() and dist.is_initialized() and circle_of(group) is None
    before = _labels().total() if several else 0
    try:
        yield
    except BaseException as error:
        if several and _labels().total() == before:
            with contextlib.suppress(Exception):  # the group may be what is wrong
                ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
                if len(ranks) > 1 and dist.get_rank() in ranks:
                    refused(ranks, dist.get_rank(group), _next_label(ranks), error)
        raise


class Communicator:
    """Everything of a handle that touches torch.distributed. ``asks``: find out, after a failure, who is late."""

    executor: Executor  # of the gradients' programs, after ``start``

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        topology: Topology,
        device: torch.device,
        timeout: timedelta | None,
        *,
        asks: bool = True,
        attaching: bool = False,
    ) -> None:
        self.ranks, self.rank = place_in(group)
        self.backend = backend_of(group, device)
        if self.backend == "nccl":
            _check_whole(group)
        self.group, self.topology, self.device = group, topology, device
        self.timeout = timeout or _timeout_of(group, device)
        self.attaching = attaching  # the caller ends it; until then, a rank that fails is noticed by the others
        self._late: LateRanks | NoFailureNotes = NoFailureNotes()
        if asks:
            self._late = LateRanks(self.ranks, self.rank, _next_label(self.ranks), seconds_of(self.timeout))
        self._lanes = self.lanes_of(topology)
        with self.meeting("connecting"):
            self.control: Lane = self._lanes.get("agreement", Scope.WORLD, 0)
        self.ledger = ByteCounter()  # of what gradients' programs have sent
        self.order: OrderCheck | None = None  # of the ops issued; None: not recorded
        self._beside: bool | None = None
        self._mixed: bool | None = None

    def lanes_of(self, topology: Topology) -> LanePool:
        """Return lanes of these ranks, none opened yet; with NCCL, they use few communicators."""
        card = self.device if self.backend == "nccl" else None
        return LanePool(self.ranks, topology, self.rank, self.timeout, card, self.group, self._come)

    def _encrypts(self) -> bool:
        """Return whether thinwire's connections are encrypted; ``ValueError``: something would not go over them."""
        if identity() is None or len(self.ranks) == 1:
            return False
        if not self._mesh_only():
            raise ValueError(
                f"THINWIRE_KEYS encrypts exchanges between CPUs, with one rank on each machine and up to {MESH_RANKS} "
                "of them: these ranks need a VPN instead"
            )
        return True

    def machine_group(self) -> dist.ProcessGroup:
        """Return a process group of this machine's ranks, given back with the lanes. All ranks must call it."""
        with self.meeting("connecting"):
            return self._lanes.get("inside", Scope.NODE, 0).group

    def agree(self, facts: dict[str, Any], doing: str = "agreeing on the plan") -> None:
        """Raise ``ValueError``, naming the difference, unless all ranks have the same facts and versions."""
        versions: dict[str, Any] = {"thinwire": thinwire.__version__, "torch": torch.__version__.partition("+")[0]}
        versions["THINWIRE_KEYS"] = self._encrypts()
        with self.meeting(doing):
            self._come()
            agree(versions | facts, self.control, self.device)

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        with self.meeting("sending the weights"):
            self._come()
            hidden = self._encrypts()
            lane = self._lanes.get("weights", Scope.WORLD, 0, bidirectional=True) if hidden else self.control
            broadcast_tensors(tensors, lane, source)

    def gather(self, message: bytes, call: str = "") -> list[bytes]:
        with self.meeting(call or "gathering", f" All ranks must call {call}." if call else ""):
            self._come()
            return gather_bytes(message, self.control, self.device)

    def side_stream(self) -> bool:
        """Return whether methods compute beside training, on a stream or a core. All ranks must make the first call."""
        if self._beside is None:
            self._beside = self.backend != "gloo" or spare_places(self.gather(place()), self.rank)
        return self._beside

    def fit(self, method: Method) -> Method:
        """Return a method as these ranks must run it: some need equal bits, which mixed processors lack. Collective."""
        other = method.on_mixed_processors()
        if other is method:
            return method
        if self._mixed is None:
            with torch.no_grad(), own_modes():
                bits = self.gather_tensor(arithmetic(self.device).view(1)).view(-1)
            self._mixed = bool((bits != bits[0]).any())
            if self._mixed and self.rank == 0:
                logger.info("thinwire: the ranks' processors round differently, so rank 0's bases are sent to all")
        return other if self._mixed else method

    def gradual_probe(self) -> GradualProbe:
        """Return a probe that measures the network between steps, on the buckets' lanes; use it under ``meeting``."""
        from thinwire.predict.measure.gradual import GradualProbe

        return GradualProbe(
            self._lanes, self.topology, self.rank, self.device, self.backend, mesh_only=self._mesh_only()
        )

    def _mesh_only(self, topology: Topology | None = None) -> bool:
        """Return whether all exchanges between all ranks go over thinwire's own connections."""
        return self.device.type == "cpu" and "AllGather" in pairwise(topology or self.topology)

    def typical_exchange(self) -> tuple[float, float] | None:
        """Return bytes and seconds of an all-reduce, from the steps' own exchanges; None: there was none. Collective"""
        watch = self.executor.watch
        totals = [0.0] * 6 if watch is None else watch.totals()
        rows = self.gather_tensor(torch.tensor(totals, dtype=torch.float64, device=self.device))
        return typical(rows.tolist(), len(rows))

    def gather_tensor(self, x: Tensor) -> Tensor:
        """Return every rank's 1-D tensor, equal in size: ``[k]`` -> ``[W, k]``; one exchange, ordered on the device."""
        return self.gather_later(x)()

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin ``gather_tensor``; return what finishes it. Over thinwire's own connections, only that waits."""
        with self.meeting("gathering"):
            if self._mesh_only():
                lane = self._lanes.get("answers", Scope.WORLD, 0, mesh_only=True)
                return self._told(issue(AllGather(x), lane), "gathering")
            everyone = x.new_empty(self.control.size * x.numel())
            all_gather_flat(everyone, x, group=self.control.group)
        return lambda: everyone.view(self.control.size, -1)

    def broadcast_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to overwrite the 1-D tensor with rank 0's, in the same order on all ranks; return what waits for it."""
        with self.meeting("sending the buffers"):
            lane = self._lanes.get("buffers", Scope.WORLD, 0, mesh_only=True) if self._mesh_only() else self.control
            return self._told(issue(Broadcast(x), lane), "sending the buffers")

    def start(self) -> None:
        """Start the executor. Call it at ``attach`` after everything that can fail."""
        self.executor = self._executor(Issuer(self._lanes, self.ledger, order=self.order))

    def _executor(self, issuer: Issuer) -> Executor:
        return StreamExecutor(issuer, self.device) if self.backend == "nccl" else ThreadExecutor(issuer)

    def open_lanes(self, programs: Iterable[Sequence[TracedExchange]]) -> None:
        """Make the process groups that a plan's programs need, in the same order on all ranks."""
        programs = list(programs)
        paired: set[int] = set()  # rounds of scope WORLD in which ranks send to one another
        for steps in programs if self.backend != "nccl" else ():
            kinds = [step.kind for step in steps if step.scope is Scope.WORLD]
            paired.update(k for k, kind in enumerate(kinds) if kind in pairwise(self.topology))
        deepest: Mapping[Scope, int] = depths(programs)
        if self.backend == "nccl":
            deepest = dict.fromkeys(deepest, 1)
        if self.topology.two_levels:
            # A leader's program has more exchanges, but all ranks come to make each lane.
            deepest = deepest_of_all(deepest, self.gather)
        with self.meeting("connecting"):
            for scope in sorted(deepest, key=lambda s: s.value):
                for round_ in range(deepest[scope]):
                    bidirectional = scope is Scope.WORLD and round_ in paired
                    mesh_only = bidirectional and self.device.type == "cpu"
                    self._lanes.get("bucket", scope, round_, bidirectional=bidirectional, mesh_only=mesh_only)

    def executor_beside(
        self, purpose: str, depth: Mapping[Scope, int], topology: Topology, ledger: ByteCounter
    ) -> tuple[Executor, Callable[..., None]]:
        """Return an executor with lanes of its own, ``depth`` in each scope, and what gives these back. Collective."""
        lanes = self.lanes_of(topology)
        try:
            with self.meeting("connecting"):
                for scope in sorted(depth, key=lambda s: s.value):
                    for round_ in range(1 if self.backend == "nccl" else depth[scope]):
                        ours = scope is Scope.WORLD and self._mesh_only(topology)
                        lanes.get(purpose, scope, round_, bidirectional=ours, mesh_only=ours)
        except BaseException:
            lanes.release(broken=True)
            raise
        return self._executor(Issuer(lanes, ledger, purpose)), lanes.release

    def sentence(self, failure: Failure, step: int, names: Names) -> str:
        bucket = "none"
        if failure.bucket is not None:
            inside = names[failure.bucket]
            bucket = f"{failure.bucket} ({inside[0]}{', ...' if len(inside) > 1 else ''})"
        kind, words = _cause(failure.error, self._late.report(step, bucket, failure.where))
        return (
            f"rank {self.ranks[self.rank]}: the exchange failed at step {step}, bucket {bucket}, "
            f"{failure.where}: {kind}: {words}"
        )

    def _told(self, pending: Pending, doing: str) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            with self.meeting(doing):
                return pending.wait()

        return wait

    @contextmanager
    def meeting(self, doing: str, remedy: str = "") -> Iterator[None]:
        """Report errors of exchanges outside programs in the same words; ``doing``: what the exchange is for."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            kind, words = _cause(error, self._late.report(0, "none", doing))
            raise RuntimeError(f"rank {self.ranks[self.rank]}: {doing} failed: {kind}: {words}{remedy}") from None

    def run(self, program: Program, purpose: str) -> Any:
        rounds: dict[Scope, int] = {}
        issuer = Issuer(self._lanes, self.ledger, purpose)

        def answer(op: Op) -> Any:
            if isinstance(op, NextForward):
                return None
            round_ = 0 if self.backend == "nccl" else rounds.get(op.group, 0)
            rounds[op.group] = round_ + 1
            return issuer.issue(op, op.group, round_, 0).wait()

        return drive(program, answer)

    def _come(self) -> None:
        """In ``attach``, wait for the other ranks where it can be seen that one has given up."""
        if self.attaching:
            self._late.come()

    def check_order(self, step: int) -> None:
        if self.order is not None:
            self.order.check(self.gather, step)

    def leave(self, why: str) -> None:
        self._late.leave(why)

    def dismiss(self, error: BaseException) -> None:
        """Close it because of an error before the first step; tell the others, unless all raise it alike."""
        alike = isinstance(error, Disagreement)
        if not alike:
            self.leave(f"has left attach with {in_words(error)}")
        self.close(broken=not alike)

    def close(self, *, broken: bool) -> None:
        if hasattr(self, "executor"):
            self.executor.close()
        self._late.close()
        self._lanes.release(broken=broken)


class SingleRank(Communicator):
    def __init__(self, device: torch.device | None = None) -> None:
        self.ranks, self.rank, self.backend, self.topology = (0,), 0, "none", Topology(1)
        self.device, self.ledger, self.order = device or torch.device("cpu"), ByteCounter(), None
        self.attaching, self._late, self._beside = False, NoFailureNotes(), True
        self.executor = AloneExecutor()

    def agree(self, facts: dict[str, Any], doing: str = "") -> None: ...

    def fit(self, method: Method) -> Method:
        return method

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None: ...

    def gather(self, message: bytes, call: str = "") -> list[bytes]:
        return [message]

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.view(1, -1)

    def start(self) -> None: ...

    def open_lanes(self, programs: Iterable[Sequence[TracedExchange]]) -> None: ...

    def executor_beside(
        self, purpose: str, depth: Mapping[Scope, int], topology: Topology, ledger: ByteCounter
    ) -> tuple[Executor, Callable[..., None]]:
        return AloneExecutor(), lambda broken: None

    def sentence(self, failure: Failure, step: int, names: Names) -> str:
        return str(failure.error)

    def typical_exchange(self) -> None:
        return None

    def run(self, program: Program, purpose: str) -> Any:
        return run_alone(program)

    def close(self, *, broken: bool) -> None: ...


def _cause(error: BaseException, who: str) -> tuple[str, str]:
    if not dist.is_initialized():
        who = "since destroy_process_group() was called, there is no group to exchange over"
    first = _PLACE.sub("", str(error).split("\n")[0])
    text = first.split(". ")[0][:200].rstrip(". ")  # Gloo appends advice, and a greeting
    return type(error).__name__, f"{text}. {who[0].upper()}{who[1:]}."


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    whole: Any = group if group is not None else dist.group.WORLD
    try:
        found = whole._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    name = backend_for(device, group)
    remedy = f'call init_process_group("{backends_to_ask_for(device)}")'
    if name is None:
        raise ValueError(
            f"the parameters are on {device}, for which the process group ({dist.get_backend_config(group)}) has no "
            f"backend: {remedy}"
        )
    if name not in ("gloo", "nccl"):
        raise ValueError(f"the process group's backend is {name}; thinwire runs on gloo and nccl")
    if name == "gloo" and device.type != "cpu":
        raise ValueError(
            f"the parameters are on {device}, but the process group's backend for it is gloo, which sends from CPUs: "
            f"{remedy}"
        )
    return name


def _check_whole(group: dist.ProcessGroup | None) -> None:
    """Raise ``ValueError`` where torch would wait for ranks that do not come.

    If a device is bound to the default group, torch makes every other group by splitting that group's communicator,
    which all its ranks must call (``distributed_c10d._new_process_group_helper``).
    """
    whole: Any = dist.group.WORLD
    if group is None or getattr(whole, "bound_device_id", None) is None:
        return
    if dist.get_world_size(group) != dist.get_world_size():
        raise ValueError(
            "a group of some of the ranks cannot be split further where init_process_group was given a device_id: "
            "leave device_id out, and call torch.cuda.set_device"
        )
