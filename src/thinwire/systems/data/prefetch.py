"""``Prefetched``: a thread takes batches from a loader while the training step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_POLL = 0.1  # seconds after which a thread with a full queue checks for a reader


class Prefetched(Iterable[Any]):
    """A loader whose batches are fetched before they are requested.

    Worker processes read ahead, but handing over a batch (one message, and one mapping of shared memory per tensor) is
    otherwise done by the training loop, between two steps: 0.4 to 1.2 ms per batch. torch does the same, but only for
    pinned memory. The order of the batches is the loader's.

    Each iteration has its own thread, which ends with it, even if the loop is left early. An exception in the loader is
    raised where its batch would have been returned.

    Args:
        loader: any iterable of batches that may be iterated from another thread, such as a DataLoader.
        batches: number of batches fetched in advance.

    Raises:
        ValueError: ``batches`` is below 1, or the loader has a ``state_dict``, which would count batches that have not
            been used yet.
    """

    def __init__(self, loader: Iterable[Any], batches: int = 1) -> None:
        if batches < 1:
            raise ValueError(f"batches={batches}: at least one batch must be fetched in advance")
        if hasattr(loader, "state_dict"):
            raise ValueError(
                f"the state of a {type(loader).__name__} would be {batches} or more batches ahead of training: "
                "iterate it directly"
            )
        self.loader, self.batches = loader, batches

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.loader)  # here, since this forks the workers
        ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(self.batches)
        left = threading.Event()
        thread = threading.Thread(target=_fetch, args=(source, ready, left), name="thinwire-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                batch, error = ready.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield batch
        finally:
            left.set()
            thread.join()


def _fetch(source: Iterator[Any], ready: queue.Queue[tuple[Any, BaseException | None]], left: threading.Event) -> None:
    error: BaseException | None = None
    while error is None and not left.is_set():
        batch = None
        try:
            batch = next(source)
        except BaseException as caught:  # StopIteration too
            error = caught
        while not left.is_set():
            try:
                ready.put((batch, error), timeout=_POLL)
                break
            except queue.Full:
                continue
