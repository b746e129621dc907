"""Registry of the handle that belongs to each attached model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from thinwire.engine.local_sync import LocalSync
    from thinwire.engine.sync import GradientSync

_attached: weakref.WeakValueDictionary[int, GradientSync | LocalSync] = weakref.WeakValueDictionary()


def attached_to(model: nn.Module) -> GradientSync | LocalSync | None:
    """Return the model's open ``attach`` handle, or None. A copy of the model has none."""
    return _attached.get(id(model))


def handles() -> list[GradientSync | LocalSync]:
    """Return all open handles of the process."""
    return list(_attached.values())


def remember(model: nn.Module, handle: GradientSync | LocalSync) -> None:
    """Record that the model is attached."""
    _attached[id(model)] = handle


def forget(model: nn.Module, handle: GradientSync | LocalSync) -> None:
    """Forget the model's handle, unless the model has another handle by now."""
    if attached_to(model) is handle:
        del _attached[id(model)]
