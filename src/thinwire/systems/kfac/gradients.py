"""The gradients of a step: preconditioned on the ranks with their inverses, sent to the others, clipped, written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.program import CROSS, Bucket, Program, Slot, State
from thinwire.engine.session import Channel
from thinwire.systems.kfac.inversion import Inverses
from thinwire.systems.kfac.layers import Preconditioned
from thinwire.systems.kfac.programs import FromOwner


def preconditioned(
    gradients: Mapping[int, Tensor], inverses: Inverses, state: State, channel: Channel, damping: float
) -> tuple[dict[int, Tensor], float]:
    """Return V of each layer, on every rank, and the seconds spent waiting for other ranks.

    Args:
        gradients: by layer, ``[d_G, d_A]``; the same layers on all ranks.
        inverses: of the layers that this rank preconditions.
        state: knows which rank this is.
        channel: sends V to the other groups of ranks.
        damping: lambda.
    """
    plan = inverses.plan
    found: dict[int, Tensor] = {}
    sent = [(group, [i for i in layers if i in gradients]) for group, layers in plan.returns()]
    sent = [(group, layers) for group, layers in sent if layers]
    if not sent:
        return {i: inverses.apply(i, gradient, damping) for i, gradient in gradients.items()}, 0.0

    def make(index: int) -> Program:
        group, layers = sent[index]
        slots = [
            Slot(plan.layers[i].name, gradients[i].shape, found.get(i), gradients[i].dtype, gradients[i].device)
            for i in layers
        ]
        bucket = buckets[index] = Bucket(index, slots)
        return FromOwner(group, CROSS).reduce(bucket, state)

    buckets: dict[int, Bucket] = {}
    channel.begin([[plan.layers[i].name for i in layers] for _, layers in sent], make)
    for index, (group, layers) in enumerate(sent):
        if group == state.rank // plan.workers:
            found.update({i: inverses.apply(i, gradients[i], damping) for i in layers})
        channel.ready(index)
    waited = channel.wait()
    for index, (_, layers) in enumerate(sent):
        for i, slot in zip(layers, buckets[index].slots):
            assert slot.result is not None
            found[i] = slot.result
    return dict(sorted(found.items())), waited  # so that all ranks sum over it in the same order


def learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], layers: Sequence[Preconditioned]
) -> list[Tensor | float]:
    """Return the learning rate of each layer's weight; 0 if no optimizer has it."""
    rate = {id(p): group.get("lr", 0.0) for o in optimizers for group in o.param_groups for p in group["params"]}
    return [rate.get(id(layer.weight), 0.0) for layer in layers]


def clip_factor(
    found: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    rates: Sequence[Tensor | float],
    kl_clip: float | None,
) -> Tensor | None:
    """Return ``min(1, sqrt(kl_clip / |sum lr^2 <V, gradient>|))``, 0-dim, 1 if the sum is zero, without a device sync.

    Source: Ba, Grosse and Martens 2017, in the form of the authors' code. None: no clipping, or nothing to clip.
    """
    if kl_clip is None or not found:
        return None
    terms = [(found[i] * gradients[i]).sum().double() * rates[i] ** 2 for i in found]
    size = torch.stack([torch.as_tensor(term, dtype=torch.float64) for term in terms]).sum().abs()
    return (kl_clip / size).sqrt().clamp(max=1.0)


def write(layers: Sequence[Preconditioned], found: Mapping[int, Tensor], clip: Tensor | None) -> None:
    """Write V, times the clip factor, into ``.grad``."""
    for i, v in found.items():
        layers[i].write(v if clip is None else v * clip.to(v.dtype))
