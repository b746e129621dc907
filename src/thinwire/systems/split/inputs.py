"""A front's inputs as frames, and back: for plans whose front is in the cloud, so that the edge's inputs are sent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.systems.split.batch import Batch
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Message
from thinwire.systems.split.halves import Front
from thinwire.systems.split.models import View
from thinwire.systems.split.models.base import inputs_of
from thinwire.systems.split.programs import check_size


class _Frame(NamedTuple):
    kind: str
    dtype: torch.dtype | None  # as sent; None: that of the model
    below: str  # the configuration's name for its (exclusive) upper limit; "": none
    dims: int


FRAMES = {
    "input_ids": _Frame("ids", torch.int32, "vocab_size", 2),
    "token_type_ids": _Frame("types", torch.uint8, "type_vocab_size", 2),
    "pixel_values": _Frame("pixels", None, "", 4),
}
"""How each input of an embedding is sent."""


def opening(view: View) -> str:
    """Return the kind of the message that begins a step."""
    return FRAMES[view.inputs[0]].kind


def input_parts(batch: Batch, view: View) -> list[tuple[str, Tensor]]:
    """Return the frames of those of a batch's inputs that the model takes. Padding is sent too."""
    sent = inputs_of(batch.inputs, *view.inputs)
    return [(FRAMES[name].kind, tensor.to(FRAMES[name].dtype or tensor.dtype)) for name, tensor in sent.items()]


def received_inputs(message: Message, front: Front, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of a message by name, ready for the front.

    Raises:
        SessionError: they are missing, have another dtype or shape, or are outside the model's vocabulary.
    """
    view, numbers = front.view, next(front.parameters()).dtype
    found: dict[str, Tensor] = {}
    for name in view.inputs:
        frame = FRAMES[name]
        if found and not message.tensors(frame.kind):
            continue  # only the first input is in every batch
        shape = tuple(found[view.inputs[0]].shape) if found else None
        tensor = message.one(frame.kind, frame.dtype or numbers, shape)
        if tensor.dim() != frame.dims or not tensor.numel():
            raise SessionError(f"step {message.step}: {frame.kind!r} cannot have the shape {list(tensor.shape)}")
        if frame.below:
            tensor, most = tensor.long(), int(getattr(view.config, frame.below))
            if int(tensor.min()) < 0 or int(tensor.max()) >= most:
                raise SessionError(
                    f"step {message.step}: {frame.kind!r} must be 0 to {most - 1} for this model, "
                    f"got {int(tensor.min())} to {int(tensor.max())}"
                )
            check_size(message, len(tensor), tensor.shape[1], view.hidden, numbers)
        found[name] = tensor.to(device)
    return found
