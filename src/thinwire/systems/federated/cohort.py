"""Who takes part in a round, and all seeds: functions of (run, round, purpose, client), never of the devices."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from thinwire.core.kernels.seeding import seed_of


def sample(run: int, round: int, population: int, clients_per_round: int) -> list[int]:
    """Return ``clients_per_round`` of ``population`` clients, uniform without replacement, ascending.

    Runs with different seeds draw different cohorts in the same round.
    """
    chosen = random.Random(client_seed(run, round, "cohort", 0)).sample(range(population), clients_per_round)
    return sorted(chosen)


def client_seed(run: int, round: int, purpose: str, client: int) -> int:
    """Return the seed of one client's work."""
    return seed_of("federated", run, round, purpose, client)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python: for dropout, augmentation, and the user's code."""
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:  # the same on a CPU, without touching other device types
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the process's generators afterwards."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
