"""Selection of the k entries of largest magnitude; every algorithm returns exactly min(k, d) distinct indices.

Not here: what happens to the entries that are not chosen (core/methods/).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.select.exact import exact
from thinwire.core.kernels.select.gaussian import gaussian
from thinwire.core.kernels.select.mstopk import mstopk
from thinwire.core.kernels.select.threshold import threshold

Selector = Callable[..., Tensor]
ALGORITHMS: dict[str, Selector] = {
    "exact": exact,
    "mstopk": mstopk,
    "gaussian": gaussian,
    "threshold": threshold,
}


def keep_count(d: int, rho: float) -> int:
    """Return how many of ``d`` elements are kept at density ``rho``: at least 1, 0 only for d = 0."""
    return min(d, max(1, int(rho * d + 1e-6))) if d else 0


def options_of(algorithm: str) -> tuple[str, ...]:
    parameters = signature(ALGORITHMS[algorithm]).parameters.values()
    return tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY)


def top_k(
    x: Tensor, k: int, algorithm: str = "exact", generator: torch.Generator | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the k entries of largest magnitude, in no particular order.

    Args:
        x: 1-D, any strides; 16-bit floats are compared as fp32. On meta: shapes only.
        k: how many; if there are fewer entries, all.
        algorithm: "exact", or approximate: "mstopk", "gaussian", "threshold". On a GPU all run without a host read and
            return ascending indices.
        generator: for algorithms that draw (all but "exact"); None: torch's default CPU generator. A program passes one
            that depends only on seed, step and bucket.
        options: of the algorithm, see its function: "mstopk": samplings, base, window; "gaussian": rounds, window;
            "threshold": sample, rounds.

    Returns:
        (values, indices): ``values`` bit-equal to ``x[indices]``; indices int64, distinct. Non-finite entries
        come first.

    Raises:
        ValueError: k < 0, x not 1-D, unknown algorithm or option.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(map(repr, ALGORITHMS))}")
    if x.ndim != 1:
        raise ValueError(f"top_k needs a 1-D tensor, not {x.ndim}-D")
    if k < 0:
        raise ValueError(f"k must not be negative, not {k}")
    for name in options:
        if name not in options_of(algorithm):
            known = ", ".join(options_of(algorithm)) or "none"
            raise ValueError(f"algorithm={algorithm!r} has no option {name!r}; its options: {known}")
    k = min(k, x.numel())
    if x.is_meta:
        indices = torch.empty(k, dtype=torch.int64, device=x.device)
        return x[indices], indices
    if k == 0 or (k == x.numel() and not options):
        indices = torch.arange(k, device=x.device)
    else:
        wide = x.float() if x.is_cuda and x.element_size() == 2 else x
        indices = ALGORITHMS[algorithm](wide, k, generator, **options)
    return x[indices], indices
