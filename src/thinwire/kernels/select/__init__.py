"""Selection of the k entries of largest magnitude; every algorithm returns exactly min(k, d) distinct indices.

What does not live here: what is done with the entries that are not chosen (methods/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.select.exact import exact

Selector = Callable[..., Tensor]
ALGORITHMS: dict[str, Selector] = {"exact": exact}


def keep_count(d: int, rho: float) -> int:
    """How many of ``d`` elements are kept at density ``rho``: at least 1, 0 only for d = 0.

    Example:
        >>> keep_count(1000, 0.01), keep_count(5, 0.001), keep_count(0, 0.5)
        (10, 1, 0)
    """
    return min(d, max(1, int(rho * d + 1e-6))) if d else 0


def top_k(
    x: Tensor, k: int, algorithm: str = "exact", generator: torch.Generator | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude, in no particular order.

    Args:
        x: 1-D, any strides; 16-bit floats are compared as fp32.
        k: how many; more than there are means all.
        algorithm: "exact".
        generator: for algorithms that draw; "exact" does not.
        options: of the algorithm; "exact" has none.

    Returns:
        (values, indices): ``values`` bit-equal to ``x[indices]``; indices int64, distinct. Non-finite entries
        come first.

    Raises:
        ValueError: k < 0, x not 1-D, unknown algorithm or option.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; there is {', '.join(map(repr, ALGORITHMS))}")
    if x.ndim != 1:
        raise ValueError(f"top_k needs a 1-D tensor, not {x.ndim}-D")
    if k < 0:
        raise ValueError(f"k must not be negative, not {k}")
    if options:
        raise ValueError(f"algorithm={algorithm!r} has no option {sorted(options)[0]!r}")
    indices = ALGORITHMS[algorithm](x, min(k, x.numel()))
    return x[indices], indices
