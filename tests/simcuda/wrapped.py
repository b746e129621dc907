"""DDP and FSDP2 as thinwire's adapters meet them: what calls a hook, on which stream, and who waits for what.

Neither can run on the cards of ``card.py``. Their gradients are made by hand, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from card import Card
from nccl import Nccl
from torch import Tensor, nn
from training import DEVICE, RANKS, Net

from thinwire.adapters import ddp as ddp_hooks
from thinwire.adapters import fsdp2_replicas
from thinwire.adapters.ddp import ddp_hook
from thinwire.adapters.fsdp2 import CompressedReduceScatter
from thinwire.adapters.fsdp2_groups import Group, ParameterRows
from thinwire.adapters.fsdp2_replicas import ReplicaSync
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Topology
from thinwire.engine.ranks.communicator import Communicator


class Promise:
    """``torch.futures.Future(devices=[...])``: its value comes with the streams that made it."""

    def __init__(self, card: Card, device: torch.device) -> None:
        self._card, self._device, self._calls = card, device, []
        self._value: Any = None
        self._made: Any = None

    def done(self) -> bool:
        return self._made is not None

    def value(self) -> Any:
        return self._value

    def set_result(self, value: Any) -> None:
        self._value, self._made = value, self._card.current_stream(self._device).record_event()
        for call in self._calls:
            call()

    def then(self, call: Any) -> Promise:
        later = Promise(self._card, self._device)

        def run() -> None:  # on a stream of its own
            with self._card.stream(self._card.new_stream(self._device)):
                self.wait()
                later.set_result(call(self))

        self._calls.append(run)
        if self.done():
            run()
        return later

    def wait(self) -> Any:
        current = self._card.current_stream(self._device)
        current.wait_event(self._made)
        if isinstance(self._value, Tensor):
            self._value.record_stream(current)
        return self._value


@dataclass
class _DDPBucket:
    number: int
    flat: Tensor
    owners: Sequence[Tensor]
    last: bool

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> Sequence[Tensor]:
        return self.owners

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


class DDPTraining:
    """A model under DDP with a hook; ``arrived`` hears of each gradient, as autograd would tell it."""

    arrived: Any = None

    def __init__(self, card: Card, model: nn.Module, hook: Any) -> None:
        self.card, self.model = card, model
        self.state, self._hook = hook
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        owned = list(model.parameters())
        self._groups = [owned[4:], owned[:4]]
        self._flat = [torch.empty(sum(p.numel() for p in group), device=DEVICE) for group in self._groups]

    def step(self) -> None:
        """A whole step."""
        promises = []
        for number, (flat, owned) in enumerate(zip(self._flat, self._groups)):
            gradients = [torch.randn_like(p) for p in owned]
            for p, view in zip(owned, flat.split([p.numel() for p in owned])):
                view.copy_(gradients.pop(0).reshape(-1))
                p.grad = view.view(p.shape)
                if self.arrived is not None:
                    self.arrived(p)
            bucket = _DDPBucket(number, flat, owned, flat is self._flat[-1])
            promises.append(self._hook(self.state, bucket))
        for promise in promises:
            promise.wait()
        self.optimizer.step()


@contextmanager
def ddp(method: Any, rank: int = 0, card: Card | None = None, **options: Any) -> Iterator[DDPTraining]:
    """A rank of four under DDP."""
    card = Card() if card is None else card
    with (
        card.in_place(),
        Nccl(card, rank, RANKS).in_place(),
        patch.object(ddp_hooks, "promise_on", lambda device: Promise(card, device)),
    ):
        torch.manual_seed(0)
        with DEVICE:
            model = Net()
        run = DDPTraining(card, model, ddp_hook(method, topology=Topology(RANKS), **options))

        def register(p: Tensor, hook: Any) -> Any:
            run.arrived = hook
            return SimpleNamespace(remove=lambda: None)

        with patch.object(Tensor, "register_post_accumulate_grad_hook", register):
            yield run
        run.state.close()


class _Group(Group):
    """A module of FSDP2's, which only keeps what it is given, and calls it."""

    def replace_reduce_scatter(self, ours: Any) -> Any:
        self._inside._reduce_scatter_comm = ours
        return lambda: None

    def take_over(self, hook: Any) -> Any:
        self._inside._all_reduce_hook = hook
        return lambda: None

    def call_hook(self, flat: Tensor) -> None:
        self._inside._all_reduce_hook(flat)

    def reduce_scatter(self, shard: Tensor, sent: Tensor) -> None:
        self._inside._reduce_scatter_comm(shard, sent, None, dist.ReduceOp.AVG)


def _group(index: int, layer: nn.Module, shards: Any) -> _Group:
    pieces, offset = [], 0
    for name, p in layer.named_parameters(prefix=("first", "norm", "middle", "last")[index]):
        pieces.append(ParameterRows(name, tuple(p.shape), offset, p))  # type: ignore[arg-type]
        offset += p.numel()
    inside = SimpleNamespace(all_reduce_grads=True, _all_reduce_hook=None, _reduce_scatter_comm=None)
    return _Group(index, str(index), layer, tuple(pieces), offset, DEVICE, shards, None, inside)


class FSDPTraining:
    """A model under FSDP2, of which this rank has all: as many pieces as parameters."""

    def __init__(self, card: Card, nccl: Nccl, method: Any) -> None:
        self.card = card
        with DEVICE:
            self.model = Net()
        shards = nccl.new_group([nccl.rank])
        self.groups = [_group(index, layer, shards) for index, layer in enumerate(self.model.children())]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._ends: list[Any] = []
        end = SimpleNamespace(note=lambda: None, outside=lambda: False)
        comm = Communicator(nccl.world, Topology(RANKS), DEVICE, None)
        with patch.object(fsdp2_replicas, "BackwardEnd", lambda callback: self._ends.append(callback) or end):
            self.sync = ReplicaSync(self.model, self.groups, method, comm, None, "")
        self._scatter, self._reduce = card.new_stream(DEVICE), card.new_stream(DEVICE)

    def step(self) -> None:
        """A whole step: reduce-scatter and hook have a stream each, as in torch's ``foreach_reduce``.

        Gradients are copied out of the hook's tensor, as with mixed precision, and then nothing holds it.
        """
        main = self.card.current_stream(DEVICE)
        for group in reversed(self.groups):
            whole = torch.randn(group.elements, device=DEVICE)
            self._scatter.wait_stream(main)
            with self.card.stream(self._scatter):
                flat = whole.clone()
                whole.record_stream(self._scatter)
            self._reduce.wait_stream(self._scatter)
            with self.card.stream(self._reduce):
                group.call_hook(flat)
                for piece in group.pieces:
                    piece.parameter.grad = piece.view(flat).clone()
            del flat
        main.wait_stream(self._reduce)
        self._ends[0]()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ScatterTraining:
    """A model under FSDP2 with a reduce-scatter of ours. Every rank has as much of a module as the others."""

    def __init__(self, card: Card, nccl: Nccl, method: Any) -> None:
        self.card = card
        with DEVICE:
            self.model = Net()
        self.groups = [_group(index, layer, nccl.world) for index, layer in enumerate(self.model.children())]
        comm = Communicator(nccl.world, Topology(RANKS), DEVICE, None)
        self.sync = CompressedReduceScatter(self.groups, method, comm)
        self._scatter = card.new_stream(DEVICE)

    def step(self) -> None:
        """A backward, as torch's ``foreach_reduce`` has it: each input is kept until the next one is on its way."""
        main, kept = self.card.current_stream(DEVICE), None
        for group in reversed(self.groups):
            gradients = torch.randn(group.elements * RANKS, device=DEVICE)
            sent = self.sync.allocate((group.elements * RANKS,), dtype=torch.float32, device=DEVICE)
            sent.copy_(gradients)
            del gradients
            if kept is not None:
                main.wait_event(kept[1])
            self._scatter.wait_stream(main)
            with self.card.stream(self._scatter):
                shard = self.sync.allocate((group.elements,), dtype=torch.float32, device=DEVICE)
                group.reduce_scatter(shard, sent)
                kept = sent, self._scatter.record_event()
                for piece in group.pieces:
                    piece.parameter.grad = piece.view(shard)
        main.wait_stream(self._scatter)
        for p in self.model.parameters():
            p.grad.mul_(2)
            p.grad = None


@contextmanager
def _under_fsdp2(kind: Any, method: Any, rank: int = 0, card: Card | None = None, **options: Any) -> Iterator[Any]:
    card = Card() if card is None else card
    with card.in_place(), Nccl(card, rank, RANKS).in_place() as nccl:
        torch.manual_seed(0)
        run = kind(card, nccl, resolve(method, **options))
        yield run
        run.sync.close()


fsdp2 = partial(_under_fsdp2, FSDPTraining)
"""A replica of four, with a shard of its own."""
fsdp2_scatter = partial(_under_fsdp2, ScatterTraining)
"""A shard of four."""
