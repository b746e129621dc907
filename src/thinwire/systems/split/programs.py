"""The programs of a step at the two ends, each in a straight line: compute, send, receive, compute.

A program is a generator that yields ``Send`` and ``Receive``. The link runs it over a socket, `LocalPair` runs both in
one process; so tests run what runs between machines.

The front may be at the edge, or in the cloud as in the published program (SFT, arXiv 2211.16703, and the public copy of
its program). With the front in the cloud the edge still sends the requests, but its inputs go up every step, the
activation comes down, its gradient goes up, and the cloud confirms its step. The arithmetic is the same: with the same
halves, seeds and codecs both train the same, bit for bit.

Differences from the published code: int32 ids, uint8 types and uint16 lengths are sent, not three int64 tensors of
ids, types and mask; the gradient is acknowledged, so that a lost connection leaves no half-applied step; dropout is on
at both ends.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import seed_of
from thinwire.systems.split.codecs import Chain, Visit
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Message
from thinwire.systems.split.models import View, inputs_of
from thinwire.systems.split.plan import Recipe, SplitPlan
from thinwire.systems.split.surgery import Back, Front
from thinwire.systems.split.tasks import Batch

_MOST_BYTES = 1 << 30  # of an activation: a few bytes could ask for any amount
_FRONT_RNG, _BACK_RNG = "edge", "cloud"  # a half draws the same dropout at either end


class Send(NamedTuple):
    parts: tuple[tuple[str, Tensor], ...]  # with the kinds of their frames; the first is the message's


class Receive(NamedTuple):
    kind: str


Program = Generator[Send | Receive, Message, Any]


@dataclass(frozen=True)
class StepContext:
    """What a program of either end needs besides its half: ``up`` and ``down`` are codecs with this end's state."""

    plan: SplitPlan
    recipe: Recipe
    up: Chain
    down: Chain
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, half: Front | Back, recipe: Recipe, optimizer: torch.optim.Optimizer) -> StepContext:
        plan, first = half.plan, next(half.parameters())
        return cls(plan, recipe, plan.chain("up"), plan.chain("down"), optimizer, first.device, first.dtype)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"up": self.up.values.state(), "down": self.down.values.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.up.values.load_state(state["up"])
        self.down.values.load_state(state["down"])


def edge_program(half: Front | Back, batch: Batch, context: StepContext, step: int | None) -> Program:
    """Return the edge's program of a training step, which ends in the loss; None: of an evaluation, in the logits."""
    if isinstance(half, Front):
        return _edge_front(half, batch, context, step)
    return _edge_back(half, batch, context, step)


def cloud_program(half: Front | Back, context: StepContext, step: int | None) -> Program:
    return _cloud_front(half, context, step) if isinstance(half, Front) else _cloud_back(half, context, step)


def opening(half: Front | Back) -> str:
    """Return the kind of the message that begins a step, for the half that the cloud has."""
    return "z" if isinstance(half, Back) else _FRAMES[half.view.inputs[0]].kind


def _edge_front(front: Front, batch: Batch, context: StepContext, step: int | None) -> Program:
    visit = batch.visit(step is not None)
    with _running(context, _FRONT_RNG, step):
        z = front(batch.inputs, batch.lengths)
    parts = [*_under("z", context.up.encode(z, visit)), *_facts_of(batch, context.up, step)]
    if step is not None and context.plan.labels == "cloud":
        wide = batch.labels.is_floating_point()
        yield Send((*parts, ("labels", batch.labels.to(torch.float32 if wide else torch.int32))))
        reply = yield Receive("dz")
        loss = reply.one("loss")
    else:
        yield Send(tuple(parts))
        reply = yield Receive("logits")
        logits = reply.one("logits")
        if step is None:
            return logits
        logits = logits.to(z.device).requires_grad_()
        loss = _checked_loss(context.recipe, logits, batch.labels)
        loss.backward()
        yield Send((("dlogits", logits.grad),))  # type: ignore[arg-type]
        reply = yield Receive("dz")
    _backward(z, reply, visit, context.down, step)
    context.update()
    return loss.detach().cpu()


def _cloud_back(back: Back, context: StepContext, step: int | None) -> Program:
    message = yield Receive("z")
    z, visit, lengths = _went_up(message, back, context, step)
    with _running(context, _BACK_RNG, step):
        logits = back(z.requires_grad_(step is not None), lengths)
    if step is None:
        yield Send((("logits", logits),))
        return
    parts: list[tuple[str, Tensor]] = []
    if context.plan.labels == "cloud":
        loss = _checked_loss(context.recipe, logits, message.one("labels").to(context.device))
        loss.backward()
        parts.append(("loss", loss.detach()))
    else:
        yield Send((("logits", logits.detach()),))
        reply = yield Receive("dlogits")
        logits.backward(reply.one("dlogits", context.dtype, tuple(logits.shape)).to(context.device))
    context.update()  # before dz is sent
    assert z.grad is not None
    yield Send((*_under("dz", context.down.encode(z.grad, visit)), *parts))


def _edge_back(back: Back, batch: Batch, context: StepContext, step: int | None) -> Program:
    visit = batch.visit(step is not None)
    yield Send((*_input_parts(batch, back.view), *_facts_of(batch, context.down, step)))
    z = _came_down((yield Receive("z")), back, batch, visit, context).requires_grad_(step is not None)
    with _running(context, _BACK_RNG, step):
        logits: Tensor = back(z, batch.lengths)
    if step is None:
        return logits.cpu()
    loss = _checked_loss(context.recipe, logits, batch.labels)
    loss.backward()
    assert z.grad is not None
    yield Send(tuple(_under("dz", context.up.encode(z.grad, visit))))
    yield Receive("done")
    context.update()  # after the cloud's: if the cloud is lost, these parameters stay as before the step
    return loss.detach().cpu()


def _cloud_front(front: Front, context: StepContext, step: int | None) -> Program:
    message = yield Receive(opening(front))
    inputs, visit, lengths = _inputs_went_up(message, front, context, step)
    with _running(context, _FRONT_RNG, step):
        z = front(inputs, lengths)
    yield Send(tuple(_under("z", context.down.encode(z, visit))))
    if step is None:
        return
    _backward(z, (yield Receive("dz")), visit, context.up, step)
    context.update()  # before "done" is sent
    yield Send((("done", torch.empty(0)),))


def _running(context: StepContext, role: str, step: int | None) -> AbstractContextManager[None]:
    return torch.no_grad() if step is None else dropout_of(context.recipe, role, step)


@contextmanager
def dropout_of(recipe: Recipe, role: str, step: int) -> Generator[None]:
    """Seed dropout for this role and step, so that resumed runs and one-process runs draw the same numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(recipe.seed, role, step))
        yield


def _under(kind: str, parts: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(kind, part) for part in parts]


def _checked_loss(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    try:
        return recipe.loss_function(logits, labels)
    except (IndexError, RuntimeError, ValueError) as error:
        raise SessionError(
            f"the loss does not accept logits {list(logits.shape)} with labels {list(labels.shape)}: {error}"
        ) from error


def _backward(z: Tensor, reply: Message, visit: Visit, codecs: Chain, step: int | None) -> None:
    """Run backward from the activation with the gradient that came; padding beyond the longest sample has none."""
    dz = codecs.decode([p.to(z.device) for p in reply.tensors("dz")], visit, z.shape[-1], z.dtype, length=z.shape[1])
    if visit.lengths is not None and dz.shape[1] == max(visit.lengths):
        dz = torch.nn.functional.pad(dz, (0, 0, 0, z.shape[1] - dz.shape[1]))
    if dz.shape != z.shape:
        raise SessionError(f"step {step}: the gradient has the shape {list(dz.shape)}, the activation {list(z.shape)}")
    z.backward(dz)


def _facts_of(batch: Batch, codecs: Chain, step: int | None) -> list[tuple[str, Tensor]]:
    """Return what the cloud needs to mask and decode a batch: real lengths and, for delta, the samples' indices."""
    facts = [] if batch.lengths is None else [("lengths", batch.lengths.to(torch.uint16))]
    return [*facts, ("slots", batch.slots.to(torch.uint32))] if codecs.needs_slots and step is not None else facts


def _received_facts(message: Message, view: View, codecs: Chain, step: int | None) -> tuple[Visit, Tensor | None]:
    """Return what ``_facts_of`` sent: for the codecs, and the real lengths ``[B]`` for the mask."""
    found = message.tensors("lengths")
    lengths = message.one("lengths", torch.uint16).long() if found else None
    if view.uses_lengths == (lengths is None) or (lengths is not None and lengths.dim() != 1):
        raise SessionError(f"step {message.step}: a batch came without the lengths of its samples, or with wrong ones")
    slots = message.one("slots", torch.uint32).tolist() if codecs.needs_slots and step is not None else None
    visit = Visit(None if lengths is None else lengths.tolist(), slots, step is not None)
    if visit.lengths is not None and min(visit.lengths, default=0) < 1:
        raise SessionError(f"step {message.step}: a sample without a token, or none at all")
    return visit, lengths


def _check_size(message: Message, samples: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    if samples * tokens * width * dtype.itemsize > _MOST_BYTES:
        raise SessionError(f"step {message.step}: {samples} samples of up to {tokens} tokens are too many")


def _went_up(
    message: Message, back: Back, context: StepContext, step: int | None
) -> tuple[Tensor, Visit, Tensor | None]:
    visit, lengths = _received_facts(message, back.view, context.up, step)
    if visit.lengths is not None:
        _check_size(message, len(visit.lengths), max(visit.lengths), back.width, context.dtype)
    parts = [part.to(context.device) for part in message.tensors("z")]
    z = context.up.decode(parts, visit, back.width, context.dtype)
    if not z.numel():
        raise SessionError(f"step {message.step}: a batch without samples")
    return z, visit, lengths


def _came_down(reply: Message, back: Back, batch: Batch, visit: Visit, context: StepContext) -> Tensor:
    """Return the activation ``[B, L, width]``, decoded and checked. For pictures the cloud determines the tokens L."""
    samples, length = batch.inputs[back.view.inputs[0]].shape[:2]
    known = length if back.view.uses_lengths else 0
    parts = [part.to(context.device) for part in reply.tensors("z")]
    z = context.down.decode(parts, visit, back.width, context.dtype, length=known)
    if z.shape[0] != samples or (known and z.shape[1] != known) or not z.numel():
        raise SessionError(f"step {reply.step}: the activation of {samples} samples has the shape {list(z.shape)}")
    return z


class _Frame(NamedTuple):
    kind: str
    dtype: torch.dtype | None  # as sent; None: that of the model
    below: str  # the configuration's name for its (exclusive) upper limit; "": none
    dims: int


_FRAMES = {
    "input_ids": _Frame("ids", torch.int32, "vocab_size", 2),
    "token_type_ids": _Frame("types", torch.uint8, "type_vocab_size", 2),
    "pixel_values": _Frame("pixels", None, "", 4),
}


def _input_parts(batch: Batch, view: View) -> list[tuple[str, Tensor]]:
    sent = inputs_of(batch.inputs, *view.inputs)
    return [(_FRAMES[name].kind, tensor.to(_FRAMES[name].dtype or tensor.dtype)) for name, tensor in sent.items()]


def _inputs_went_up(
    message: Message, front: Front, context: StepContext, step: int | None
) -> tuple[dict[str, Tensor], Visit, Tensor | None]:
    """Return what ``_input_parts`` and ``_facts_of`` sent: the inputs by name, ready for the front, and the lengths."""
    view = front.view
    found: dict[str, Tensor] = {}
    for name in view.inputs:
        frame = _FRAMES[name]
        if found and not message.tensors(frame.kind):
            continue  # only the first input is in every batch
        shape = tuple(found[view.inputs[0]].shape) if found else None
        tensor = message.one(frame.kind, frame.dtype or context.dtype, shape)
        if tensor.dim() != frame.dims or not tensor.numel():
            raise SessionError(f"step {message.step}: {frame.kind!r} cannot have the shape {list(tensor.shape)}")
        if frame.below:
            tensor, most = tensor.long(), int(getattr(view.config, frame.below))
            if int(tensor.min()) < 0 or int(tensor.max()) >= most:
                raise SessionError(
                    f"step {message.step}: {frame.kind!r} must be 0 to {most - 1} for this model, "
                    f"got {int(tensor.min())} to {int(tensor.max())}"
                )
            _check_size(message, len(tensor), tensor.shape[1], view.hidden, context.dtype)
        found[name] = tensor.to(context.device)
    visit, lengths = _received_facts(message, view, context.down, step)
    samples, length = found[view.inputs[0]].shape[:2]
    if visit.lengths is not None and (len(visit.lengths) != samples or max(visit.lengths) > length):
        raise SessionError(f"step {message.step}: got {samples} x {length} tokens, which do not fit their lengths")
    return found, visit, lengths
