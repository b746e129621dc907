"""The interface of a value codec: rows of numbers to a few tensors, and back. One row is one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class Codec:
    """Encodes rows ``[n, w]`` as parts whose first dimension is n. The base class sends them unchanged.

    Attributes:
        name: the word for it in a plan.
    """

    name: ClassVar[str] = "none"

    def encode(self, rows: Tensor) -> list[Tensor]:
        """Return the parts to send."""
        return [rows.contiguous()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Return the rows ``[n, width]`` of ``dtype``.

        Raises:
            ValueError: the parts do not belong to such rows.
        """
        check_parts(self.name, parts, [(dtype, (width,))])
        return parts[0]

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """Return the bytes of one row; ``itemsize`` is that of the model's numbers."""
        return itemsize * width

    def state(self) -> dict[str, Any]:
        """Return what is kept from message to message; it is saved in checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state."""


def check_parts(name: str, parts: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ``ValueError`` unless the parts have these dtypes and trailing dimensions, and equal first dimensions."""
    found = [(part.dtype, tuple(part.shape[1:])) for part in parts]
    if found != list(wanted) or len({len(part) for part in parts}) != 1:
        come, due = ([(str(d), s) for d, s in these] for these in (found, wanted))
        raise ValueError(f"the other end sent {come}, codec {name!r} expects {due}")
