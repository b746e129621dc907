"""A model trained on the card of ``card.py`` by the engine as it is: ``attach``, hooks, autograd, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # optimizers import it, and then must find torch as it is
from card import Card
from nccl import Nccl
from torch import Tensor, nn

import thinwire as tw
from kfac_with import kfac_with
from thinwire.core.kernels import tables
from thinwire.core.kernels.fused import Fused, Kernel
from thinwire.core.program import Topology
from thinwire.engine.schedules.deferred import DeferredGrad

DEVICE, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
RANKS = 4


class Net(nn.Module):
    """Seven parameters, of which methods compress three."""

    def __init__(self, short: bool = False) -> None:
        """``short``: the last layer is not used."""
        super().__init__()
        self.first, self.norm = nn.Linear(24, 32), nn.LayerNorm(32)
        self.middle, self.last = nn.Linear(32, 16, bias=False), nn.Linear(16, 8)
        self.short = short

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(self.first(x).tanh())).tanh()
        return x if self.short else self.last(x)


class Conv(nn.Module):
    """With BatchNorm, so with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(-1, 1, 6, 4))


class Branches(nn.Module):
    """Layers side by side: their gradients come in the order of ``order``, backwards. Those left out are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, size) for size in (8, 16, 24, 8))
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[i](x).square().mean() for i in self.order])


class Training:
    """One rank's.

    Attributes:
        card, nccl: where.
        model, optimizer, sync: whose.
        scaler: of its losses, or None.
        clip: the largest norm, or None.
        passes: backwards before each step.
    """

    def __init__(self, card: Card, nccl: Nccl, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.card, self.nccl, self.model, self.optimizer = card, nccl, model, optimizer
        self.sync: Any = None
        self.scaler: Any = None
        self.clip: float | None = None
        self.passes = 1
        self._numbers = torch.Generator().manual_seed(1)

    def loss(self) -> Tensor:
        """Of random examples."""
        first = next(self.model.parameters())
        x = torch.randn(6, 24, generator=self._numbers).pin_memory().to(first.device, first.dtype, non_blocking=True)
        return self.model(x).square().mean()

    def backward(self) -> None:
        """Forward and backward."""
        loss = self.loss()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """A whole step."""
        for _ in range(self.passes - 1):
            with self.sync.no_sync():
                self.backward()
        self.backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            self.sync.clip_grad_norm_(self.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def training(
    method: Any = "ssgd",
    *,
    rank: int = 0,
    card: Card | None = None,
    told: dict[Any, Tensor] | None = None,
    **options: Any,
) -> Iterator[Training]:
    """A rank of four whose model is attached to a method. ``told``: see ``Nccl``; options are those of ``attached``."""
    with place(rank, card, told) as (card, nccl), attached(card, nccl, method, **options) as run:
        yield run


class Pair:
    """A rank's two models, on a card each, whose gradients come in one backward."""

    def __init__(self, first: Training, second: Training) -> None:
        self.card, self.nccl, self._both = first.card, first.nccl, (first, second)

    def step(self) -> None:
        """A whole step of both."""
        torch.autograd.backward([run.loss() for run in self._both])
        for run in self._both:
            run.optimizer.step()
            run.optimizer.zero_grad()


@contextmanager
def two_cards(method: Any, **options: Any) -> Iterator[Pair]:
    """A rank of four that has a model on each of two cards, the current one and another."""
    with (
        place(0, None, None) as (card, nccl),
        attached(card, nccl, method, **options) as first,
        attached(card, nccl, method, device=SECOND, **options) as second,
    ):
        yield Pair(first, second)


@contextmanager
def place(rank: int, card: Card | None, told: dict[Any, Tensor] | None) -> Iterator[tuple[Card, Nccl]]:
    """torch's CUDA and NCCL are these."""
    card = Card() if card is None else card
    nccl = Nccl(card, rank, RANKS, told)
    with card.in_place(), nccl.in_place(), _deferred_gradients(), kernels_on(card):
        yield card, nccl


@contextmanager
def attached(
    card: Card,
    nccl: Nccl,
    method: Any,
    *,
    nodes: int | None = None,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.float32,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    scaled: bool = False,
    clip: float | None = None,
    passes: int = 1,
    kfac: dict[str, Any] | None = None,
    **attach: Any,
) -> Iterator[Training]:
    """A model of the rank's, attached."""
    torch.manual_seed(0)
    with device, _default(dtype):
        net = model()
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(net.parameters())
    run = Training(card, nccl, net, made)
    run.scaler = torch.amp.GradScaler(device="cuda", init_scale=8.0) if scaled else None
    run.clip, run.passes = clip, passes
    topology = Topology(RANKS, None if nodes is None else RANKS // nodes)
    run.sync = tw.attach(net, made, method, topology=topology, scaler=run.scaler, **attach)
    preconditioner = None if kfac is None else kfac_with(net, run.sync, damping=0.1, **kfac)
    try:
        yield run
    finally:
        run.sync.close()
        del preconditioner


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _deferred_gradients() -> Iterator[None]:
    """``DeferredGrad`` is made of a tensor's memory, which those on a card here have not: it gets none."""

    def new(cls: Any, parameter: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype)
        made.where = parameter.device
        made.renew(None)
        return made

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} reads a gradient that is not there")

    with (
        patch.object(DeferredGrad, "__new__", staticmethod(new)),
        patch.object(DeferredGrad, "__torch_dispatch__", classmethod(dispatch), create=True),
        patch.object(DeferredGrad, "device", property(lambda made: made.where), create=True),
    ):
        yield


@contextmanager
def kernels_on(card: Card) -> Iterator[None]:
    """Kernels of Triton count as launches; what they read and write, and the numbers, are their twins'."""

    def launch(kernel: Kernel, programs: int, *arguments: Any, **_: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        with card.device(tensors[0].device):
            card.kernel(kernel.__name__, tensors[0].get_device(), card.where(2))

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not function.serves(*args, **kwargs):
            return function.twin(*args, **kwargs)
        function.launch(*args, **kwargs)
        names = card.names.copy()
        made = function.twin(*args, **kwargs)
        card.names = names
        return made

    # Whether memory lies where it has lain is a matter of chance on a CPU: tables are always made anew.
    anew = patch.object(tables, "table_at", tables.table_at.__wrapped__)
    with patch.object(Kernel, "__call__", launch), patch.object(Fused, "__call__", call), anew:
        yield
