"""What is trained, on whose data, with which algorithm, and how good it is; thinwire only needs ``build``.

Each part runs as it is, on generated data. Replace the parts by your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.systems import federated as fl

CLIENTS, CLASSES, FEATURES = 60, 5, 16


def load(client: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """A client's samples (inputs, class numbers).

    In your version: read them here, for example from this client's file.
    """
    draw = torch.Generator().manual_seed(2 * client + held_out)
    mix = torch.rand(CLASSES, generator=torch.Generator().manual_seed(client)) ** 3  # few samples of some classes
    labels = torch.multinomial(mix, 50 if held_out else samples(client), replacement=True, generator=draw)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    return centres[labels] + 1.5 * torch.randn(len(labels), FEATURES, generator=draw), labels


def samples(client: int) -> int:
    """Return how many samples it has for training. This is called often, so it must not read the samples."""
    return 10 + 3 * (client % 20)


def model() -> nn.Module:
    """Return the model to train; any module."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def right(net: nn.Module, data: Any) -> float:
    """Return the share of samples that the model classifies correctly."""
    inputs, labels = data
    return float((net(inputs).argmax(1) == labels).float().mean())


class ServerMomentum(fl.FedAvg):
    """FedAvg with momentum on the server: an algorithm of your own. Or use an existing one, such as fl.Scaffold."""

    server_state = ("theta", "velocity")  # the server's tensors, initially zero; saved in checkpoints
    velocity: Tensor

    def program(self, round: int) -> Any:
        """Run a round on the server: ask the clients, receive the mean of their changes, make a step."""
        mean = yield fl.RoundRequest({"theta": self.theta})
        self.velocity = 0.5 * self.velocity + mean["delta"]
        self.theta = self.theta + self.server_lr * self.velocity


def build() -> fl.Federation:
    """Return the whole federation, for ``thinwire federated run federation:build``."""
    held_out = fl.FunctionClients(CLIENTS, lambda client: load(client, held_out=True), 50)
    pairs = [held_out.load(client) for client in range(CLIENTS)]
    everything = torch.cat([inputs for inputs, _ in pairs]), torch.cat([labels for _, labels in pairs])

    def evaluate(net: nn.Module, round: int) -> Mapping[str, float]:
        return {"accuracy": right(net, everything)}

    torch.manual_seed(0)
    return fl.Federation(
        algorithm=ServerMomentum(lr=0.1, epochs=2, batch_size=10),
        model=model(),
        clients=fl.FunctionClients(CLIENTS, load, samples),
        rounds=20,
        clients_per_round=12,
        evaluate=evaluate,
        per_client=fl.over_clients(right, held_out),
        chance={"accuracy": 1 / CLASSES},
    )
