"""What a value codec is: rows of numbers as a few tensors, and back. One row is one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class Codec:
    """Rows ``[n, w]`` as parts whose first dimension is n. The base class sends them as they are.

    Attributes:
        name: the word that stands for it in a plan.
    """

    name: ClassVar[str] = "none"

    def encode(self, rows: Tensor) -> list[Tensor]:
        """The parts that are sent."""
        return [rows.contiguous()]

    def decode(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """Rows ``[n, width]`` of ``dtype``.

        Raises:
            ValueError: the parts are not those of such rows.
        """
        check_parts(self.name, parts, [(dtype, (width,))])
        return parts[0]

    def bytes_per_row(self, width: int, itemsize: int) -> int:
        """What one row costs; ``itemsize`` is that of the model's numbers."""
        return itemsize * width

    def state(self) -> dict[str, Any]:
        """What is kept from message to message; goes into checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a state over."""


def check_parts(name: str, parts: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ``ValueError`` unless the parts have these dtypes and trailing dimensions, and one first dimension."""
    found = [(part.dtype, tuple(part.shape[1:])) for part in parts]
    if found != list(wanted) or len({len(part) for part in parts}) != 1:
        come, due = ([(str(d), s) for d, s in these] for these in (found, wanted))
        raise ValueError(f"the other end sent {come} where codec {name!r} has {due}")
