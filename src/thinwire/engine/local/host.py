"""Host memory beside a GPU, for what a rank with local steps keeps between rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.core.program import Program
from thinwire.engine.executors.streams import read_here


class HostMemory:
    """Pinned memory, to and from which tensors move on a stream of its own. Without ``away``, or a GPU, they stay.

    The same tensors have the same place each time: pinning memory takes long, and the host waits for it.
    """

    def __init__(self, device: torch.device, *, away: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if away and device.type == "cuda" else None
        self.away = self._stream is not None
        self._places: dict[Any, list[Tensor]] = {}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Issue what is inside on that stream, after all that the current one has to do by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def before(self, program: Program) -> Program:
        """Run a program, on whatever stream, after what has been issued beside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        yield from program

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return these on the GPU; the current stream waits until they are there, the host does not."""
        if self._stream is None:
            return list(tensors)
        with self.beside():
            found = [x.to(self._device, non_blocking=True) for x in tensors]
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found

    def put_away(self, key: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the places in host memory, those of ``key``, to which these move; see ``settle``."""
        if self._stream is None:
            return list(tensors)
        places = self._places.get(key, [])
        if [(x.shape, x.dtype) for x in places] != [(x.shape, x.dtype) for x in tensors]:
            places = self._places[key] = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        with self.beside():
            for place, x in zip(places, tensors):
                if place is not x:
                    place.copy_(x, non_blocking=True)
                    read_here(x)
        return list(places)

    def settle(self) -> None:
        """Wait until nothing moves: before the host reads what was put away, or writes there."""
        if self._stream is not None:
            self._stream.synchronize()
