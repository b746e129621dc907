"""Compute as written, whatever modes the user's thread is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

_nothing = nullcontext()
_DEVICES = ("cpu", "cuda")


def own_modes() -> AbstractContextManager[Any]:
    """Return a context without autocast (which would make products in 16 bits) and without inference mode (whose
    tensors no later step may change). Grad mode stays, except that it is on where inference mode was.
    """
    casts = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not casts and not torch.is_inference_mode_enabled():
        return _nothing
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    for device in casts:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
