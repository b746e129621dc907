"""Federated learning: algorithms, devices that train their clients one by one, schedules, client states, back ends.

Not here: compression itself (core/methods/).
"""

from thinwire.systems.federated import partition
from thinwire.systems.federated.aggregator import (
    COLLECT,
    SUM,
    WEIGHTED_MEAN,
    ClientContext,
    ClientResult,
    RoundRequest,
)
from thinwire.systems.federated.algorithms import FedAvg, FedDyn, FedNova, FedOpt, FedProx, FedRobust, Mime, Scaffold
from thinwire.systems.federated.clocks import ClientTrace, Prediction, Speed, predict
from thinwire.systems.federated.compress import Compressed
from thinwire.systems.federated.coordinator import DeviceLost
from thinwire.systems.federated.data import (
    ArrayClients,
    FunctionClients,
    TextClients,
    over_clients,
    read_hugging_face,
    read_leaf,
)
from thinwire.systems.federated.history import History, RoundRecord
from thinwire.systems.federated.server import AllClientsFailed
from thinwire.systems.federated.simulate import Federation, simulate
from thinwire.systems.federated.state import ClientStateStore

__all__ = [
    "COLLECT",
    "SUM",
    "WEIGHTED_MEAN",
    "AllClientsFailed",
    "ArrayClients",
    "ClientContext",
    "ClientResult",
    "ClientStateStore",
    "ClientTrace",
    "Compressed",
    "DeviceLost",
    "FedAvg",
    "FedDyn",
    "FedNova",
    "FedOpt",
    "FedProx",
    "FedRobust",
    "Federation",
    "FunctionClients",
    "History",
    "Mime",
    "Prediction",
    "RoundRecord",
    "RoundRequest",
    "Scaffold",
    "Speed",
    "TextClients",
    "over_clients",
    "partition",
    "predict",
    "read_hugging_face",
    "read_leaf",
    "simulate",
]
