"""The algorithms, one file each: what a client does, what is summed, what the server does with the sum.

Not here: who trains where and when, how sums are sent, and where states are kept (the modules around this package).
"""

from thinwire.federated.algorithms.fedavg import FedAvg
from thinwire.federated.algorithms.feddyn import FedDyn
from thinwire.federated.algorithms.fednova import FedNova
from thinwire.federated.algorithms.fedopt import FedOpt
from thinwire.federated.algorithms.fedprox import FedProx
from thinwire.federated.algorithms.fedrobust import FedRobust
from thinwire.federated.algorithms.mime import Mime
from thinwire.federated.algorithms.scaffold import Scaffold

__all__ = ["FedAvg", "FedDyn", "FedNova", "FedOpt", "FedProx", "FedRobust", "Mime", "Scaffold"]
