"""Federations that need no download: the digits dealt out to clients, and the standard library with a file for each.

What does not live here: algorithms, partitions and readers (federated/).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.bench.words import nearest, split_options
from thinwire.federated import ArrayClients, FedAvg, Federation, FunctionClients, TextClients, partition


def digits(
    clients: int = 100, alpha: float = 0.5, split: str = "dirichlet", width: int = 8, hidden: int = 64
) -> Federation:
    """Scikit-learn's digits: 1,437 to train on, dealt out to clients, 360 held out; a small convolutional network.

    Args:
        clients: how many.
        alpha: of the Dirichlet draws.
        split: "dirichlet", "iid" or "shards".
        width, hidden: of the network.
    """
    from thinwire.bench.models.digits import HELD_OUT, images, network

    pixels, labels = images()
    known = len(labels) - HELD_OUT
    splits: Mapping[str, Callable[[], Any]] = {
        "dirichlet": lambda: partition.dirichlet(labels[:known], clients, alpha),
        "iid": lambda: partition.iid(known, clients),
        "shards": lambda: partition.shards(labels[:known], clients),
    }
    if split not in splits:
        raise ValueError(f"digits: split={split!r} is unknown; use one of {', '.join(splits)}")

    def evaluate(model: nn.Module, round: int) -> Mapping[str, float]:
        logits = model(pixels[known:])
        right = (logits.argmax(1) == labels[known:]).float().mean()
        return {"accuracy": float(right), "held-out loss": float(F.cross_entropy(logits, labels[known:]))}

    torch.manual_seed(0)
    return Federation(
        FedAvg(lr=0.2, batch_size=10, epochs=5),
        network(width, hidden),
        ArrayClients((pixels[:known], labels[:known]), splits[split]()),
        rounds=50,
        cohort=min(20, clients),
        evaluate=evaluate,
    )


def text(width: int = 64, layers: int = 2, length: int = 64, most: int = 64) -> Federation:
    """The standard library of this Python, each file a client: a small character GPT guesses the next byte.

    Args:
        width, layers: of the model.
        length: bytes of a sample. most: samples of a client.
    """
    from thinwire.bench.models.chargpt import CharGPT

    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train = TextClients([path for i, path in enumerate(paths) if i % 10], length, most)
    held_out = TextClients(paths[::10], length, 4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(model: nn.Module, round: int) -> Mapping[str, float]:
        losses = [loss(model, held_out.load(i)) for i in range(len(held_out))]
        return {"held-out loss": float(torch.stack(losses).mean())}

    torch.manual_seed(0)
    return Federation(
        FedAvg(lr=0.3, batch_size=16),
        CharGPT(layers, width, 4, length),
        train,
        rounds=30,
        cohort=min(16, len(train)),
        loss=loss,
        evaluate=evaluate,
    )


def million(clients: int = 1_000_000, samples: int = 10, features: int = 100) -> Federation:
    """A population of any size: client i's samples are drawn when they are needed. Logistic regression, SCAFFOLD."""
    from thinwire.federated import Scaffold
    from thinwire.kernels.seeding import generator

    def load(client: int) -> tuple[Tensor, Tensor]:
        draw = generator("federation of a million", client)
        shift = 0.5 * torch.randn(features, generator=draw)
        x = torch.randn(samples, features, generator=draw)
        return x, (x @ (torch.ones(features) / features**0.5 + shift) > 0).long()

    torch.manual_seed(0)
    return Federation(
        Scaffold(lr=0.1, batch_size=None, epochs=2),
        nn.Linear(features, 2),
        FunctionClients(clients, load, samples),
        rounds=10,
        cohort=min(1000, clients),
    )


BUILT_IN: Mapping[str, Callable[..., Federation]] = {"digits": digits, "text": text, "million": million}


def build_federation(name: str) -> Federation:
    """``"digits"``, ``"digits:clients=50"``, or ``"my_module:build"`` of the user's own.

    Raises:
        ValueError: there is no such thing, or it is no ``Federation``.
    """
    from thinwire.federated.federation import check_federation

    function, options = split_options(name)
    build = BUILT_IN.get(function) or _imported(function)
    accepted = inspect.signature(build).parameters
    for key in options:
        if key not in accepted:
            raise ValueError(f"{function!r} has no option {key!r}; {nearest(key, accepted)}")
    return check_federation(build(**options), name)


def _imported(name: str) -> Callable[..., Any]:
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"unknown federation {name!r}; {nearest(name, BUILT_IN)}, or module:function of your own")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module.removesuffix(".py")), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"federation {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ValueError(f"federation {name!r} is not a function")
    return found  # type: ignore[no-any-return]


ALGORITHMS = ("FedAvg", "FedProx", "FedOpt", "FedNova", "Mime", "Scaffold", "FedDyn")


def build_algorithm(text: str, compress: str | None = None) -> Any:
    """``"scaffold:lr=0.1"``; ``compress`` as ``"topk:density=0.01"``.

    Raises:
        ValueError: a name or an option that is not there.
    """
    import dataclasses

    from thinwire import federated

    name, options = split_options(text)
    known = {found.lower(): found for found in ALGORITHMS}
    if name.lower() not in known:
        raise ValueError(f"unknown algorithm {name!r}; {nearest(name.lower(), known)}")
    cls = getattr(federated, known[name.lower()])
    fields = {field.name for field in dataclasses.fields(cls)}
    for key in options:
        if key not in fields:
            raise ValueError(f"{name} has no option {key!r}; {nearest(key, fields)}")
    given = {key: None if value == "none" else value for key, value in options.items()}
    return compressed(cls(**given), compress)


def compressed(algorithm: Any, compress: str | None) -> Any:
    """The algorithm, with its clients' changes compressed by a method such as ``"topk:density=0.01"``."""
    if compress is None:
        return algorithm
    from thinwire.federated import Compressed

    method, options = split_options(compress)
    return Compressed(algorithm, method, **options)
