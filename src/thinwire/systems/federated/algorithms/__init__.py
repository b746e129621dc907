"""The algorithms, one file each: what a client does, what is summed, what the server does with the sum.

Not here: who trains where and when, how sums are sent, and where states are kept (the modules around this package).
"""

from thinwire.systems.federated.algorithms.fedavg import FedAvg
from thinwire.systems.federated.algorithms.feddyn import FedDyn
from thinwire.systems.federated.algorithms.fednova import FedNova
from thinwire.systems.federated.algorithms.fedopt import FedOpt
from thinwire.systems.federated.algorithms.fedprox import FedProx
from thinwire.systems.federated.algorithms.fedrobust import FedRobust
from thinwire.systems.federated.algorithms.mime import Mime
from thinwire.systems.federated.algorithms.scaffold import Scaffold

__all__ = ["FedAvg", "FedDyn", "FedNova", "FedOpt", "FedProx", "FedRobust", "Mime", "Scaffold"]
