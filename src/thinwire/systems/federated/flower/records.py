"""Node messages as Flower's records and back: tensors in an ArrayRecord, JSON in a ConfigRecord; no pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from thinwire.systems.federated.remote import NodeMessage

_TENSORS, _FACTS, _JSON = "tensors", "facts", "json"


def require_flower() -> None:
    """Raise ``ValueError`` unless Flower is installed."""
    try:
        import flwr.serverapp  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "a deployment needs Flower, in its own environment because it pins older versions of typer and rich: "
            "pip install 'thinwire[flower]'"
        ) from error


def to_record(message: NodeMessage) -> Any:
    """Return the message as a ``RecordDict``."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {name: Array(x.detach().cpu().contiguous().numpy()) for name, x in message.tensors.items()}
    facts = ConfigRecord({_JSON: json.dumps(dict(message.facts))})
    return RecordDict({_TENSORS: ArrayRecord(arrays), _FACTS: facts})


def from_record(record: Any) -> NodeMessage:
    """Convert back what ``to_record`` made. ``Array.numpy`` reads with ``allow_pickle=False``.

    Raises:
        ValueError: the record has another form.
    """
    try:
        arrays, text = record[_TENSORS], record[_FACTS][_JSON]
        tensors = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        facts = json.loads(text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not a thinwire message: {error!r}") from error
    if not isinstance(facts, dict):
        raise ValueError("this is not a thinwire message: its facts are not an object")
    return NodeMessage(tensors, facts)
