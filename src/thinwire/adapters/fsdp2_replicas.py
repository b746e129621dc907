"""The exchange between the replicas of an FSDP2 model: its hook, the end of its step, its state.

FSDP2 calls the hook once per module and backward, in backward order, with the result of the reduce-scatter on this
rank. The module's pieces are one bucket, or two if the method leaves some parameters to plain averaging. The programs
run in the hook: on Gloo in the calling thread, as FSDP2's own collectives do; on NCCL they are issued on the stream on
which FSDP2 calls its hook, without waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.adapters.ddp import into_values, joined, traced
from thinwire.adapters.fsdp2_groups import Group, ParameterRows
from thinwire.core.program import Bucket, Method, Slot, State, Topology
from thinwire.engine.backward_hooks import BackwardEnd
from thinwire.engine.executors.events import Failure
from thinwire.engine.executors.streams import read_here
from thinwire.engine.parameters import buffers_of
from thinwire.engine.ranks.communicator import Communicator, SingleRank
from thinwire.engine.services import Closing
from thinwire.engine.session import Session
from thinwire.engine.state.persistence import VERSION, blank, from_flat, frozen_since, name_of, to_flat, without
from thinwire.engine.stats import BucketStats, Stats

log = logging.getLogger("thinwire")


class ReplicaSync(Closing):
    """The handle that :func:`thinwire.adapters.fsdp2.attach` returns.

    Residuals belong to this rank's shards, in the units of the reduce-scatter's result. DCP's ``Stateful``: they are
    saved as tensors sharded like their parameters, one set per replica, under ``residual/<replica>/<name>``, so DCP can
    reshard them for another number of shards. State that replicas share (factors) belongs to one shard's rows: with
    another number of shards it is drawn again.
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
        names = {id(p): name for name, p in model.named_parameters()}
        state = State(0 if comm is None else comm.rank, Topology(1 if comm is None else len(comm.ranks)))
        self._session = Session(method, comm or SingleRank(), state, scaler, names, start=start)
        self._model, self._groups, self._note, self.shards = model, tuple(groups), note, groups[0].shards
        self._end = BackwardEnd(self._finish)
        self._reduced: set[int] = set()  # modules reduced in the current backward
        self._partial: dict[int, Tensor] = {}
        self._sent: dict[tuple[int, bool], int] = {}
        self._undo: list[Any] = []
        self._parts = [self._split(group) for group in groups]
        if comm is not None:
            comm.agree(self._facts())
            self._session.fit()
            whole = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
            comm.broadcast([*whole, *(one.tensor for one in buffers_of(model))])
            for parts in self._parts:
                for pieces, dense in parts:
                    shapes, session = [(piece.name, piece.shape) for piece in pieces], self._session
                    for runs in (session.dense,) if dense else (session.first, session.method):
                        comm.open_lanes(traced(runs, shapes, state.topology, rank=state.rank))
            for group in groups:
                self._undo.append(group.take_over(partial(self._reduce, group)))
            self._undo.append(model.register_forward_pre_hook(self._forward).remove)

    def _split(self, group: Group) -> list[tuple[tuple[ParameterRows, ...], bool]]:
        """Return what the method handles and what stays dense; without pieces that are empty on this rank."""
        here = [piece for piece in group.pieces if piece.numel]
        kept = [self._session.method.dense(piece.name, tuple(piece.parameter.shape), False) for piece in here]
        parts = [(tuple(p for p, keep in zip(here, kept) if keep is dense), dense) for dense in (False, True)]
        return [part for part in parts if part[0]]

    def _facts(self) -> dict[str, Any]:
        return self._session.facts() | {
            "modules": [group.name for group in self._groups],
            "parameters": {piece.name: list(piece.shape) for group in self._groups for piece in group.pieces},
            "buffers": [f"{x.name} {list(x.tensor.shape)} {x.tensor.dtype}" for x in buffers_of(self._model)],
        }

    def _forward(self, *_: Any) -> None:
        # After a backward that raised; FSDP2 has dropped its gradients or will report it.
        if not torch.compiler.is_compiling() and self._end.outside():
            self._reduced.clear()
            self._partial.clear()
            self._session.abandon()

    def _reduce(self, group: Group, flat: Tensor) -> None:
        """Average this rank's part of a module's gradients over the replicas, in place (FSDP2's hook)."""
        self._session.check_usable()
        if flat.numel() != group.elements:
            raise RuntimeError(
                f"module {group.name!r} has gradients for only some parameters, and FSDP2 does not say which: "
                "freeze what is unused before attach, or use a torch with set_reduce_scatter_unused_params"
            )
        started = time.perf_counter()
        with torch.no_grad():
            read_here(flat)  # made on FSDP2's reduce-scatter stream
            if (aside := self._partial.pop(group.index, None)) is not None:
                flat += aside
            if not group.reduces:  # keep the sum until all-reduce is on again (``set_requires_all_reduce(False)``)
                self._partial[group.index] = flat.clone()
                flat.zero_()
                return
            if group.index in self._reduced:  # if a module reduces several times in one backward, each is a step
                self._finish()
            if not self._reduced:
                self._session.begin()
            self._reduced.add(group.index)
            self._end.note()
            for pieces, dense in self._parts[group.index]:
                self._exchange(group, flat, pieces, dense)
        if not flat.is_cuda:
            self._session.exposed_seconds += time.perf_counter() - started

    def _exchange(self, group: Group, flat: Tensor, pieces: Sequence[ParameterRows], dense: bool) -> None:
        session = self._session
        comm, state = session.comm, session.state
        slots = [Slot(p.name, p.shape, p.view(flat), flat.dtype, flat.device, None) for p in pieces]
        elements = sum(slot.numel for slot in slots)
        if (memory := joined(slots)) is None:
            memory = flat.new_empty(elements)
        bucket = Bucket(group.index, slots, scale=session.scale, buffer=memory)
        before = comm.ledger.total
        try:
            comm.run(session.method_of(dense).reduce(bucket, state), "bucket")
        except RuntimeError as error:
            failure = Failure(error, group.index, f"the exchange between replicas of module {group.name!r}")
            names = [[piece.name for piece in one.pieces] or [one.name] for one in self._groups]
            text = comm.sentence(failure, state.step, names)
            session.give_up(text)
            raise RuntimeError(text) from error
        into_values(slots)
        self._sent[group.index, dense] = comm.ledger.total - before
        session.averaged(elements * flat.element_size())

    def _finish(self) -> None:
        """End the backward: commit what the programs have staged if all shards' values were finite."""
        if not self._reduced:
            return
        self._reduced.clear()
        session, device = self._session, self._groups[0].device
        # A method with state must know of a non-finite value in any shard, not only in its own.
        if not session.method.cheap_pack and dist.get_world_size(self.shards) > 1:
            flag = session.state.accepted()
            agreed = torch.ones((), dtype=torch.int32, device=device) if flag is None else flag.to(torch.int32)
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.shards)
            session.state.verdict(agreed.to(torch.bool))
        session.commit()

    def stats(self) -> Stats:
        """Return the counters of the exchange between replicas since ``attach``. On CUDA, ``exposed_seconds`` is 0."""
        sent = self._sent
        buckets = [
            BucketStats(
                tuple(p.name for p in some), sum(p.numel for p in some), dense, sent.get((group.index, dense), 0)
            )
            for group, parts in zip(self._groups, self._parts)
            for some, dense in parts
        ]
        return self._session.stats(self._note, buckets)

    @property
    def state(self) -> State:
        """The method's state."""
        return self._session.state

    @property
    def pieces(self) -> dict[str, ParameterRows]:
        """This rank's rows of every parameter that the method handles, by name."""
        return {p.name: p for parts in self._parts for pieces, dense in parts if not dense for p in pieces}

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's residuals as DTensors, sharded like the parameters, and the rest. No collective.

        With zeros for what will be kept later: DCP fills only the keys that it is given.
        """
        session, pieces = self._session, self.pieces
        local = [(name, piece.parameter.to_local()) for name, piece in pieces.items()]
        flat = to_flat(session, blank(session.method, local, session.topology, session.rank), None)
        flat["replicas"] = flat.pop("world_size")
        del flat["rank"]
        found: dict[str, Any] = {}
        for key, value in flat.items():
            kind, _, rest = key.partition("/")
            if kind == "shared":
                found[f"{self._shared_here()}{rest}"] = value
            elif rest:  # of this replica
                piece = pieces[name_of(key)]
                found[key] = piece.sharded(value.to(piece.parameter.device))
            else:
                found[key] = value
        return found

    def _shared_here(self) -> str:
        return f"shared/{dist.get_rank(self.shards)}of{dist.get_world_size(self.shards)}/"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``, as DCP has filled it: bit for bit on the same mesh.

        Raises:
            ValueError: it belongs to another method, or to another number of replicas.
        """
        if state.get("version") != VERSION or "replicas" not in state:
            raise ValueError(f"this is not the state of a thinwire ReplicaSync, version {VERSION}")
        session, mine = self._session, self._shared_here()
        old, new = int(state["replicas"]), session.state.size
        if old != new and state["method"] == session.named.name:
            raise ValueError(
                f"the state is from {old} replicas, but now there are {new}: keep their number (that of the shards may "
                "change), or start without this state (the residuals are then lost)"
            )
        flat: dict[str, Any] = {"world_size": old}
        for key, value in state.items():
            if key.startswith(mine):
                flat["shared/" + key.removeprefix(mine)] = value
            elif not key.startswith("shared/"):
                flat[key] = value.to_local() if isinstance(value, DTensor) else value
        flat = without(flat, frozen_since(self._model, self.pieces))
        found = from_flat(session, flat, {name: piece.shape for name, piece in self.pieces.items()})
        had = any(key.startswith("shared/") for key in state)
        if had and not any(key.startswith(mine) and value.any() for key, value in state.items()) and int(state["step"]):
            log.warning("thinwire: the shards are cut differently; factors are drawn again, residuals are kept")
        session.state.restore(found)

    def close(self) -> None:
        """Remove the hooks and return the process groups. FSDP2 then averages over replicas itself again."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._session.close()
