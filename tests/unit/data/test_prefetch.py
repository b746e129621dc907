"""Batches taken in advance are the loader's, in its order; a loop that is left leaves no thread."""

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from thinwire.systems.data import Prefetched


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "thinwire-prefetch"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_and_their_order_are_the_loaders(workers: int) -> None:
    data = TensorDataset(torch.arange(50.0).view(25, 2))
    loader = DataLoader(data, 4, num_workers=workers, multiprocessing_context="fork" if workers else None)
    ahead = Prefetched(loader, batches=3)
    assert len(ahead) == len(loader) == 7
    for _ in range(2):  # twice: an iteration is an epoch
        for (mine,), (theirs,) in zip(ahead, loader, strict=True):
            assert torch.equal(mine, theirs)
    assert not threads()


def test_no_more_is_taken_than_was_asked_for() -> None:
    taken = []

    def source():
        for i in range(10):
            taken.append(i)
            yield i

    class Loader:
        def __iter__(self):
            return source()

    stream = iter(Prefetched(Loader(), batches=2))
    assert next(stream) == 0
    assert len(taken) <= 1 + 2 + 1  # seen, waiting in the queue, in the thread's hand
    stream.close()
    assert not threads()


def test_an_error_comes_where_its_batch_would_have_come() -> None:
    class Broken:
        def __iter__(self):
            yield 1
            raise KeyError("sample 7")

    stream = iter(Prefetched(Broken()))
    assert next(stream) == 1
    with pytest.raises(KeyError, match="sample 7"):
        next(stream)
    assert not threads()


def test_what_cannot_be_right_is_refused() -> None:
    class Stateful(list):
        def state_dict(self):
            return {}

    with pytest.raises(ValueError, match="ahead of training"):
        Prefetched(Stateful())
    with pytest.raises(ValueError, match="at least one"):
        Prefetched([], batches=0)
