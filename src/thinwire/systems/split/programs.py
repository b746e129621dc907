"""The two programs of a step with the front at the edge, each in a straight line: compute, send, receive, compute.

A program is a generator that yields ``Send`` and ``Receive``. The link runs it over a socket, `LocalPair` runs both in
one process; so tests run what runs between machines. ``swapped`` holds the programs for the front in the cloud.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import seed_of
from thinwire.systems.split.batch import Batch
from thinwire.systems.split.codecs import Chain, Visit
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Message
from thinwire.systems.split.halves import Back, Front
from thinwire.systems.split.models import View
from thinwire.systems.split.plan import SplitPlan
from thinwire.systems.split.recipe import Recipe


@dataclass(frozen=True)
class Send:
    """Send tensors to the other end, with the kinds of their frames; the first kind is the message's."""

    parts: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True)
class Receive:
    """Wait for a message of this kind."""

    kind: str


MOST_BYTES = 1 << 30  # of an activation: a few bytes could ask for any amount
FRONT_RNG, BACK_RNG = "edge", "cloud"
"""Random streams for dropout: a half draws the same numbers at either end."""
Program = Generator[Send | Receive, Message, Any]


@dataclass(frozen=True)
class StepContext:
    """What a program of either end needs.

    Attributes:
        plan: what crosses the cut, and who has the labels.
        recipe: the loss and the seed.
        up: codecs for what goes up, with this end's state.
        down: codecs for what comes down.
        optimizer: of this end's half.
    """

    plan: SplitPlan
    recipe: Recipe
    up: Chain
    down: Chain
    optimizer: torch.optim.Optimizer


def edge_step(front: Front, batch: Batch, context: StepContext, step: int) -> Program:
    """Run one training step at the edge. Return the loss, a 0-dim tensor."""
    visit = batch.visit(training=True)
    with dropout_of(context.recipe, FRONT_RNG, step):
        z = front(batch.inputs, batch.lengths)
    parts = [*under("z", context.up.encode(z, visit)), *facts_of(batch, slots=context.up.needs_slots)]
    if context.plan.labels == "cloud":
        wide = batch.labels.is_floating_point()
        parts.append(("labels", batch.labels.to(torch.float32 if wide else torch.int32)))
        yield Send(tuple(parts))
        reply = yield Receive("dz")
        loss = reply.one("loss")
    else:
        yield Send(tuple(parts))
        reply = yield Receive("logits")
        logits = reply.one("logits").to(z.device).requires_grad_()
        loss = checked_loss(context.recipe, logits, batch.labels)
        loss.backward()
        yield Send((("dlogits", logits.grad),))  # type: ignore[arg-type]
        reply = yield Receive("dz")
    received = [part.to(z.device) for part in reply.tensors("dz")]
    dz = context.down.decode(received, visit, z.shape[-1], z.dtype, length=z.shape[1])
    z.backward(fitted(dz, z, visit, step))
    context.optimizer.step()
    context.optimizer.zero_grad()
    return loss.detach().cpu()


def cloud_step(back: Back, context: StepContext, step: int, dtype: torch.dtype, device: torch.device) -> Program:
    """Run the same step in the cloud. Its optimizer steps before dz is sent."""
    message = yield Receive("z")
    z, visit, lengths = _arrived(message, back, context, dtype, device, training=True)
    z.requires_grad_()
    with dropout_of(context.recipe, BACK_RNG, step):
        logits = back(z, lengths)
    parts: list[tuple[str, Tensor]] = []
    if context.plan.labels == "cloud":
        loss = checked_loss(context.recipe, logits, message.one("labels").to(device))
        loss.backward()
        parts.append(("loss", loss.detach()))
    else:
        yield Send((("logits", logits.detach()),))
        reply = yield Receive("dlogits")
        logits.backward(reply.one("dlogits", dtype, tuple(logits.shape)).to(device))
    context.optimizer.step()
    context.optimizer.zero_grad()
    assert z.grad is not None
    yield Send((*under("dz", context.down.encode(z.grad, visit)), *parts))


def edge_evaluate(front: Front, batch: Batch, context: StepContext) -> Program:
    """Return the logits of a batch, without dropout; nothing is updated."""
    with torch.no_grad():
        z = front(batch.inputs, batch.lengths)
    yield Send((*under("z", context.up.encode(z, batch.visit(training=False))), *facts_of(batch)))
    reply = yield Receive("logits")
    return reply.one("logits")


def cloud_evaluate(back: Back, context: StepContext, dtype: torch.dtype, device: torch.device) -> Program:
    """Run the same evaluation in the cloud."""
    message = yield Receive("z")
    z, _, lengths = _arrived(message, back, context, dtype, device, training=False)
    with torch.no_grad():
        logits = back(z, lengths)
    yield Send((("logits", logits),))


@contextmanager
def dropout_of(recipe: Recipe, role: str, step: int) -> Generator[None]:
    """Seed dropout for this role and step, so that resumed runs and one-process runs draw the same numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(recipe.seed, role, step))
        yield


def under(kind: str, parts: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Return the parts of a codec as frames of a kind."""
    return [(kind, part) for part in parts]


def facts_of(batch: Batch, slots: bool = False) -> list[tuple[str, Tensor]]:
    """Return what the cloud needs to mask and decode a batch: real lengths and, for delta, the samples' indices."""
    facts = [] if batch.lengths is None else [("lengths", batch.lengths.to(torch.uint16))]
    return [*facts, ("slots", batch.slots.to(torch.uint32))] if slots else facts


def received_facts(message: Message, view: View, *, slots: bool, training: bool) -> tuple[Visit, Tensor | None]:
    """Return what ``facts_of`` sent: for the codecs, and the real lengths ``[B]`` for the mask.

    Raises:
        SessionError: they are missing or invalid.
    """
    found = message.tensors("lengths")
    lengths = message.one("lengths", torch.uint16).long() if found else None
    if view.uses_lengths == (lengths is None) or (lengths is not None and lengths.dim() != 1):
        raise SessionError(f"step {message.step}: a batch came without the lengths of its samples, or with wrong ones")
    numbers = message.one("slots", torch.uint32).tolist() if slots else None
    visit = Visit(None if lengths is None else lengths.tolist(), numbers, training)
    if visit.lengths is not None and min(visit.lengths, default=0) < 1:
        raise SessionError(f"step {message.step}: a sample without a token, or none at all")
    return visit, lengths


def fitted(dz: Tensor, z: Tensor, visit: Visit, step: int) -> Tensor:
    """Return the gradient in the activation's shape, with zeros at padding beyond the longest sample.

    Raises:
        SessionError: it has another shape.
    """
    if visit.lengths is not None and dz.shape[1] == max(visit.lengths):
        dz = torch.nn.functional.pad(dz, (0, 0, 0, z.shape[1] - dz.shape[1]))
    if dz.shape != z.shape:
        raise SessionError(f"step {step}: the gradient has the shape {list(dz.shape)}, the activation {list(z.shape)}")
    return dz


def check_size(message: Message, samples: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    """Raise `SessionError` if an activation ``[samples, tokens, width]`` would be larger than ``MOST_BYTES``."""
    if samples * tokens * width * dtype.itemsize > MOST_BYTES:
        raise SessionError(f"step {message.step}: {samples} samples of up to {tokens} tokens are too many")


def checked_loss(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the recipe's loss.

    Raises:
        SessionError: the model's outputs and the labels do not match.
    """
    try:
        return recipe.loss_function(logits, labels)
    except (IndexError, RuntimeError, ValueError) as error:
        raise SessionError(
            f"the loss does not accept logits {list(logits.shape)} with labels {list(labels.shape)}: {error}"
        ) from error


def _arrived(
    message: Message, back: Back, context: StepContext, dtype: torch.dtype, device: torch.device, *, training: bool
) -> tuple[Tensor, Visit, Tensor | None]:
    """Return the activation, decoded and checked, and the real lengths."""
    visit, lengths = received_facts(message, back.view, slots=training and context.up.needs_slots, training=training)
    if visit.lengths is not None:
        check_size(message, len(visit.lengths), max(visit.lengths), back.width, dtype)
    parts = [part.to(device) for part in message.tensors("z")]
    z = context.up.decode(parts, visit, back.width, dtype)
    if not z.numel():
        raise SessionError(f"step {message.step}: a batch without samples")
    return z, visit, lengths
