"""Rows of whole runs that a row's text cannot hold: options of local steps, and methods of others.

From this folder: ``python race.py --methods "ddp,local_variants:second_moments,local_variants:growing"``, or with eight
workers ``--size xs --workers 8 --methods local_variants:sparse_loco,local_variants:demo``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

import thinwire as tw
from thinwire.core.methods.base import accumulate, all_finite
from thinwire.core.program import AllReduce, Bucket, Method, Program, State
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.trainer import Trainer

SIDE = 64  # of the patches of a matrix of which the largest entries are sent; of a vector: SIDE squared in a row


def second_moments(workload: Workload, group: Any, rounds: int = 3) -> Trainer:
    """Average Adam's second moments too, every so many rounds (DES-LOC)."""
    return _local(workload, group, codec="int2", sync_every=4, moments={"exp_avg_sq": rounds})


def growing(workload: Workload, group: Any, alpha: float = 0.008, most: int = 16) -> Trainer:
    """Periods that grow as the learning rate falls, from 4 steps on (QSR): to 16, once it is half of ``alpha / 2``."""
    return _local(workload, group, codec="int2", sync_every=tw.QSR(alpha, least=4, most=most))


def sparse_loco(
    workload: Workload, group: Any, sync_every: int = 32, density: float = 0.02, decay: float = 0.95
) -> Trainer:
    """SparseLoCo: local steps whose changes are sent as the largest entries of each patch, in 2 bits.

    Paper: Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """
    return _local(workload, group, codec=Patches(density, decay), sync_every=sync_every)


def demo(workload: Workload, group: Any, density: float = 32 / 4096, decay: float = 0.999) -> Trainer:
    """DeMo: the largest cosine components of a momentum are sent, and weights move by the sign of their mean.

    Paper: Peng et al.: DeMo: Decoupled Momentum Optimization, arXiv 2411.19870. Its momentum is what was not sent.
    """
    inner = workload.optimizer(workload.model).param_groups[0]  # type: ignore[union-attr]
    signs = Signs(workload.model.parameters(), inner["lr"], inner["weight_decay"])
    sync = tw.attach(workload.model, signs, Patches(density, decay, cosines=True), process_group=group)
    return Trainer(workload.model, signs, sync.close)


class Signs(torch.optim.SGD):
    """Moves each weight by the learning rate along the sign of its gradient; weights decay as AdamW's do."""

    def __init__(self, params: Any, lr: float, decay: float) -> None:
        super().__init__(params, lr)
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * self.decay).sub_(p.grad.sign(), alpha=group["lr"])


@dataclass(frozen=True)
class Patches(Method):
    """Of each patch of a tensor the largest ``density`` is sent in 2 bits, and ``decay`` of the rest is kept.

    ``cosines``: the largest cosine components instead, in 32 bits.

    For losses alone: the messages are averaged as decoded, so its bytes and seconds are not the method's.
    """

    name: ClassVar[str] = "patches"
    has_residual: ClassVar[bool] = True
    density: float
    decay: float
    cosines: bool = False
    fusion: Any = "auto"

    def reduce(self, bucket: Bucket, state: State) -> Program:
        """Do one all-reduce of what was decoded."""
        sent, code = [], _in_cosines if self.cosines else _two_bits
        for slot in bucket.slots:
            a = accumulate(slot, state)
            message = on_patches(a, lambda x: code(x, int(self.density * SIDE * SIDE)))
            state.stage(slot.name, residual=(a - message) * self.decay)
            sent.append(message.flatten())
        if sent:
            mean = yield AllReduce(torch.cat(sent) / state.size)
            state.verdict(all_finite(mean))
            bucket.write_gradient(mean)


def on_patches(x: Tensor, code: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``code`` of the patches of ``x``, ``[n, SIDE, SIDE]``, put together again."""
    matrix = x.dim() == 2
    rows, columns = x.shape if matrix else (1, x.numel())
    high, wide = (SIDE, SIDE) if matrix else (1, SIDE * SIDE)
    padded = F.pad(x.reshape(rows, columns), (0, -columns % wide, 0, -rows % high))
    down, across = padded.shape[0] // high, padded.shape[1] // wide
    patches = padded.view(down, high, across, wide).transpose(1, 2)
    coded = code(patches.reshape(-1, SIDE, SIDE)).view(down, across, high, wide)
    return coded.transpose(1, 2).reshape(padded.shape)[:rows, :columns].reshape(x.shape)


def _largest(patches: Tensor, k: int) -> tuple[Tensor, Tensor]:
    flat = patches.flatten(1)
    places = flat.abs().topk(k, 1).indices
    return flat.gather(1, places), places


def _alone(values: Tensor, places: Tensor) -> Tensor:
    """Return patches with these values in their places, and zeros elsewhere."""
    return values.new_zeros(len(values), SIDE * SIDE).scatter_(1, places, values).view(-1, SIDE, SIDE)


def _two_bits(patches: Tensor, k: int) -> Tensor:
    """Return the k largest of each patch, each as its sign times one of two magnitudes."""
    values, places = _largest(patches, k)
    size = values.abs()
    large = size > size.mean(1, keepdim=True)

    def mean(of: Tensor) -> Tensor:
        return (size * of).sum(1, keepdim=True) / of.sum(1, keepdim=True).clamp_min(1)

    coded = values.sign() * torch.where(large, mean(large), mean(~large))
    return _alone(coded, places)


def _in_cosines(patches: Tensor, k: int) -> Tensor:
    """Return each patch of its k largest cosine components alone."""
    at = torch.arange(SIDE, dtype=torch.float64)
    basis = math.sqrt(2 / SIDE) * torch.cos(math.pi / SIDE * (at[None] + 0.5) * at[:, None])
    basis[0] /= math.sqrt(2)
    cosines = basis.to(patches)
    return cosines.T @ _alone(*_largest(cosines @ patches @ cosines.T, k)) @ cosines


def _local(workload: Workload, group: Any, *, sync_every: Any, **options: Any) -> Trainer:
    optimizer = workload.optimizer(workload.model)
    sync = tw.attach(
        workload.model,
        optimizer,
        "local",
        sync_every=sync_every,
        fragment_sync_delay=0,
        process_group=group,
        **options,
    )
    period = sync_every if isinstance(sync_every, int) else 4
    return Trainer(workload.model, optimizer, sync.close, period)  # type: ignore[arg-type]
