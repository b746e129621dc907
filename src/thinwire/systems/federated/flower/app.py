"""Federated learning on Flower: the executor as a ClientApp, the aggregator behind a Strategy.

The same ``build()`` that ``thinwire federated run`` simulates makes both apps::

    from thinwire.systems.federated.flower.app import client_app, server_app
    from my_federation import build

    server, client = server_app(build), client_app(build)

Settings of a run (``flwr run --run-config``): ``nodes``, how many to wait for; ``timeout``, seconds for an answer;
``out``, a folder for weights and history. Settings of a node (``flower-supernode --node-config``):
``clients="0-499,700"``, or ``partition-id`` and ``num-partitions``, which assign the clients in turn; ``state-dir`` for
the clients' states.

One of Flower's rounds is one visit. Its weighted mean is not used: nodes answer with sums that are already weighted,
and are divided once, at the end. Messages are records: tensors in an ArrayRecord, JSON in a ConfigRecord; no pickle.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.core.checks import local_path
from thinwire.core.durable import write_whole
from thinwire.systems.federated.remote import NodeMessage, RemoteNode, RemoteServer
from thinwire.systems.federated.simulate import Build, check_federation
from thinwire.systems.federated.state import pack

_POLL_SECONDS = 0.5
_TENSORS, _FACTS, _JSON = "tensors", "facts", "json"


def require_flower() -> None:
    try:
        import flwr.serverapp  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "a deployment needs Flower, in its own environment because it pins older versions of typer and rich: "
            "pip install 'thinwire[flower]'"
        ) from error


def client_app(build: Build) -> Any:
    """Return a ``flwr.clientapp.ClientApp`` that trains the clients on its node and answers with one sum.

    Raises:
        ValueError: Flower is not installed.
    """
    require_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator]
    def query(message: Any, context: Any) -> Any:
        return Message(content=to_record(_node(build, context).describe()), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        answer = _node(build, context).answer(from_record(message.content))
        return Message(content=to_record(answer), reply_to=message)

    return app


def server_app(build: Build) -> Any:
    """Return a ``flwr.serverapp.ServerApp`` that runs the federation's rounds over the connected nodes.

    Raises:
        ValueError: Flower is not installed.
    """
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        settings = context.run_config
        timeout = float(settings.get("timeout", 3600.0))
        federation = check_federation(build(), "build()")
        nodes = wait_for_nodes(grid, int(settings.get("nodes", 1)), timeout)
        server = RemoteServer(federation, ask_nodes(grid, nodes, timeout))
        strategy = make_strategy(server)
        visits = federation.rounds * federation.algorithm.visits
        strategy.start(grid, strategy.arrays(), num_rounds=visits, timeout=timeout)
        server.finish()
        if out := settings.get("out"):
            write_result(local_path(str(out)), server)

    return app


def make_strategy(server: RemoteServer) -> Any:
    from flwr.app import Message, MessageType, MetricRecord
    from flwr.serverapp.strategy import Strategy

    class ThinwireStrategy(Strategy):  # type: ignore[misc]
        def arrays(self) -> Any:  # the server's weights, for Flower's own records
            return to_record(NodeMessage({"theta": server.algorithm.theta}))[_TENSORS]

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            return [
                Message(content=to_record(content), dst_node_id=node, message_type=MessageType.TRAIN)
                for node, content in server.outgoing().items()
            ]

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            record = server.incoming(dict(map(_answer, replies)))
            if record is None:
                return None, None
            numbers = {"clients": record.clients, "failed": len(record.failed), **record.metrics, **record.evaluation}
            return self.arrays(), MetricRecord(numbers)

        def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            return []  # the server evaluates

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
            return None

        def summary(self) -> None: ...  # nothing beyond Flower's own output

    return ThinwireStrategy()


def _answer(message: Any) -> tuple[int, NodeMessage | str]:
    node = message.metadata.src_node_id
    if message.has_error():
        return node, f"error {message.error.code}: {message.error.reason}"
    try:
        return node, from_record(message.content)
    except ValueError as error:
        return node, str(error)


def to_record(message: NodeMessage) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array(x.detach().cpu().contiguous().numpy()) for name, x in message.tensors.items()}
    facts = ConfigRecord({_JSON: json.dumps(dict(message.facts))})
    return RecordDict({_TENSORS: ArrayRecord(arrays), _FACTS: facts})


def from_record(record: Any) -> NodeMessage:
    """Convert back what ``to_record`` made. ``Array.numpy`` reads with ``allow_pickle=False``."""
    try:
        arrays, text = record[_TENSORS], record[_FACTS][_JSON]
        tensors = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        facts = json.loads(text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a thinwire message: {error!r}") from error
    if not isinstance(facts, dict):
        raise ValueError("this is not a thinwire message: its facts are not an object")
    return NodeMessage(tensors, facts)


def hosted(config: Any, population: int) -> list[int]:
    if text := config.get("clients"):
        try:
            parts = [part.strip().partition("-") for part in str(text).split(",")]
            return [i for first, dash, last in parts for i in range(int(first), int(last if dash else first) + 1)]
        except ValueError:
            raise ValueError(f'clients={text!r} cannot be read; use ranges and numbers, such as "0-499,700"') from None
    if "partition-id" in config and "num-partitions" in config:
        return list(range(int(config["partition-id"]), population, int(config["num-partitions"])))
    raise ValueError(
        "this node hosts no clients: start it with --node-config 'clients=\"0-9\"', or with partition-id and "
        "num-partitions"
    )


def wait_for_nodes(grid: Any, wanted: int, timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    while len(nodes := sorted(grid.get_node_ids())) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(nodes)} nodes of {wanted} have connected within {timeout:g} s")
        time.sleep(_POLL_SECONDS)
    return nodes


def ask_nodes(grid: Any, nodes: list[int], timeout: float) -> dict[int, dict[int, int]]:
    from flwr.app import Message, MessageType

    record = to_record(NodeMessage())
    questions = [Message(content=record, dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]
    hosts: dict[int, dict[int, int]] = {}
    for answer in grid.send_and_receive(questions, timeout=timeout):
        node = answer.metadata.src_node_id
        if answer.has_error():
            raise ValueError(f"node {node} does not say which clients it hosts: {answer.error.reason}")
        try:
            rows = from_record(answer.content).facts["clients"]
            hosts[node] = {int(client): int(samples) for client, samples in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"node {node} does not say which clients it hosts: {error!r}") from error
    if missing := sorted(set(nodes) - set(hosts)):
        raise ValueError(f"node {missing[0]} did not answer within {timeout:g} s")
    return hosts


def write_result(folder: Path, server: RemoteServer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = server.federation.model
    write_whole(folder / "model.safetensors", pack({**dict(model.named_parameters()), **dict(model.named_buffers())}))
    write_whole(folder / "history.json", server.history.to_json())


def _node(build: Build, context: Any) -> RemoteNode:
    federation = check_federation(build(), "build()")
    config = context.node_config
    clients = hosted(config, len(federation.clients))
    place = local_path(str(config.get("state-dir", "~/.thinwire/clients")))
    return RemoteNode(federation, clients, place / f"run-{context.run_id}-node-{context.node_id}")
