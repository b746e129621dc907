"""How a model serves each client, not only the mean of all: an ``evaluate`` over the clients' own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from thinwire.federated.cohort import sample
from thinwire.federated.data import ClientData, to_device
from thinwire.federated.workspace import Evaluate

MEDIAN, WORST = "median client", "worst tenth"


def over_clients(right: Callable[[nn.Module, Any], float], clients: ClientData, most: int = 1000) -> Evaluate:
    """An ``evaluate``: the median of the clients' accuracies, and the mean of the tenth of them that have the worst.

    Args:
        right: (model in eval mode, a client's data) -> the share that is right, from 0 to 1.
        clients: data of each client, held out if there are such.
        most: clients that are looked at; of more, as many drawn at random, the same each time.
    """
    if most < 1:
        raise ValueError(f"most={most} must be at least 1")
    chosen = sample(0, 0, len(clients), min(most, len(clients)))

    def evaluate(model: nn.Module, round: int) -> Mapping[str, float]:
        device = next(model.parameters()).device
        shares = np.sort([float(right(model, to_device(clients.load(client), device))) for client in chosen])
        worst = shares[: -(-len(shares) // 10)]
        return {MEDIAN: float(np.median(shares)), WORST: float(worst.mean())}

    return evaluate
