"""The published schemes as settings of one core. Each preset sets what defines its scheme; the rest is the default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from thinwire.core.checks import meant
from thinwire.systems.parameter_server.settings import Settings
from thinwire.tools.bench.words import split_options


def inhad(max_staleness: int | None = 4, update_every: int | str = "nodes/2", **options: Any) -> Settings:
    """Iteration numbers; sums per node, pulled when half of the nodes have new work; a bound on every gradient's age.

    Differences from the paper (J. Supercomputing 2021, of which only the abstract is public): the fence, the bound on
    gradients still being computed, and the rules for membership and failures are ours.
    """
    return Settings(max_staleness=max_staleness, update_every=update_every, **options)


def bsp(**options: Any) -> Settings:
    """Synchronous SGD: every worker's gradient of every version, once."""
    return Settings(**{"max_staleness": 0, "update_every": "nodes", "alpha": "none", **options})


def asp(**options: Any) -> Settings:
    """Asynchronous SGD (Downpour without Adagrad): each gradient is an update, regardless of its age."""
    return Settings(**{**_PUSHED, "update_every": 1, **options})


def ssp(clock_limit: int = 3, **options: Any) -> Settings:
    """Stale synchronous parallel (Ho et al. 2013): as ``asp``, but no node is more than ``clock_limit`` rounds ahead.

    Differences from the paper: the server keeps the clocks; workers hold no cache.
    """
    return Settings(**{**_PUSHED, "update_every": 1, "clock_limit": clock_limit, **options})


def n_softsync(n: float = 1, **options: Any) -> Settings:
    """n-softsync (arXiv 1511.05950): an update takes exactly floor(workers / n) gradients; mean staleness about n."""
    return Settings(**{**_PUSHED, "update_every": f"workers/{n}", "alpha": "inverse", **options})


def fedbuff(size: int = 10, max_staleness: int | None = None, steps: int = 20, **options: Any) -> Settings:
    """FedBuff (Nguyen et al. 2022): ``size`` differences make an update; those above max_staleness are dropped.

    Differences from the paper: no client population and no secure aggregation; the workers are the clients.
    """
    base = {**_PUSHED, "update_every": size, "max_staleness": max_staleness, "alpha": "invsqrt"}
    base |= {"enforce": "drop" if max_staleness is not None else "wait", "sync_every": steps}
    return Settings(**{**base, **options})


def async_local_sgd(steps: int = 20, **options: Any) -> Settings:
    """Asynchronous local SGD (arXiv 2401.09135): each difference of ``steps`` local steps is an outer update."""
    base = {**_PUSHED, "update_every": 1, "sync_every": steps}
    return Settings(**{**base, **options})


def delayed_nesterov(steps: int = 20, **options: Any) -> Settings:
    """As ``async_local_sgd`` with balanced local steps; its outer optimizer is :class:`outer.DelayedNesterov`."""
    return async_local_sgd(steps, **{"balance": True, **options})


def local(
    sync_every: int = 16,
    quorum: int | str = "nodes/2",
    grace: float | str = "auto",
    codec: str | None = "int8",
    **options: Any,
) -> Settings:
    """Local steps that wait for nobody: the mean change of a quorum, and of who comes within the grace, is added.

    Anchors: Decoupled DiLoCo (arXiv 2604.21428) for quorum and grace. Differences: equal weights, because a change is
    as long as the steps that made it; one that comes late counts by its age; no outer momentum unless the server is
    given an optimizer.
    """
    base = {**_PUSHED, "update_every": f"{quorum} nodes" if isinstance(quorum, int) else quorum, "alpha": "inverse"}
    base |= {"sync_every": sync_every, "balance": True, "grace": grace, "robust": "clip"}
    return Settings(**{**base, "compress_up": codec, "compress_down": "int8", **options})


def diloco(steps: int = 500, **options: Any) -> Settings:
    """DiLoCo (arXiv 2311.08105): all nodes' differences of ``steps`` AdamW steps make one outer Nesterov step."""
    base = {**_PUSHED, "update_every": "nodes", "max_staleness": 0, "sync_every": steps}
    return Settings(**{**base, **options})


_PUSHED: dict[str, Any] = {"transfer": "push", "max_staleness": None, "alpha": "none"}

PRESETS: dict[str, Callable[..., Settings]] = {
    make.__name__: make
    for make in (inhad, bsp, asp, ssp, n_softsync, local, fedbuff, async_local_sgd, delayed_nesterov, diloco)
}


def preset(text: str) -> Settings:
    """Return the settings of ``"inhad"``, ``"inhad:max_staleness=2:update_every=nodes"``, ``"ssp:clock_limit=0"``.

    Raises:
        ValueError: there is no such preset or option.
    """
    name, given = split_options(text)
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; {meant(name, PRESETS)}use one of {', '.join(PRESETS)}")
    options = {key: None if value == "none" else value for key, value in given.items()}
    known = {*inspect.signature(PRESETS[name]).parameters, *(field.name for field in fields(Settings))} - {"options"}
    for key in options:
        if key not in known:
            ask = meant(key, known)
            raise ValueError(f"preset {text!r} has no option {key!r}; {ask}known: {', '.join(sorted(known))}")
    try:
        return PRESETS[name](**options)
    except TypeError as error:
        raise ValueError(f"preset {text!r}: {error}") from error
