"""Which handle belongs to which model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from thinwire.engine.local_sync import LocalSync
    from thinwire.engine.sync import GradientSync

_attached: weakref.WeakValueDictionary[int, GradientSync | LocalSync] = weakref.WeakValueDictionary()


def attached_to(model: nn.Module) -> GradientSync | LocalSync | None:
    """What ``attach`` has returned for a model, until it is closed, or None. A copy of the model has none."""
    return _attached.get(id(model))


def remember(model: nn.Module, handle: GradientSync | LocalSync) -> None:
    """From now on the model is attached."""
    _attached[id(model)] = handle


def forget(model: nn.Module, handle: GradientSync | LocalSync) -> None:
    """It is not any more, unless to another handle."""
    if attached_to(model) is handle:
        del _attached[id(model)]
