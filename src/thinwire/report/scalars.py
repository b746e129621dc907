"""Figures of a training run as TensorBoard scalars, through torch's own writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


class Scalars:
    """A TensorBoard folder.

    Args:
        folder: folder of the event file; several runs in one folder are shown as one.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = _writer(folder)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step, by the names under which they are shown."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close."""
        self._writer.close()


def _writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("writing scalars needs tensorboard: pip install 'thinwire[tensorboard]'") from error
    return SummaryWriter(os.fspath(folder))
