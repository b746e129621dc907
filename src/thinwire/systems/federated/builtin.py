"""Federations that need no download, and what the command line's words for federations and algorithms build."""

from __future__ import annotations

import dataclasses
import math
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.kernels.seeding import generator
from thinwire.systems.federated import algorithms, partition
from thinwire.systems.federated.algorithms import FedAvg, Scaffold
from thinwire.systems.federated.compress import Compressed
from thinwire.systems.federated.data import ArrayClients, FunctionClients, TextClients, over_clients
from thinwire.systems.federated.simulate import Federation, check_federation
from thinwire.tools.bench.words import check_options, load_function, nearest, split_options, told


def digits(
    clients: int = 100, alpha: float = 0.5, split: str = "dirichlet", width: int = 8, hidden: int = 64
) -> Federation:
    """Build a federation of scikit-learn's digits: 1,437 split over clients for training, 360 held out; a small CNN."""
    from thinwire.tools.bench.models.digits import HELD_OUT, images, network

    pixels, labels = images()
    known = len(labels) - HELD_OUT
    splits: Mapping[str, Callable[[], Any]] = {
        "dirichlet": lambda: partition.dirichlet(labels[:known], clients, alpha),
        "iid": lambda: partition.iid(known, clients),
        "shards": lambda: partition.shards(labels[:known], clients),
    }
    if split not in splits:
        raise ValueError(f"digits: split={split!r} is unknown; use one of {', '.join(splits)}")
    parts, held_out = splits[split](), (pixels[known:], labels[known:])

    def right(model: nn.Module, data: Any) -> float:
        return float((model(data[0]).argmax(1) == data[1]).float().mean())

    def evaluate(model: nn.Module, round: int) -> Mapping[str, float]:
        loss = F.cross_entropy(model(held_out[0]), held_out[1])
        return {"accuracy": right(model, held_out), "held-out loss": float(loss)}

    torch.manual_seed(0)
    return Federation(
        FedAvg(lr=0.2, batch_size=10, epochs=5),
        network(width, hidden),
        ArrayClients((pixels[:known], labels[:known]), parts),
        rounds=50,
        clients_per_round=min(20, clients),
        evaluate=evaluate,
        per_client=over_clients(right, ArrayClients(held_out, partition.alike(labels[:known], parts, labels[known:]))),
        chance={"accuracy": 0.1, "held-out loss": math.log(10)},
    )


def text(width: int = 64, layers: int = 2, length: int = 64, most: int = 64) -> Federation:
    """Build a federation of Python's standard library, one file per client: a small character GPT predicts bytes."""
    from thinwire.tools.bench.models.text import CharGPT

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
        clients_per_round=min(16, len(train)),
        loss=loss,
        evaluate=evaluate,
        chance={"held-out loss": math.log(256)},
    )


def million(clients: int = 1_000_000, samples: int = 10, features: int = 100) -> Federation:
    """Build a population of any size: client i's samples are drawn when needed. Logistic regression, SCAFFOLD."""

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
        clients_per_round=min(1000, clients),
    )


BUILT_IN: Mapping[str, Callable[..., Federation]] = {"digits": digits, "text": text, "million": million}


def build_federation(name: str) -> Federation:
    """Build ``"digits"``, ``"digits:clients=50"``, or a user's own ``"my_module:build"``."""
    function, options = split_options(name)
    ours = function in BUILT_IN
    if not ours and ":" not in function:
        raise ValueError(f"unknown federation {name!r}; {nearest(name, BUILT_IN)}, or module:function of your own")
    build = BUILT_IN[function] if ours else load_function(function.replace(".py:", ":"), "federation")
    check_options(repr(function), build, options, ours=ours)
    if ours:
        return build(**options)
    with told(f"federation {function!r}"):
        made = build(**options)
    return check_federation(made, name)


ALGORITHMS = tuple(algorithms.__all__)
TUNED: Mapping[str, Mapping[str, Any]] = {
    "FedOpt": {"server_lr": 0.02},
    "Mime": {"beta": 0.5},
    "Scaffold": {"max_grad_norm": 1.0},
    "FedDyn": {"max_grad_norm": 1.0},
}
"""Settings in which these differ from FedAvg, found by trial on ``digits``: with local learning rates that suit FedAvg,
an adaptive server with steps of 1 diverges, and so do control variates of dissimilar, rarely seen clients."""


def build_algorithm(text: str, base: Any = None, compress: str | None = None) -> Any:
    """Build an algorithm from text such as ``"scaffold:lr=0.1"``; ``compress`` is like ``"topk:density=0.01"``.

    What is not given is as in ``base``, a federation's algorithm, except what another algorithm needs (``TUNED``).
    """
    name, options = split_options(text)
    known = {found.lower(): found for found in ALGORITHMS}
    if name.lower() not in known:
        raise ValueError(f"unknown algorithm {name!r}; {nearest(name.lower(), known)}")
    cls = getattr(algorithms, known[name.lower()])
    fields = {field.name for field in dataclasses.fields(cls)}
    for key in options:
        if key not in fields:
            raise ValueError(f"{name} has no option {key!r}; {nearest(key, fields)}")
    given = {key: None if value == "none" else value for key, value in options.items()}
    kept = {key: value for key, value in _set_in(_inner(base)).items() if key in fields and key not in given}
    if type(_inner(base)) is not cls:
        kept = {key: value for key, value in kept.items() if key not in TUNED.get(type(_inner(base)).__name__, {})}
        if given.get("rule") != "sgd":  # the server of FedAvg
            kept |= TUNED.get(cls.__name__, {})
    try:
        made = cls(**{**kept, **given})
    except ValueError as error:
        if not kept:
            raise
        words = ", ".join(f"{key}={value}" for key, value in kept.items())
        raise ValueError(
            f"{error} (not named, so kept: {words}; name what should differ, such as {name}:lr=0.1)"
        ) from error
    return compressed(made, compress, base)


def _inner(algorithm: Any) -> Any:
    return getattr(algorithm, "inner", algorithm)


def _set_in(algorithm: Any) -> dict[str, Any]:
    fields = dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
    return {f.name: getattr(algorithm, f.name) for f in fields if f.init and getattr(algorithm, f.name) != f.default}


def compressed(algorithm: Any, compress: str | None, base: Any = None) -> Any:
    """Return the algorithm, compressed by a method such as ``"topk:density=0.01"``; None: as ``base`` is."""
    if compress is not None:
        method, options = split_options(compress)
        return Compressed(_inner(algorithm), method, **options)
    return Compressed(algorithm, base.method) if isinstance(base, Compressed) else algorithm
