"""FedProx: FedAvg with a pull towards the server's weights in every local step.

Paper: Li et al.: Federated Optimization in Heterogeneous Networks, MLSys 2020, equation 2.

Client: mu * (x - theta) is added to each gradient. Server: as FedAvg; with mu = 0 it is FedAvg.

Differences from the paper: the user sets the number of local steps; inexactness is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.systems.federated.algorithms.base import positive, proximal
from thinwire.systems.federated.algorithms.fedavg import FedAvg
from thinwire.systems.federated.client import ClientContext, ClientResult


@dataclass(kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Args:
        mu: its weight.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("mu", self.mu, zero=True)

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        """Run local SGD with the proximal term."""
        theta = payload["theta"]
        local = self.local_sgd(context, theta, proximal(self.mu, theta))
        return ClientResult({"delta": local.x - theta})
