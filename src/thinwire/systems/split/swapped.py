"""The programs of swapped roles: the front in the cloud, the back and the labels at the edge.

These are the roles in the published program, kept for comparison. The edge still sends the requests, but its inputs go
up every step, the activation comes down, its gradient goes up, and the cloud confirms its step. The arithmetic is that
of ``programs``: with the same halves, seeds and codecs both train the same, bit for bit.

Source: SFT (arXiv 2211.16703) and the public copy of its program.

Differences from the published code: int32 ids, uint8 types and uint16 lengths are sent, not three int64 tensors of
ids, types and mask; the gradient is acknowledged, so that a lost connection leaves no half-applied step; dropout is on
at both ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.systems.split.batch import Batch
from thinwire.systems.split.codecs import Visit
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Message
from thinwire.systems.split.halves import Back, Front
from thinwire.systems.split.inputs import input_parts, opening, received_inputs
from thinwire.systems.split.programs import (
    BACK_RNG,
    FRONT_RNG,
    Program,
    Receive,
    Send,
    StepContext,
    checked_loss,
    dropout_of,
    facts_of,
    fitted,
    received_facts,
    under,
)


def edge_back_step(back: Back, batch: Batch, context: StepContext, step: int) -> Program:
    """Run one training step at an edge that has the back. Return the loss, a 0-dim tensor."""
    visit = batch.visit(training=True)
    yield Send((*input_parts(batch, back.view), *facts_of(batch, slots=context.down.needs_slots)))
    z = _came_down((yield Receive("z")), back, batch, visit, context).requires_grad_()
    with dropout_of(context.recipe, BACK_RNG, step):
        logits = back(z, batch.lengths)
    loss = checked_loss(context.recipe, logits, batch.labels)
    loss.backward()
    assert z.grad is not None
    yield Send(tuple(under("dz", context.up.encode(z.grad, visit))))
    yield Receive("done")
    context.optimizer.step()  # after the cloud's: if the cloud is lost, these parameters stay as before the step
    context.optimizer.zero_grad()
    return loss.detach().cpu()


def cloud_front_step(front: Front, context: StepContext, step: int, device: torch.device) -> Program:
    """Run the same step in the cloud. Its optimizer steps before it sends "done"."""
    message = yield Receive(opening(front.view))
    inputs = received_inputs(message, front, device)
    visit, lengths = received_facts(message, front.view, slots=context.down.needs_slots, training=True)
    _check_lengths(message, inputs, visit)
    with dropout_of(context.recipe, FRONT_RNG, step):
        z = front(inputs, lengths)
    yield Send(tuple(under("z", context.down.encode(z, visit))))
    reply = yield Receive("dz")
    received = [part.to(device) for part in reply.tensors("dz")]
    dz = context.up.decode(received, visit, z.shape[-1], z.dtype, length=z.shape[1])
    z.backward(fitted(dz, z, visit, step))
    context.optimizer.step()
    context.optimizer.zero_grad()
    yield Send((("done", torch.empty(0)),))


def edge_back_evaluate(back: Back, batch: Batch, context: StepContext) -> Program:
    """Return the logits of a batch, without dropout; nothing is updated."""
    yield Send((*input_parts(batch, back.view), *facts_of(batch)))
    z = _came_down((yield Receive("z")), back, batch, batch.visit(training=False), context)
    with torch.no_grad():
        logits: Tensor = back(z, batch.lengths)
    return logits.cpu()


def cloud_front_evaluate(front: Front, context: StepContext, device: torch.device) -> Program:
    """Run the same evaluation in the cloud."""
    message = yield Receive(opening(front.view))
    inputs = received_inputs(message, front, device)
    visit, lengths = received_facts(message, front.view, slots=False, training=False)
    _check_lengths(message, inputs, visit)
    with torch.no_grad():
        z = front(inputs, lengths)
    yield Send(tuple(under("z", context.down.encode(z, visit))))


def _came_down(reply: Message, back: Back, batch: Batch, visit: Visit, context: StepContext) -> Tensor:
    """Return the activation ``[B, L, width]``, decoded and checked. For pictures the cloud determines the tokens L."""
    first = next(back.parameters())
    samples, length = batch.inputs[back.view.inputs[0]].shape[:2]
    known = length if back.view.uses_lengths else 0
    parts = [part.to(first.device) for part in reply.tensors("z")]
    z = context.down.decode(parts, visit, back.width, first.dtype, length=known)
    if z.shape[0] != samples or (known and z.shape[1] != known) or not z.numel():
        raise SessionError(f"step {reply.step}: the activation of {samples} samples has the shape {list(z.shape)}")
    return z


def _check_lengths(message: Message, inputs: dict[str, Tensor], visit: Visit) -> None:
    samples, length = next(iter(inputs.values())).shape[:2]
    if visit.lengths is not None and (len(visit.lengths) != samples or max(visit.lengths) > length):
        raise SessionError(f"step {message.step}: got {samples} x {length} tokens, which do not fit their lengths")
