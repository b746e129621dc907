"""The exchange between the replicas of an FSDP2 model: its hook, the end of its step, its state.

FSDP2 calls the hook once per module and backward, in the order of the backward, with what the reduce-scatter has left
on this rank. The module's pieces are one bucket, or two where the method leaves some parameters to plain averaging. The
programs run in the hook: on Gloo in the calling thread, as FSDP2's own collectives do; on NCCL they are issued on the
stream in which FSDP2 calls its hook, and nobody waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.adapters import fsdp2_persistence as persistence
from thinwire.adapters.ddp_layout import joined
from thinwire.adapters.fsdp2_groups import Group, Piece
from thinwire.adapters.released import released
from thinwire.adapters.traced import traced
from thinwire.engine.backward_end import BackwardEnd
from thinwire.engine.communicator import Communicator
from thinwire.engine.restart import tell_reset
from thinwire.engine.scaler import found_scaler, loss_scale
from thinwire.engine.stats import BucketStats, Stats
from thinwire.engine.step_watch import StepWatch, owned
from thinwire.engine.streams import read_here
from thinwire.engine.wire import Failure
from thinwire.methods.ssgd import SSGD
from thinwire.program import Bucket, Method, Slot, State, Topology


class ReplicaSync:
    """What :func:`thinwire.adapters.fsdp2.attach` returns.

    Residuals are of this rank's shards, in the units that the reduce-scatter leaves. DCP's ``Stateful``: they are saved
    as tensors sharded like their parameters, under ``residual/<replica>/<name>``.

    Args:
        model: the root.
        groups: its FSDP2 modules.
        method: of the exchange.
        comm: over the replicas; None: there is one.
        scaler: the GradScaler in use, or None.
        note: why another method runs than was asked for.
        start: the first step at which the method runs; None: as it says itself.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        method: Method,
        comm: Communicator | None,
        scaler: Any,
        note: str,
        start: int | None = None,
    ) -> None:
        self.model, self.method = model, method
        self.topology = Topology(1 if comm is None else len(comm.ranks))
        self.rank = 0 if comm is None else comm.rank
        self.state = State(self.rank, self.topology)
        self.state.start = method.exact_start if start is None else start
        names = {id(p): name for name, p in model.named_parameters()}
        self._watch = StepWatch(lambda: self.state, lambda: names, expected=False, before=self._before_step)
        self._names = names
        self._dense: Method = method.beside() or SSGD(ordered=bool(getattr(method, "ordered", False)))
        self._groups, self._comm, self.scaler, self._note = tuple(groups), comm, scaler, note
        self.shards = groups[0].shards
        # A method that keeps something must know of a bad value in any shard, not in its own alone.
        self._watches = not method.light and dist.get_world_size(self.shards) > 1
        self._end = BackwardEnd(self._finish)
        self._seen: set[int] = set()
        self._partial: dict[int, Tensor] = {}
        self._scale: Tensor | None = None
        self._broken: str | None = None
        self._rejected, self._exposed, self._dense_bytes = 0, 0.0, 0.0
        self._sent: dict[tuple[int, bool], int] = {}
        self._undo: list[Any] = []
        self._parts = [self._split(group) for group in groups]
        if comm is not None:
            comm.agree(self._facts())
            comm.broadcast([*(p.to_local() for p in self._parameters()), *model.buffers()])
            for parts in self._parts:
                for pieces, dense in parts:
                    shapes = [(piece.name, piece.shape) for piece in pieces]
                    for runs in (self._dense,) if dense else (self._dense, method):
                        comm.open_lanes(traced(runs, shapes, self.topology, rank=self.rank))
            for group in groups:
                self._undo.append(group.take_over(partial(self._reduce, group)))
            self._undo.append(model.register_forward_pre_hook(self._forward).remove)

    def _method(self, dense: bool) -> Method:
        return self._dense if dense or self.state.step < self.state.start else self.method

    def _parameters(self) -> list[Any]:
        """All of FSDP2's, frozen ones too, once each."""
        found = {id(p): p for p in self.model.parameters() if hasattr(p, "to_local")}
        return list(found.values())

    def _split(self, group: Group) -> list[tuple[tuple[Piece, ...], bool]]:
        """What the method takes, and what stays dense; without pieces that have no element here."""
        here = [piece for piece in group.pieces if piece.numel]
        kept = [self.method.dense(piece.name, tuple(piece.parameter.shape), None) for piece in here]
        parts = [(tuple(p for p, keep in zip(here, kept) if keep is dense), dense) for dense in (False, True)]
        return [part for part in parts if part[0]]

    def _facts(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "start": self.state.start,
            "options": {key: str(value) for key, value in self.method.options().items()},
            "modules": [group.name for group in self._groups],
            "parameters": {piece.name: list(piece.shape) for group in self._groups for piece in group.pieces},
            "buffers": [f"{name} {list(buffer.shape)}" for name, buffer in self.model.named_buffers()],
        }

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process is about to step."""
        if self.scaler is None and self.method.has_residual and owned(optimizer, self._names):
            self.scaler = found_scaler(self.state, self._groups[0].device)

    # --- a step -------------------------------------------------------------------------------------------------

    def _forward(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._end.outside():  # a backward died with an exception; FSDP2 has dropped its gradients, or will say so
            self._seen.clear()
            self._partial.clear()
            self.state.drop_step()

    def _reduce(self, group: Group, flat: Tensor) -> None:
        """FSDP2's hook: average what this rank holds of a module's gradients over the replicas, in place."""
        assert self._comm is not None
        if self._broken is not None:
            raise RuntimeError(f"this ReplicaSync is unusable after an earlier failure: {self._broken}")
        if flat.numel() != group.elements:
            raise RuntimeError(
                f"module {group.name!r} brings gradients of some parameters only, and FSDP2 does not say of which: "
                "freeze what is unused before attach, or use a torch with set_reduce_scatter_unused_params"
            )
        started = time.perf_counter()
        with torch.no_grad():
            read_here(flat)  # made on FSDP2's reduce-scatter stream
            if not group.reduces:
                self._put_aside(group, flat)
                return
            if (aside := self._partial.pop(group.index, None)) is not None:
                flat += aside
            self._begin(group)
            for pieces, dense in self._parts[group.index]:
                self._exchange(group, flat, pieces, dense)
        if not flat.is_cuda:
            self._exposed += time.perf_counter() - started

    def _put_aside(self, group: Group, flat: Tensor) -> None:
        """``set_requires_all_reduce(False)``: keep the sum of the shards' averages until it is True again."""
        if group.index in self._partial:
            self._partial[group.index] += flat
        else:
            self._partial[group.index] = flat.clone()
        flat.zero_()

    def _begin(self, group: Group) -> None:
        if group.index in self._seen:  # a module that reduces several times in one backward: each time is a step
            self._finish()
        if not self._seen:
            self._watch.begin()
            tell_reset(self.method, self.state)
            self._scale = loss_scale(self.scaler, group.device)
            self.state.lr = None
        self._seen.add(group.index)
        self._end.note()

    def _exchange(self, group: Group, flat: Tensor, pieces: Sequence[Piece], dense: bool) -> None:
        assert self._comm is not None
        slots = [Slot(p.name, p.shape, p.view(flat), flat.dtype, flat.device, None) for p in pieces]
        elements = sum(slot.numel for slot in slots)
        memory = joined(slots)
        if memory is None:
            memory = flat.new_empty(elements)
        bucket = Bucket(group.index, slots, scale=self._scale, buffer=memory)
        before = self._comm.ledger.total
        try:
            self._comm.run(self._method(dense).reduce(bucket, self.state), "bucket", self.state.step)
        except RuntimeError as error:
            failure = Failure(error, group.index, f"the exchange between replicas of module {group.name!r}")
            names = [[piece.name for piece in one.pieces] or [one.name] for one in self._groups]
            self._broken = self._comm.sentence(failure, names) or str(error)
            self.state.drop_step()
            raise RuntimeError(self._broken) from error
        for slot in slots:
            target, result = slot.value, slot.result
            assert target is not None
            if result is not None and result.data_ptr() != target.data_ptr():
                target.copy_(result)
        self._sent[group.index, dense] = self._comm.ledger.total - before
        self._dense_bytes += 2 * (self.state.size - 1) / self.state.size * elements * flat.element_size()

    def _finish(self) -> None:
        """The backward has ended: commit what the programs have staged if all shards' values were finite."""
        if not self._seen:
            return
        self._seen.clear()
        device = self._groups[0].device
        if self._watches:
            flag = self.state.accepted()
            agreed = torch.ones((), dtype=torch.int32, device=device) if flag is None else flag.to(torch.int32)
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.shards)
            self.state.verdict(agreed.to(torch.bool))
        if device.type == "cuda":
            self.state.end_step_on_device(hold=self._watch.hold)
        elif not self.state.end_step(hold=self._watch.hold):
            self._rejected += 1
        self._watch.delivered()

    # --- what users call ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counters since ``attach``, of the exchange between replicas. On CUDA ``exposed_seconds`` stays 0."""
        buckets = tuple(
            BucketStats(
                tuple(piece.name for piece in pieces),
                sum(piece.numel for piece in pieces),
                dense,
                self._sent.get((group.index, dense), 0),
            )
            for group, parts in zip(self._groups, self._parts)
            for pieces, dense in parts
        )
        ledger = None if self._comm is None else self._comm.ledger
        return Stats(
            method=self.method.name,
            note=self._note,
            world_size=self.topology.world_size,
            steps=self.state.step,
            rejected_steps=self._rejected,
            bytes_sent=0 if ledger is None else ledger.total,
            dense_bytes=round(self._dense_bytes),
            exposed_seconds=self._exposed,
            collectives={} if ledger is None else dict(ledger.issued),
            bytes_by_kind={} if ledger is None else dict(ledger.bytes),
            buckets=buckets,
        )

    @property
    def pieces(self) -> dict[str, Piece]:
        """This rank's rows of every parameter that the method takes, by name."""
        return {p.name: p for parts in self._parts for pieces, dense in parts if not dense for p in pieces}

    def state_dict(self) -> dict[str, Any]:
        """This replica's residuals as DTensors, sharded like the parameters, and the rest. No collective."""
        return persistence.to_state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ``state_dict``, as DCP has filled it: bit for bit on the same mesh.

        Raises:
            ValueError: it is of another method, or of another number of replicas.
        """
        persistence.from_state_dict(self, state)

    def close(self) -> None:
        """Take the hooks out and give the process groups back. FSDP2 then averages over replicas itself again."""
        self._broken = released(self._undo, self._comm, self._broken)

    def __enter__(self) -> ReplicaSync:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
