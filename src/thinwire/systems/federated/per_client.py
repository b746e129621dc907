"""How well a model serves each client, not only their mean: an ``evaluate`` over the clients' own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from thinwire.systems.federated.cohort import sample
from thinwire.systems.federated.data import ClientData, to_device
from thinwire.systems.federated.workspace import Evaluate

MEDIAN, WORST = "median client", "worst tenth"


def over_clients(right: Callable[[nn.Module, Any], float], clients: ClientData, most: int = 1000) -> Evaluate:
    """Return an ``evaluate``: the median of the clients' accuracies, and the mean of the worst tenth.

    Args:
        right: (model in eval mode, a client's data) -> the share of correct answers, from 0 to 1.
        clients: data of each client, held out if available.
        most: how many clients are evaluated; of more, that many are drawn at random, always the same ones.
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
