"""NCCL for one rank alone, over the streams of ``card.py``: the others say what this rank says.

Every group is a communicator with a stream of its own. An operation comes after what the issuing stream has issued;
``wait()`` lets the current stream come after it, and until then the operation keeps its tensors, as torch's does. Every
rank is run by itself, one after the other, and keeps a log of what it has issued, which ``disagreement`` compares:

DESYNC       two ranks of a communicator issue other operations there, or two ranks issue those of two communicators in
             another order, which NCCL warns can deadlock;
FIRST        a communicator's first operation is not one of all its ranks: torch makes the connection there;
DTYPE        numbers that NCCL does not know;
LAYOUT       memory that is not contiguous.

What is not real: what the other ranks have is what this one has, but for what rank 0 broadcasts, where it has been run
before. So sums are right where all ranks have the same, and everything is finite; a part that another rank should have
worked out is this rank's.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from card import Card, OnCard, Stream
from torch import Tensor

from thinwire.core.collectives import exchange
from thinwire.engine.ranks import agreement, communicator

PROBE = importlib.import_module("thinwire.predict.measure.probe")
_KNOWN = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool,
}  # fmt: skip


class Group(dist.ProcessGroup):
    """A communicator."""

    def __init__(self, ranks: tuple[int, ...], rank: int, name: str) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.ranks, self.name = ranks, name
        self.stream: Stream | None = None
        self.met = False


class Work:
    """An operation that was issued."""

    def __init__(self, stream: Stream, tensors: list[OnCard]) -> None:
        self._stream, self._done, self._held = stream, dict(stream.clock), tensors

    def wait(self, *_: Any) -> bool:
        if self._stream.card.muted():
            return True
        current = self._stream.card.current_stream(self._stream.device_index)
        for stream, time in self._done.items():
            current.clock[stream] = max(current.clock.get(stream, 0), time)
        self._held = []
        return True


class Store:
    """What ``LateRanks`` asks for."""

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return True

    def add(self, key: str, count: int) -> int:
        return 1 << 20  # all ranks have come


class Nccl:
    """torch.distributed for one rank. ``with nccl.in_place():`` puts it there.

    Attributes:
        log: (communicator, operation) in the order of issue.
        told: what rank 0 has broadcast; another rank, given it, takes it from there.
    """

    def __init__(self, card: Card, rank: int, size: int, told: dict[Any, Tensor] | None = None) -> None:
        self.told: dict[Any, Tensor] = {} if told is None else told
        self.card, self.rank, self.size = card, rank, size
        self.log: list[tuple[str, str]] = []
        self._groups: dict[tuple[int, ...], int] = {}
        self.world = self._made(tuple(range(size)))

    def _made(self, ranks: tuple[int, ...]) -> Group:
        number = self._groups[ranks] = self._groups.get(ranks, -1) + 1
        return Group(ranks, self.rank, f"{'-'.join(map(str, ranks))}/{number}")

    def new_group(self, ranks: Any = None, **_: Any) -> Group:
        group = self._made(tuple(range(self.size)) if ranks is None else tuple(sorted(ranks)))
        self.log.append((group.name, "made"))
        return group

    def _issue(
        self, what: str, group: Group | None, read: Tensor, written: Tensor, value: Any, async_op: bool, whole: bool
    ) -> Work | None:
        group = self.world if group is None else group
        where = self.card.where()
        for x in (written,) if read is written else (read, written):
            if not isinstance(x, OnCard):
                raise RuntimeError(f"NCCL has no way to send what is on the CPU ({where})")
            if x.dtype not in _KNOWN:
                self.card.find("DTYPE", f"{what} of {x.dtype}", where)
            if not x.is_contiguous():
                self.card.find("LAYOUT", f"{what} of memory that is not contiguous", where)
        if not group.met and not whole:
            self.card.find("FIRST", f"{what} is the first operation of communicator {group.name}", where)
        group.met = True
        self.log.append((group.name, f"{what} {written.numel()} {written.dtype}"))
        current = self.card.current_stream(written.device)
        if group.stream is None:
            group.stream = Stream(self.card, written.device.index, f"NCCL's stream of {group.name}")
        stream = group.stream
        stream.wait_stream(current)
        stream.launched()
        read.use(stream, where, write=False)
        written.use(stream, where, write=True)
        written.inner.copy_(value(read.inner).reshape(written.shape))
        work = Work(stream, [read, written])
        if async_op:
            return work
        work.wait()
        return None

    # --- torch.distributed -----------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work | None:
        size = len((group or self.world).ranks)
        summed = op is None or op == dist.ReduceOp.SUM
        return self._issue("all-reduce", group, x, x, lambda y: y * size if summed else y.clone(), async_op, True)

    def broadcast(self, x: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Work | None:
        name = (self.world if group is None else group).name
        place = name, sum(entry[0] == name for entry in self.log)

        def value(mine: Tensor) -> Tensor:
            if src == self.rank == 0:
                self.told[place] = mine.clone()
            return self.told[place] if src == 0 and place in self.told else mine.clone()

        return self._issue(f"broadcast from {src}", group, x, x, value, async_op, True)

    def all_gather(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
        size = len((group or self.world).ranks)
        return self._issue("all-gather", group, x, out, lambda y: torch.stack([y.reshape(-1)] * size), async_op, True)

    def reduce_scatter(
        self, out: Tensor, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        size, place = len((group or self.world).ranks), (group or self.world).rank()
        return self._issue("reduce-scatter", group, x, out, lambda y: y.view(size, -1)[place] * size, async_op, True)

    def all_to_all(self, out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
        size, place = len((group or self.world).ranks), (group or self.world).rank()
        return self._issue(
            "all-to-all", group, x, out, lambda y: torch.stack([y.reshape(size, -1)[place]] * size), async_op, True
        )

    def batch(self, ops: list[Any]) -> list[Work]:
        (receive, out, peer, group), (send, x, _, _) = sorted(ops, key=lambda op: op[0])
        assert (receive, send) == ("irecv", "isend")
        work = self._issue(f"exchange {peer ^ self.rank}", group, x, out, lambda y: y.clone(), True, False)
        assert work is not None
        return [work]

    @contextmanager
    def in_place(self) -> Any:
        """Let torch.distributed be this; undone at the end."""
        functions = {
            "is_initialized": lambda: True,
            "get_rank": lambda group=None: (group or self.world).rank(),
            "get_world_size": lambda group=None: len((group or self.world).ranks),
            "get_backend": lambda group=None: "nccl",
            "get_backend_config": lambda group=None: "cuda:nccl",
            "get_process_group_ranks": lambda group: list((group or self.world).ranks),
            "get_global_rank": lambda group, place: group.ranks[place],
            "new_group": self.new_group,  # for scripts
            "group": SimpleNamespace(WORLD=self.world),
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
            "all_to_all_single": self.all_to_all,
            "batch_isend_irecv": self.batch,
            "irecv": "irecv",
            "isend": "isend",
            "P2POp": lambda op, x, peer, group: (op, x, peer, group),
        }
        patches = [patch.object(dist, name, value) for name, value in functions.items()]
        patches.append(patch.object(dist.distributed_c10d, "_get_default_store", Store))
        for module in (exchange, agreement, communicator, PROBE):  # names that they have taken over
            patches.append(patch.object(module, "all_gather_flat", self.all_gather))
        patches.append(patch.object(exchange, "reduce_scatter_flat", self.reduce_scatter))
        patches.append(patch.object(exchange, "group_named", lambda name, ranks, *_: self.new_group(ranks)))
        for one in patches:
            one.start()
        try:
            yield self
        finally:
            for one in reversed(patches):
                one.stop()


def disagreement(logs: list[list[tuple[str, str]]]) -> str | None:
    """Where the ranks' logs do not fit together; None: nowhere."""
    for a, first in enumerate(logs):
        for b, second in enumerate(logs[:a]):
            common = _members(first, a, b) | _members(second, a, b)
            mine = [entry for entry in first if entry[0] in common]
            theirs = [entry for entry in second if entry[0] in common]
            for place, (x, y) in enumerate(zip(mine, theirs)):
                if x != y:
                    return f"DESYNC: operation {place} that ranks {b} and {a} share: {y} against {x}"
            if len(mine) != len(theirs):
                return f"DESYNC: ranks {b} and {a} share {len(theirs)} and {len(mine)} operations"
    return None


def _members(log: list[tuple[str, str]], a: int, b: int) -> set[str]:
    """The communicators that have both ranks in them."""
    return {name for name, _ in log if {a, b} <= set(map(int, name.split("/")[0].split("-")))}
