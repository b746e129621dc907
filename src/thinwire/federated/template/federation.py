"""What is trained, on whose data, by which algorithm, and how good it is: ``build`` is all that thinwire asks for.

Each part runs as it is, on data made up here, and is there to be replaced by yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import federated as fl

CLIENTS, CLASSES, FEATURES = 60, 5, 16


def load(client: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """A client's samples (inputs, class numbers). Yours: read them here, from the file of this client say."""
    draw = torch.Generator().manual_seed(2 * client + held_out)
    mix = torch.rand(CLASSES, generator=torch.Generator().manual_seed(client)) ** 3  # some classes it hardly has
    labels = torch.multinomial(mix, 50 if held_out else samples(client), replacement=True, generator=draw)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    return centres[labels] + 1.5 * torch.randn(len(labels), FEATURES, generator=draw), labels


def samples(client: int) -> int:
    """How many it has to train on: asked often, so it must not read them."""
    return 10 + 3 * (client % 20)


def model() -> nn.Module:
    """What is trained; any module."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def right(net: nn.Module, data: Any) -> float:
    """The share of samples that the model gets right."""
    inputs, labels = data
    return float((net(inputs).argmax(1) == labels).float().mean())


class ServerMomentum(fl.FedAvg):
    """FedAvg with momentum on the server: an algorithm of one's own. Or take one that is there, such as fl.Scaffold."""

    server_state = ("theta", "velocity")  # tensors of the server, zeros at first; checkpoints hold them
    velocity: Tensor

    def program(self, round: int) -> Any:
        """A round on the server: ask the clients, receive the mean of their changes, take a step."""
        mean = yield fl.RoundRequest({"theta": self.theta})
        self.velocity = 0.5 * self.velocity + mean["delta"]
        self.theta = self.theta + self.server_lr * self.velocity


def build() -> fl.Federation:
    """All of it, for ``thinwire federated run federation:build``."""
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
