"""An inverse update on one rank: invert this rank's factors, exchange the inverses, agree on what failed.

Factors are never modified. A factor that cannot be inverted keeps its old inverse, on all ranks. Each inverse is sent
with the level that produced it (see :mod:`thinwire.kernels.inverse`). For inverses that every rank computes for itself,
the levels are compared, and the inverse is computed again if another rank needed a higher level.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import upload
from thinwire.core.kernels.symmetric import (
    FAILED,
    damped_eigen,
    damped_inverse,
    first_eigen,
    first_inverse,
    mean_diagonal,
    packed_times,
    pi_ratio,
    precondition,
    precondition_eigen,
    unpack_upper,
)
from thinwire.core.pricing.placement import place
from thinwire.core.program import CROSS, NODE, Program, Slot, State
from thinwire.core.program.bucket import stacked
from thinwire.engine.session import Channel
from thinwire.systems.kfac.exchange import FACTOR, UPDATES, FromAll, FromOwner, exchanged, gather
from thinwire.systems.kfac.plan import InverseMessage, KFACPlan

logger = logging.getLogger("thinwire")

Run = Callable[[Program], Tensor]
TOGETHER = 1 << 22
"""The most elements of matrices that are inverted in one call."""


class Inverses:
    def __init__(self, plan: KFACPlan, state: State, rank: int) -> None:
        self.plan, self._state, self._rank = plan, state, rank
        self.of: dict[str, Tensor] = {}  # [d, d]; eigen: [d, d + 1], vectors, then values
        self.levels: dict[str, int] = {}
        self._warned: set[str] = set()
        self._compared = False

    def update(self, damping: float, channel: Channel, run: Run) -> float:
        """Invert all factors. All ranks must call this. Return the seconds spent waiting for others."""
        group = self._rank // self.plan.workers
        messages = self.plan.messages(group)
        rows, waited = self._exchange(messages, damping, channel, group * self.plan.workers)
        sent = {item for message in messages for item in message.items}
        mine = [i for i, o in enumerate(self.plan.owners) if i not in sent and o in (-1, self._rank)]
        rows.update(self._rows(mine, damping))
        everywhere = [item for item in mine if self.plan.owners[item] < 0]
        if self.plan.world_size > 1 and everywhere and not self._agree(everywhere, rows, damping, run):
            return waited + self.update(damping, channel, run)
        self._take(rows)
        return waited

    def _exchange(
        self, messages: Sequence[InverseMessage], damping: float, channel: Channel, first: int
    ) -> tuple[dict[int, Tensor], float]:
        """Exchange the messages in order; while others' are awaited, this rank inverts its own factors."""
        rows: dict[int, Tensor] = {}

        def slot(item: int) -> Slot:
            factor = self._factor(item)
            size = (self.plan.elements(item),)
            return Slot(self.plan.factor(item), size, rows.get(item), factor.dtype, factor.device)

        def sent(message: InverseMessage) -> FromOwner | FromAll:
            if message.owner is None:
                return FromAll(tuple(self.plan.owners[item] - first for item in message.items), NODE)
            return FromOwner(message.owner - first, NODE)

        def invert(index: int) -> None:
            own = [i for i in messages[index].items if self.plan.owners[i] == self._rank]
            rows.update(self._rows(own, damping))

        programs = [(sent(message), message.items) for message in messages]
        return exchanged(channel, self._state, programs, slot, invert)

    def _factor(self, item: int) -> Tensor:
        return self._state.fields[FACTOR, self.plan.factor(item)]

    def _updates(self, item: int) -> Tensor:
        return self._state.fields[UPDATES, self.plan.factor(item)]

    def _alike(self, items: Iterable[int]) -> Iterator[list[int]]:
        """Yield items whose matrices have one size and dtype together; large ones fill a GPU by themselves."""
        found: dict[tuple[int, torch.dtype], list[int]] = {}
        for item in items:
            found.setdefault((self.plan.dim(item), self.plan.layers[item // 2].dtype), []).append(item)
        for (d, _), same in found.items():
            most = max(1, TOGETHER // d**2)
            yield from (same[begin : begin + most] for begin in range(0, len(same), most))

    def _rows(self, items: Sequence[int], damping: float) -> dict[int, Tensor]:
        """Return each item's inverse as sent, followed by its level. One device read tells where level 0 suffices."""
        first: dict[int, Tensor] = {}
        done = []
        for same in self._alike(items):
            try:
                rows, good = self._first(same, damping)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # see ``first_eigen``
                continue
            first.update(zip(same, rows))
            done.append(good)
        if not done:
            return {i: self._row(i, damping, 0) for i in items}
        seen = torch.stack([self._updates(item) for item in first]) > 0
        held = dict(zip(first, (torch.cat(done) & seen).tolist()))
        return {i: first[i] if held.get(i) else self._row(i, damping, int(i in held)) for i in items}

    def _first(self, items: Sequence[int], damping: float) -> tuple[Tensor, Tensor]:
        matrices = unpack_upper(stacked([self._factor(item) for item in items]))
        if self.plan.method == "eigen":
            (vectors, values), good = first_eigen(matrices)
            return self._joined(vectors, values, 0), good
        inverses, good = first_inverse(matrices, self._damping(items, matrices, damping), own=True)
        return packed_times(inverses, 1.0, 0.0), good

    def _damping(self, items: Sequence[int], matrices: Tensor, damping: float) -> float | Tensor:
        """Return the damping of factors; one for each, ``[n, 1]``, if it depends on them: sqrt(damping) pi, or / pi."""
        if self.plan.method != "inverse_pi":
            return damping
        others = torch.stack([mean_diagonal(unpack_upper(self._factor(item ^ 1))) for item in items])
        shares: Tensor = damping**0.5 * pi_ratio(mean_diagonal(matrices), others)
        return shares[:, None]

    @staticmethod
    def _joined(vectors: Tensor, values: Tensor, level: int) -> Tensor:
        end = values.new_full((*values.shape[:-1], 1), float(level))
        return torch.cat([vectors.flatten(-2), values, end], -1)

    def _row(self, item: int, damping: float, least: int) -> Tensor:
        matrix = unpack_upper(self._factor(item))
        if not self._updates(item) > 0:
            least = FAILED
        if self.plan.method == "eigen":
            return self._joined(*damped_eigen(matrix, least))
        inverse, level = damped_inverse(matrix, float(self._damping([item], matrix[None], damping)), least)
        return packed_times(inverse, 1.0, float(level))

    def _agree(self, items: Sequence[int], rows: dict[int, Tensor], damping: float, run: Run) -> bool:
        """Bring inverses that every rank computes to one level. False: ranks round differently: plan them anew."""
        device = rows[items[0]].device
        while True:
            levels = [int(level) for level in torch.stack([rows[item][-1] for item in items]).tolist()]
            mine = upload(torch.tensor([*levels, *self._digest(items, rows)], dtype=torch.int64), device)
            everyone = run(gather(mine)).cpu()
            highest: list[int] = everyone[:, : len(items)].max(0).values.tolist()
            if (everyone[:, : len(items)] == everyone[0, : len(items)]).all():
                break
            for item, level, wanted in zip(items, levels, highest):
                if level < wanted:
                    rows[item] = self._row(item, damping, wanted)
        self._compared = True
        if (everyone == everyone[0]).all():
            return True
        dims = [float(self.plan.dim(item)) ** 3 for item in range(len(self.plan.owners))]
        self.plan = replace(self.plan, owners=place(dims, self.plan.world_size).owner)
        if self._rank == 0:
            logger.warning(
                "thinwire: the ranks' devices invert the same factors to different bits; from now on each factor is "
                "inverted by one rank and sent"
            )
        return False

    def _digest(self, items: Sequence[int], rows: dict[int, Tensor]) -> list[int]:
        """Return a hash of the bits of these inverses at the first update; later a constant."""
        if self._compared:
            return [0]
        digest = hashlib.blake2b(digest_size=7)
        for item in items:
            digest.update(rows[item].cpu().numpy().tobytes())
        return [int.from_bytes(digest.digest(), "big")]

    def _take(self, rows: dict[int, Tensor]) -> None:
        items = sorted(rows)
        if not items:
            return
        levels = dict(zip(items, torch.stack([rows[item][-1].to(torch.float32) for item in items]).tolist()))
        for same in self._alike(items):  # the old ones go one batch at a time
            together, d = stacked([rows.pop(item) for item in same])[:, :-1], self.plan.dim(same[0])
            if self.plan.method == "eigen":
                inverses = torch.cat([together[:, : d * d].unflatten(1, (d, d)), together[:, d * d :, None]], 2)
            else:
                inverses = unpack_upper(together, d)
            for item, inverse in zip(same, inverses):
                name = self.plan.factor(item)
                self.levels[name] = int(levels[item])
                if levels[item] >= FAILED:
                    self._warn(name, item)
                else:
                    self.of[name] = inverse

    def _warn(self, name: str, item: int) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        why = "it cannot be inverted, whatever the damping"
        if (UPDATES, name) in self._state.fields and not self._updates(item) > 0:
            why = "there is no statistic for it: its module was not called in training, or a value was not finite"
        kept = "keeps its old inverse" if name in self.of else "is left to the optimizer"
        logger.warning("thinwire: factor %s: %s; the layer %s", name, why, kept)

    def ready(self, layer: int) -> bool:
        return all(self.plan.factor(2 * layer + side) in self.of for side in (0, 1))

    def apply(self, layer: int, gradient: Tensor, damping: float) -> Tensor:
        """Return the preconditioned gradient ``[d_G, d_A]`` of a layer; the plain gradient if an inverse is missing."""
        if not self.ready(layer):
            return gradient
        a, g = (self.of[self.plan.factor(2 * layer + side)] for side in (0, 1))
        if self.plan.method == "eigen":
            return precondition_eigen(gradient, (a[:, :-1], a[:, -1]), (g[:, :-1], g[:, -1]), damping)
        return precondition(gradient, a, g)


def preconditioned(
    gradients: Mapping[int, Tensor], inverses: Inverses, state: State, channel: Channel, damping: float
) -> tuple[dict[int, Tensor], float]:
    """Return V of each layer, on every rank, and the seconds spent waiting for other ranks."""
    plan = inverses.plan
    found: dict[int, Tensor] = {}
    sent = [(FromOwner(group, CROSS), [i for i in layers if i in gradients]) for group, layers in plan.returns()]
    sent = [(program, layers) for program, layers in sent if layers]
    if not sent:
        return {i: inverses.apply(i, gradient, damping) for i, gradient in gradients.items()}, 0.0

    def slot(i: int) -> Slot:
        g = gradients[i]
        return Slot(plan.layers[i].name, g.shape, found.get(i), g.dtype, g.device)

    def apply(index: int) -> None:
        program, layers = sent[index]
        if program.owner == state.rank // plan.workers:
            found.update({i: inverses.apply(i, gradients[i], damping) for i in layers})

    everyones, waited = exchanged(channel, state, sent, slot, apply)
    return dict(sorted(everyones.items())), waited  # so that all ranks sum over it in the same order


def clip_factor(
    found: Mapping[int, Tensor], gradients: Mapping[int, Tensor], rates: Sequence[Tensor | float], kl_clip: float
) -> Tensor:
    """Return ``min(1, sqrt(kl_clip / |sum lr^2 <V, gradient>|))``, 0-dim, 1 if the sum is zero, without a device sync.

    Source: Ba, Grosse and Martens 2017, in the form of the authors' code.
    """
    products = torch._foreach_mul([found[i] for i in found], [gradients[i] for i in found])
    sums = list(torch.stack([product.sum() for product in products]).double())
    squares = [rates[i] ** 2 for i in found]
    if any(isinstance(square, Tensor) for square in squares):
        terms = [x * square for x, square in zip(sums, squares)]
    else:
        terms = list(torch._foreach_mul(sums, [float(square) for square in squares]))
    size = torch.stack(terms).sum().abs()
    return (kl_clip / size).sqrt().clamp(max=1.0)
