"""Point-to-point messages: several sends and receives as one piece of work.

They go over the lane's mesh. Without one, on Gloo, receives are posted before sends. In the other order, the note
"ready to receive" queues behind this rank's own data. If ranks are skewed, the two directions of the link then take
turns: twice the time (8 MiB each way at 100 Mbit/s, 20 ms of skew: 1.42 s against 0.73 s). torch's
``all_to_all_single`` has the same fault, so ours is made of these messages. For the same reason a lane without a mesh
has a second group: if messages go up one connection and down the other, the note for the next bucket does not queue
behind the data of this one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.core.collectives.countdown_work import CountdownWork
from thinwire.core.collectives.lanes import Lane


class PairwiseWork:
    """Several works of Gloo without futures, each of which may be waited for only once.

    ``wait`` waits in the caller's thread; only ``then`` starts a short-lived thread.
    """

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._lock = threading.Lock()
        self._taken = False
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def _take(self) -> bool:
        """Return, once, whether the caller is the one to wait for the works."""
        with self._lock:
            mine, self._taken = not self._taken, True
        return mine

    def _watch(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._error or error
        with self._lock:
            self._ended.set()
        for callback in self._callbacks:
            with contextlib.suppress(RuntimeError):
                callback()

    def wait(self) -> None:
        """Wait until all have ended. Raise the first one's error."""
        if self._take():
            self._watch()
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back, from another thread or at once, when all have ended or failed."""
        with self._lock:
            ended = self._ended.is_set()
            if not ended:
                self._callbacks.append(callback)
        if ended:
            callback()
        elif self._take():
            threading.Thread(target=self._watch, name="thinwire-pairwise", daemon=True).start()


def send_and_receive(
    sending: Mapping[int, Tensor], receiving: Mapping[int, Tensor], lane: Lane, tag: int
) -> PairwiseWork | CountdownWork:
    """Send and receive one message per peer (ranks within the lane)."""
    messages = (*sending.values(), *receiving.values())
    if lane.mesh is not None and all(x.device.type == "cpu" for x in messages):
        work = CountdownWork(len(messages))
        for peer, x in receiving.items():
            lane.mesh.first[peer].receive(x, work)
        for peer, x in sending.items():
            lane.mesh.first[peer].send(x, work)
        return work

    def group(source: int, target: int) -> dist.ProcessGroup:
        return lane.back if lane.back is not None and source > target else lane.group

    works = [dist.irecv(x, lane.ranks[p], group=group(p, lane.rank), tag=tag) for p, x in receiving.items()]
    works += [dist.isend(x, lane.ranks[p], group=group(lane.rank, p), tag=tag) for p, x in sending.items()]
    return PairwiseWork(works)


def all_to_all(x: Tensor, out: Tensor, lane: Lane, tag: int) -> PairwiseWork | CountdownWork:
    """Send chunk r of ``x`` to rank r; receive chunks into ``out``, in rank order. Both ``[W, ...]``, contiguous."""
    out[lane.rank].copy_(x[lane.rank])
    return _to_all(x, list(out), lane, tag)


def parts_of_all(x: Tensor, lane: Lane, tag: int) -> tuple[PairwiseWork | CountdownWork, list[Tensor]]:
    """Do as ``all_to_all``, without copying this rank's own chunk; return also the chunks, in rank order."""
    others = iter(x.new_empty((lane.size - 1, *x.shape[1:])))
    parts = [x[rank] if rank == lane.rank else next(others) for rank in range(lane.size)]
    return _to_all(x, parts, lane, tag), parts


def _to_all(x: Tensor, out: list[Tensor], lane: Lane, tag: int) -> PairwiseWork | CountdownWork:
    peers = lane.peers
    return send_and_receive({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in reversed(peers)}, lane, tag)
