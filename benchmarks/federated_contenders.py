"""One federated workload in three frameworks: ``PYTHON benchmarks/federated_contenders.py thinwire|flower|pfl``

Scikit-learn's digits, dealt out evenly to 100 clients; a small convolutional network, one local epoch of SGD in batches
of 10 at rate 0.1; all 100 clients in every round; means weighted by samples; nothing evaluated. Prints one JSON object
with the seconds of every round. ``benchmarks/federated.py`` starts it in each framework's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from thinwire.tools.bench.models.digits import HELD_OUT, images, network

CLIENTS, BATCH, LR, WIDTH, HIDDEN = 100, 10, 0.1, 8, 64


def parts() -> list[np.ndarray[Any, Any]]:
    """Indices of each client's samples."""
    order = np.random.default_rng(0).permutation(len(images()[1]) - HELD_OUT)
    return [np.sort(part) for part in np.array_split(order, CLIENTS)]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return network(WIDTH, HIDDEN)


def run_thinwire(rounds: int, arguments: argparse.Namespace) -> list[float]:
    from thinwire.systems import federated as fl

    ranks = "RANK" in os.environ
    if ranks:
        torch.distributed.init_process_group("gloo")
    clients, ends = fl.ArrayClients(images(), parts()), [time.perf_counter()]
    fl.simulate(
        fl.FedAvg(lr=LR, batch_size=BATCH),
        model(),
        clients,
        rounds=rounds,
        clients_per_round=CLIENTS,
        on_round=lambda row: ends.append(time.perf_counter()),
    )
    if ranks:
        torch.distributed.destroy_process_group()
    return np.diff(ends).tolist()


def run_flower(rounds: int, arguments: argparse.Namespace) -> list[float]:
    import warnings

    warnings.filterwarnings("ignore")
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends = ClientApp(), ServerApp(), []
    memory: dict[str, Any] = {}  # an actor lives on: data and model are made once in it

    @client.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        if not memory:
            memory.update(images=images(), parts=parts(), model=model())
        pixels, labels = memory["images"]
        mine = torch.as_tensor(memory["parts"][int(context.node_config["partition-id"])])
        net = memory["model"]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for chosen in mine[torch.randperm(len(mine))].split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(pixels[chosen]), labels[chosen]).backward()
            optimizer.step()
        answer = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(mine)}),
        }
        return Message(content=RecordDict(answer), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            found = super().aggregate_train(server_round, replies)
            ends.append(time.perf_counter())
            return found

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(
            fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS, min_train_nodes=CLIENTS
        )
        strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=rounds)

    resources = {"num_cpus": arguments.cpus, "num_gpus": 0.0}
    run_simulation(server, client, CLIENTS, backend_config={"client_resources": resources})
    return np.diff(ends).tolist()


def run_pfl(rounds: int, arguments: argparse.Namespace) -> list[float]:
    import logging

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    logging.disable(logging.WARNING)
    pixels, labels = images()
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    chosen = [torch.as_tensor(part) for part in parts()]
    made = [Dataset((pixels[part], labels[part]), user_id=str(i)) for i, part in enumerate(chosen)]
    data = FederatedDataset(lambda user: made[user], sampler)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            self.train(not eval)
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: Any, y: Any, eval: bool = False) -> Any:
            with torch.no_grad():
                return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    net = Net()
    wrapped = PyTorchModel(net, lambda p, lr: torch.optim.SGD(p, lr=lr), torch.optim.SGD(net.parameters(), lr=1.0))
    ends: list[float] = []

    class Clock(TrainingProcessCallback):  # type: ignore[type-arg]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            ends.append(time.perf_counter())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=CLIENTS, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=wrapped,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return np.diff(ends).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["thinwire", "flower", "pfl"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpus", type=float, default=1.0, help="of one of Flower's actors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = {"thinwire": run_thinwire, "flower": run_flower, "pfl": run_pfl}[arguments.framework]
    seconds = run(arguments.rounds, arguments)
    if os.environ.get("RANK", "0") == "0":
        print("@@" + json.dumps({"seconds": seconds, "torch": torch.__version__}), flush=True)
    os._exit(0)  # frameworks leave processes and threads behind


if __name__ == "__main__":
    main()
