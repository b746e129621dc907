"""What one rank uses to communicate for one GradientSync: group, lanes, ledger, executor, words for failures."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.core.collectives.exchange import Lane, Lanes, Ledger, Pending, all_gather_flat, issue, pairwise
from thinwire.core.collectives.groups import backend_for, backend_of_new, backends_to_ask_for, seconds_of
from thinwire.core.kernels.lowrank import arithmetic
from thinwire.core.program import Method, NextForward, Program, Scope, Topology
from thinwire.core.program.ops import AllGather, Broadcast, Collective, Op, drive, own_modes
from thinwire.core.program.trace import TracedExchange, depths
from thinwire.engine.executors.alone import AloneExecutor, run_alone
from thinwire.engine.executors.issuer import Failure, OpIssuer
from thinwire.engine.executors.steps import Names, ProgramSteps, executor_for
from thinwire.engine.executors.watch import typical
from thinwire.engine.ranks.agreement import Disagreement, agree, broadcast_tensors, deepest_of_all, gather_bytes
from thinwire.engine.ranks.late_ranks import LateRanks, NobodyAsks, in_words, refused
from thinwire.engine.ranks.order import OrderWatch
from thinwire.predict.measure.machine import place, spare_places

if TYPE_CHECKING:
    from thinwire.predict.measure.gradual import GradualProbe

logger = logging.getLogger("thinwire")
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
    several = dist.is_available() and dist.is_initialized()
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


@dataclass(frozen=True)
class Members:
    """The ranks that take part in an exchange, and how they are connected.

    Attributes:
        group: the user's process group; None: the default one.
        ranks: global ranks of its members.
        rank: this rank's place among them.
        topology: which of them are on which machine.
        backend: "gloo" or "nccl".
        device: of the gradients.
        timeout: of the collectives; None: torch's.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    topology: Topology
    backend: str
    device: torch.device
    timeout: timedelta | None


class Communicator:
    """Everything of an attached model that touches torch.distributed.

    Args:
        group: the user's process group, None for the default one.
        topology: of its ranks.
        device: of the gradients.
        timeout: of the collectives; None keeps torch's.
        asks: whether to find out, after a failure, which ranks are late.
        attaching: whether ``attach`` is under way: if a rank fails then, the others notice it at once.

    Attributes:
        attaching: as above; the caller ends it.
        control: the lane of small messages.
        ledger: of what gradients' programs have sent.
        order: of the ops issued, for ``check_order``; None: not recorded.
        steps: of the gradients' programs.
    """

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
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        rank, backend = dist.get_rank(group), backend_of(group, device)
        if backend == "nccl":
            _check_whole(group)
        self.members = Members(group, ranks, rank, topology, backend, device, timeout or _timeout_of(group, device))
        self.attaching = attaching
        label = _next_label(ranks)
        self._late = LateRanks(ranks, rank, label, seconds_of(self.members.timeout)) if asks else NobodyAsks()
        self._lanes = self.lanes_of(topology)
        with self.meeting("connecting"):
            self.control: Lane = self._lanes.get("agreement", Scope.WORLD, 0)
        self.ledger = Ledger()
        self.order: OrderWatch | None = None
        self._issuer = OpIssuer(self._lanes, self.ledger, self._note)
        self._beside: bool | None = None
        self._mixed: bool | None = None
        self.steps: ProgramSteps

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.members.rank

    @property
    def backend(self) -> str:
        """ "gloo" or "nccl"."""
        return self.members.backend

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.members.device

    def lanes_of(self, topology: Topology) -> Lanes:
        """Return lanes of these ranks, none opened yet; with NCCL, they use few communicators."""
        who = self.members
        card = who.device if who.backend == "nccl" else None
        return Lanes(who.ranks, topology, who.rank, who.timeout, card, backend_of_new(who.group), self._come)

    def machine_group(self) -> dist.ProcessGroup:
        """Return a process group of this machine's ranks, given back with the lanes. All ranks must call it."""
        with self.meeting("connecting"):
            return self._lanes.get("inside", Scope.NODE, 0).group

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise ``ValueError``, naming the difference, unless all ranks have the same facts and versions."""
        versions = {"thinwire": thinwire.__version__, "torch": torch.__version__.partition("+")[0]}
        with self.meeting("agreeing on the plan"):
            self._come()
            agree(versions | facts, self.control, self.device)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        with self.meeting("sending the weights"):
            self._come()
            broadcast_tensors(tensors, self.control)

    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in rank order."""
        with self.meeting("gathering"):
            self._come()
            return gather_bytes(message, self.control, self.device)

    def side_stream(self) -> bool:
        """Return whether methods compute beside training, on a stream or a core. All ranks must make the first call."""
        if self._beside is None:
            self._beside = self.backend != "gloo" or spare_places(self.gather(place()), self.rank)
        return self._beside

    def fit(self, method: Method) -> Method:
        """Return a method as these ranks must run it: if it needs equal bits on all, which mixed processors lack.

        All ranks must call it.
        """
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

        who = self.members
        mesh_only = who.device.type == "cpu" and "AllGather" in pairwise(who.topology)
        return GradualProbe(self._lanes, who.topology, who.rank, who.device, who.backend, mesh_only=mesh_only)

    def typical_exchange(self) -> tuple[float, float] | None:
        """Return bytes and seconds of an all-reduce, from the watched exchanges of steps; None: there was none.

        All ranks must call it.
        """
        watch = self.steps.executor.watch
        totals = [0.0] * 6 if watch is None else watch.totals()
        rows = self.gather_tensor(torch.tensor(totals, dtype=torch.float64, device=self.device))
        return typical(rows.tolist(), len(rows))

    def gather_tensor(self, x: Tensor) -> Tensor:
        """Return every rank's 1-D tensor, equal in size: ``[k]`` -> ``[W, k]``; one exchange, ordered on the device."""
        return self.gather_later(x)()

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin ``gather_tensor``; return a function that finishes it.

        Between CPUs with thinwire's own connections, only a caller of that function waits.
        """
        with self.meeting("gathering"):
            if self.device.type == "cpu" and "AllGather" in pairwise(self.members.topology):
                lane = self._lanes.get("answers", Scope.WORLD, 0, mesh_only=True)
                return self._told(issue(AllGather(x), lane), "gathering")
            everyone = x.new_empty(self.control.size * x.numel())
            all_gather_flat(everyone, x, group=self.control.group)
        return lambda: everyone.view(self.control.size, -1)

    def broadcast_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to overwrite the 1-D tensor with rank 0's; return a function that waits for it.

        All ranks must call this in the same order.
        """
        mesh_only = self.device.type == "cpu" and "AllGather" in pairwise(self.members.topology)
        with self.meeting("sending the buffers"):
            lane = self._lanes.get("buffers", Scope.WORLD, 0, mesh_only=True) if mesh_only else self.control
            return self._told(issue(Broadcast(x), lane), "sending the buffers")

    def start(self) -> None:
        """Start the executor. Call it at ``attach`` after everything that can fail."""
        self.steps = ProgramSteps(executor_for(self.backend, self._issuer, self.device), self.sentence)

    def open_lanes(self, programs: Iterable[Sequence[TracedExchange]]) -> None:
        """Make the process groups that a plan's programs need, in the same order on all ranks."""
        programs = list(programs)
        paired: set[int] = set()  # rounds of scope WORLD in which ranks send to one another
        for steps in programs if self.backend != "nccl" else ():
            kinds = [step.kind for step in steps if step.scope is Scope.WORLD]
            paired.update(k for k, kind in enumerate(kinds) if kind in pairwise(self.members.topology))
        deepest: Mapping[Scope, int] = depths(programs)
        if self.backend == "nccl":
            deepest = dict.fromkeys(deepest, 1)
        if self.members.topology.two_levels:
            # A leader's program has more exchanges, but torch names groups by how many a rank has made.
            deepest = deepest_of_all(deepest, self.gather)
        with self.meeting("connecting"):
            for scope in sorted(deepest, key=lambda s: s.value):
                for round_ in range(deepest[scope]):
                    bidirectional = scope is Scope.WORLD and round_ in paired
                    mesh_only = bidirectional and self.device.type == "cpu"
                    self._lanes.get("bucket", scope, round_, bidirectional=bidirectional, mesh_only=mesh_only)

    def lanes_for(self, purpose: str, depth: Mapping[Scope, int], topology: Topology) -> Lanes:
        """Return lanes for programs that issue so many exchanges within each scope. All ranks must call it."""
        lanes = self.lanes_of(topology)
        try:
            with self.meeting("connecting"):
                for scope in sorted(depth, key=lambda s: s.value):
                    for round_ in range(1 if self.backend == "nccl" else depth[scope]):
                        lanes.get(purpose, scope, round_)
        except BaseException:
            lanes.release(broken=True)
            raise
        return lanes

    def sentence(self, failure: Failure, step: int, names: Names) -> str:
        """Return a failure in words, with the ranks that were late; ``names``: of the step's buckets."""
        bucket = "none"
        if failure.bucket is not None:
            inside = names[failure.bucket]
            bucket = f"{failure.bucket} ({inside[0]}{', ...' if len(inside) > 1 else ''})"
        kind, words = _cause(failure.error, self._late.report(step, bucket, failure.where))
        return (
            f"rank {self._global_rank}: the exchange failed at step {step}, bucket {bucket}, "
            f"{failure.where}: {kind}: {words}"
        )

    @property
    def _global_rank(self) -> int:
        return self.members.ranks[self.members.rank]

    def _told(self, pending: Pending, doing: str) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            with self.meeting(doing):
                return pending.wait()

        return wait

    @contextmanager
    def meeting(self, doing: str) -> Iterator[None]:
        """Report errors of exchanges outside programs in the same words; ``doing``: what the exchange is for."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            kind, words = _cause(error, self._late.report(0, "none", doing))
            raise RuntimeError(f"rank {self._global_rank}: {doing} failed: {kind}: {words}") from error

    def run(self, program: Program, purpose: str) -> Any:
        """Run a program to its end in the calling thread, on lanes of its own."""
        rounds: dict[Scope, int] = {}

        def answer(op: Op) -> Any:
            if isinstance(op, NextForward):
                return None
            round_ = 0 if self.backend == "nccl" else rounds.get(op.group, 0)
            rounds[op.group] = round_ + 1
            return self._issuer.issue(op, op.group, round_, 0, purpose).wait()

        return drive(program, answer)

    def _come(self) -> None:
        """In ``attach``, wait for the other ranks where it can be seen that one has given up."""
        if self.attaching:
            self._late.come()

    def _note(self, op: Collective, scope: Scope, round_: int, bucket: int) -> None:
        if self.order is not None:
            self.order.note(op, scope, round_, bucket)

    def watch_order(self) -> None:
        """Record ops from now on, so that ``check_order`` can compare them."""
        self.order = OrderWatch(self.members.topology)

    def check_order(self, step: int) -> None:
        """Raise ``RuntimeError`` if the order is watched and some rank has issued other ops."""
        if self.order is not None:
            self.order.check(self.gather, step)

    def leave(self, why: str) -> None:
        """Leave word for other ranks that this rank has stopped, and why."""
        self._late.leave(why)

    def dismiss(self, error: BaseException) -> None:
        """Close it because of an error before the first step; tell the others, unless all raise it alike."""
        alike = isinstance(error, Disagreement)
        if not alike:
            self.leave(f"has left attach with {in_words(error)}")
        self.close(broken=not alike)

    def close(self, *, broken: bool) -> None:
        """Stop the executor and give the process groups back."""
        if hasattr(self, "steps"):
            self.steps.executor.close()
        self._late.close()
        self._lanes.release(broken=broken)


class Alone:
    """Replaces the :class:`Communicator` on a single rank, where there is no group."""

    rank, backend = 0, "none"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger = Ledger()
        self.steps = ProgramSteps(AloneExecutor(), lambda failure, step, names: str(failure.error))

    def agree(self, facts: dict[str, Any]) -> None:
        """Do nothing: there is no other rank."""

    def fit(self, method: Method) -> Method:
        """Return the method: there is no other processor."""
        return method

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: there is no other rank."""

    def gather(self, message: bytes) -> list[bytes]:
        return [message]

    def side_stream(self) -> bool:
        """Return True: nothing is sent, so nothing gets in the way of training."""
        return True

    def gather_tensor(self, x: Tensor) -> Tensor:
        """Return this rank's tensor: ``[k]`` -> ``[1, k]``."""
        return x.view(1, -1)

    def gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.view(1, -1)

    def start(self) -> None:
        """Do nothing."""

    def open_lanes(self, programs: Iterable[Sequence[TracedExchange]]) -> None:
        """Do nothing: there are no lanes."""

    def run(self, program: Program, purpose: str) -> Any:
        """Run a program to its end."""
        return run_alone(program)

    def watch_order(self) -> None:
        """Do nothing: there is no other rank."""

    def check_order(self, step: int) -> None:
        """Do nothing."""

    def close(self, *, broken: bool) -> None:
        """Do nothing."""


def _cause(error: BaseException, who: str) -> tuple[str, str]:
    """Return the kind of an error, and its text with the ranks that were late."""
    first = str(error).split("\n")[0].split(". ")[0]  # Gloo appends advice, and a greeting
    text = re.sub(r"^\[[^\]]*\]\s*", "", first)[:200].rstrip(". ")
    return type(error).__name__, f"{text}. {who[0].upper()}{who[1:]}."


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Return the timeout of the user's group, if its backend tells it."""
    whole: Any = group if group is not None else dist.group.WORLD
    try:
        found = whole._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the backend that serves this device's tensors."""
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
