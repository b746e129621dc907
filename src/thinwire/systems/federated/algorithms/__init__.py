"""The algorithms: what a client does, what is summed, what the server does with the sum.

Not here: who trains where and when, how sums are sent, and where states are kept (the modules around this package).
"""

from thinwire.systems.federated.algorithms.fedavg import FedAvg, FedNova, FedOpt, FedProx, FedRobust
from thinwire.systems.federated.algorithms.mime import Mime
from thinwire.systems.federated.algorithms.scaffold import FedDyn, Scaffold

__all__ = ["FedAvg", "FedDyn", "FedNova", "FedOpt", "FedProx", "FedRobust", "Mime", "Scaffold"]
