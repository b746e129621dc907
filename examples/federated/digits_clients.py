"""Handwritten digits on 40 clients, each with few classes: what to train, on what, and how to tell whether it works.

``build`` is all that thinwire asks for. The same function is simulated and deployed.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from thinwire import federated as fl


def build() -> fl.Federation:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[order].flatten(1) / 16
    labels = torch.tensor(digits.target)[order]
    train, held_out = slice(0, 1437), slice(1437, None)

    def evaluate(model: nn.Module, round: int) -> dict[str, float]:
        right = model(pixels[held_out]).argmax(1) == labels[held_out]
        return {"accuracy": float(right.float().mean())}

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return fl.Federation(
        algorithm=fl.Scaffold(lr=0.2, batch_size=8, epochs=2),
        model=nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
        clients=fl.ArrayClients((pixels[train], labels[train]), fl.partition.dirichlet(labels[train], 40, alpha=0.3)),
        rounds=6,
        clients_per_round=10,
        evaluate=evaluate,
        evaluate_every=3,
        reduction="exact",
    )
