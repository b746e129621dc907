"""What belongs to a training besides model and optimizer, and is saved, loaded and ended with the GradientSync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """Something with a state of its own, in plain values and tensors, that belongs to the training."""

    def state_dict(self) -> dict[str, Any]:
        """Its state on this rank; what differs between ranks is under keys that no other rank has."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over; on another number of ranks, the union of all ranks' keys."""

    def close(self) -> None:
        """The GradientSync is being closed."""
