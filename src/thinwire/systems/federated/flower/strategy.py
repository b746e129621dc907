"""The Strategy for Flower's own round loop: one of its rounds is one visit.

Flower's weighted mean is not used: nodes answer with sums that are already weighted, and are divided once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinwire.systems.federated.flower.records import from_record, to_record
from thinwire.systems.federated.remote import NodeMessage, RemoteServer


def make_strategy(server: RemoteServer) -> Any:
    """Return a ``flwr.serverapp.strategy.Strategy`` around the server."""
    from flwr.app import Message, MessageType, MetricRecord
    from flwr.serverapp.strategy import Strategy

    class ThinwireStrategy(Strategy):  # type: ignore[misc]
        """Converts between the server's messages and Flower's."""

        def arrays(self) -> Any:
            """Return the server's weights, for Flower's own records."""
            return to_record(NodeMessage({"theta": server.algorithm.theta}))["tensors"]

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            """Return a message for every node that has clients in the cohort."""
            return [
                Message(content=to_record(content), dst_node_id=node, message_type=MessageType.TRAIN)
                for node, content in server.outgoing().items()
            ]

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            """Check and aggregate the answers."""
            record = server.incoming(dict(map(_answer, replies)))
            if record is None:
                return None, None
            numbers = {"clients": record.clients, "failed": len(record.failed), **record.metrics, **record.evaluation}
            return self.arrays(), MetricRecord(numbers)

        def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            """Return nothing: the server evaluates."""
            return []

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
            """Do nothing."""
            return None

        def summary(self) -> None:
            """Print nothing beyond Flower's own output."""

    return ThinwireStrategy()


def _answer(message: Any) -> tuple[int, NodeMessage | str]:
    node = message.metadata.src_node_id
    if message.has_error():
        return node, f"error {message.error.code}: {message.error.reason}"
    try:
        return node, from_record(message.content)
    except ValueError as error:
        return node, str(error)
