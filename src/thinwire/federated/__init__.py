"""Federated learning: algorithms, devices that train their clients one by one, schedules, client states, back ends.

Not here: the deployment on Flower (adapters/flower*.py), plots and tables (cli/), compression itself (methods/).
"""

from thinwire.federated import partition
from thinwire.federated.aggregator import COLLECT, SUM, WEIGHTED_MEAN, RoundRequest
from thinwire.federated.algorithms import FedAvg, FedDyn, FedNova, FedOpt, FedProx, FedRobust, Mime, Scaffold
from thinwire.federated.client import ClientContext, ClientResult
from thinwire.federated.clocks import ClientTrace, Speed
from thinwire.federated.compress import Compressed
from thinwire.federated.coordinator import DeviceLost
from thinwire.federated.data import ArrayClients, FunctionClients
from thinwire.federated.federation import Federation
from thinwire.federated.history import History, RoundRecord
from thinwire.federated.per_client import over_clients
from thinwire.federated.predict import Prediction, predict
from thinwire.federated.readers import TextClients, read_hugging_face, read_leaf
from thinwire.federated.server import AllClientsFailed
from thinwire.federated.simulate import simulate
from thinwire.federated.state import ClientStateStore

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
