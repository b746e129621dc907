"""Compute as written, whatever modes the user's thread is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_nothing = nullcontext()
_DEVICES = ("cpu", "cuda")


def own_modes() -> AbstractContextManager[Any]:
    """Return a context without autocast (which would make products in 16 bits), without inference mode (whose tensors
    no later step may change), and outside the transforms of torch.func and export (whose tensors have no memory). Grad
    mode stays, except that it is on where inference mode was.
    """
    casts = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    traced = fake or torch._C._functorch.peek_interpreter_stack() is not None
    if not casts and not torch.is_inference_mode_enabled() and not traced:
        return _nothing
    stack = ExitStack()
    if traced:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes() if fake else _nothing)
    stack.enter_context(torch.inference_mode(False))
    for device in casts:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
