"""Divide one data set among clients: evenly, by Dirichlet draws, by shards of sorted labels, or by author.

Also gives each client held-out samples with its own mix of classes. Each function returns, per client, the ascending
indices of its samples, as :class:`~thinwire.federated.ArrayClients` takes them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Parts = list[NDArray[np.int64]]


def iid(samples: int, clients: int, seed: int = 0) -> Parts:
    """Divide at random, into sizes that differ by at most one.

    Raises:
        ValueError: fewer samples than clients.
    """
    _check(samples, clients)
    order = np.random.default_rng(seed).permutation(samples)
    return [np.sort(part).astype(np.int64) for part in np.array_split(order, clients)]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, *, least: int = 1, seed: int = 0) -> Parts:
    """Divide each class among the clients by shares drawn from a symmetric Dirichlet distribution.

    Small ``alpha``: few classes per client, and very different sizes; large: nearly even (Hsu, Qi, Brown 2019 draw the
    other way round, a distribution over classes for each client).

    A client with fewer than ``least`` samples gets some from the largest.

    Raises:
        ValueError: ``alpha`` is not positive, or there are too few samples.
    """
    classes = np.asarray(labels).reshape(-1)
    _check(len(classes), clients * least)
    if not alpha > 0:
        raise ValueError(f"alpha={alpha} must be above 0")
    draw = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(classes):
        members = draw.permutation(np.flatnonzero(classes == label))
        shares = draw.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, cuts)):
            part.extend(piece.tolist())
    while len(short := min(parts, key=len)) < least:
        short.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def shards(labels: ArrayLike, clients: int, per_client: int = 2, seed: int = 0) -> Parts:
    """Sort by label, cut into ``clients * per_client`` runs, ``per_client`` runs to each client (McMahan et al. 2017).

    Raises:
        ValueError: fewer samples than runs.
    """
    classes = np.asarray(labels).reshape(-1)
    if per_client < 1:
        raise ValueError(f"per_client={per_client} must be at least 1")
    _check(len(classes), clients * per_client)
    runs = np.array_split(np.argsort(classes, kind="stable"), clients * per_client)
    order = np.random.default_rng(seed).permutation(len(runs))
    return [
        np.sort(np.concatenate([runs[i] for i in order[client::clients]])).astype(np.int64) for client in range(clients)
    ]


def by_key(keys: Sequence[Hashable]) -> tuple[Parts, list[Any]]:
    """Make one client for each key, such as an author: the parts and their keys, in order of first use."""
    found: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    if not found:
        raise ValueError("there are no samples")
    return [np.array(part, dtype=np.int64) for part in found.values()], list(found)


def alike(labels: ArrayLike, parts: Sequence[ArrayLike], others: ArrayLike, samples: int = 50, seed: int = 0) -> Parts:
    """Give each client the same number of other samples, such as held-out ones, in its own mix of classes.

    Clients may share samples.

    Args:
        labels, parts: of the samples of ``parts``, which holds indices for each client.
        others: the labels of the other samples.
        samples, seed: how many each client gets, drawn by which seed.

    Raises:
        ValueError: a client has a class that no other sample has.
    """
    known, other = np.asarray(labels).reshape(-1), np.asarray(others).reshape(-1)
    members = {label: np.flatnonzero(other == label) for label in np.unique(other)}
    if missing := set(np.unique(known).tolist()) - set(members):
        raise ValueError(f"there are no other samples of class {min(missing)}")
    draw = np.random.default_rng(seed)
    found = []
    for part in parts:
        classes = draw.choice(known[np.asarray(part)], size=samples)
        found.append(np.sort([draw.choice(members[label]) for label in classes]).astype(np.int64))
    return found


def _check(samples: int, needed: int) -> None:
    if needed < 1:
        raise ValueError("there must be at least one client with at least one sample")
    if samples < needed:
        raise ValueError(f"{samples} samples are too few: {needed} are needed")
