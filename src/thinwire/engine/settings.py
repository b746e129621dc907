"""The options of ``attach`` that are not the method's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from thinwire.core.checks import check_count, check_flag
from thinwire.core.program import Method, Plan, Topology
from thinwire.engine.parameters import DenseRule


@dataclass(frozen=True)
class AttachSettings:
    """The options of ``attach`` that are not the method's.

    Attributes:
        note: what is not done because there is only one rank.
        named: the method in whose place S-SGD runs on a single rank, and whose state is kept; None: the one that runs.
    """

    start_compression_step: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    pinned: Plan | None = None
    timeout: timedelta | None = None
    detect_desync: bool = False
    keep_dense: DenseRule = "auto"
    on_failure: Callable[[Exception], None] | None = None
    note: str = ""
    named: Method | None = None

    def __post_init__(self) -> None:
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"):
            check_flag(name, getattr(self, name))
        if self.start_compression_step is not None:
            check_count("start_compression_step", self.start_compression_step, 0)


def capped(method: Method | str, options: Mapping[str, Any], bucket_cap_mb: Any) -> dict[str, Any]:
    """Return a named method's options with ``bucket_cap_mb`` as its ``fusion``.

    Raises:
        ValueError: it is no size, the options have a ``fusion`` too, or the method cannot be given options.
    """
    cap = bucket_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0:
        raise ValueError(f"bucket_cap_mb={cap!r} must be a positive number of MiB")
    if isinstance(method, Method):
        raise ValueError(f"{type(method).__name__}(...) carries its own options: pass fusion={cap!r} to it")
    if isinstance(method, str) and method.lower() == "auto":
        raise ValueError(f'"auto" chooses the buckets too: leave out bucket_cap_mb={cap!r} or name a method')
    if "fusion" in options:
        raise ValueError(f"bucket_cap_mb={cap!r} and fusion={options['fusion']!r} mean the same: give only one of them")
    return {**options, "fusion": cap}


def checked_timeout(timeout: Any) -> timedelta | None:
    """Return a limit, in seconds or as a timedelta, as a timedelta; None stays None.

    Raises:
        ValueError: it is not a valid limit.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif timeout is None:
        return None
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and math.isfinite(timeout):
        seconds = timeout
    else:
        seconds = 0
    if seconds <= 0:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0, a timedelta, or None")
    return timedelta(seconds=seconds)


def check_scaler(scaler: Any) -> None:
    """Raise ``TypeError`` unless this is a GradScaler, something with its interface, or None."""
    if scaler is not None and not (callable(getattr(scaler, "scale", None)) and hasattr(scaler, "is_enabled")):
        raise TypeError(f"scaler={scaler!r} must be a torch.amp.GradScaler or None")


def check_topology(topology: Any) -> None:
    """Raise ``TypeError`` unless this is a Topology or None."""
    if topology is not None and not isinstance(topology, Topology):
        raise TypeError(f"topology={topology!r} must be a thinwire.Topology or None")
