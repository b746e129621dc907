"""Protocol for objects that are saved, loaded and closed with the GradientSync, besides model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """Something with state of its own, in plain values and tensors, that belongs to the training."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state on this rank. Values that differ between ranks have keys that no other rank uses."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; on another number of ranks, the union of all ranks' keys."""

    def close(self) -> None:
        """Close it: the GradientSync is being closed."""
