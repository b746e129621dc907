"""SPD-KFAC's published seconds on 64 GPUs beside what follows from the constants fitted to them and our placements.

Source: Shi, Zhang and Li 2021 (arXiv 2107.06533) and its authors' scripts (shyhuai/kfac_pytorch): 16 nodes of 4 RTX
2080 Ti, 100 Gb/s InfiniBand, fp32, every iteration with new factors and inverses, batch 32 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from published.figures import figure
from thinwire.core.pricing.costs import Linear
from thinwire.core.pricing.placement import Placement, place_threshold
from thinwire.core.pricing.profiles import builtin, kronecker_shapes

WORKERS, THRESHOLD = 64, 1400
_CODE = "code: shyhuai/kfac_pytorch, systems/kfac/utils.py"
_FIT = "fitted to the published seconds of ResNet-50 and -152"

ALL_REDUCE_64 = Linear(9.29e-4, 1.4335e-9 / 4, "measured elsewhere", _CODE)
"""Of fp32 bytes."""
BROADCAST_64 = Linear(7.73e-4, 7.99e-10 / 4, "measured elsewhere", f"{_FIT}: least relative squares of four figures")
"""Of fp32 bytes."""


def inversion_2080ti(d: int) -> float:
    """Seconds to invert a factor of side d: solves the two published D-KFAC figures."""
    return 1.616e-6 * d + 3.11e-13 * d**3


def sides(model: str) -> list[int]:
    """Of all factors of a built-in model, A and G of each layer in turn."""
    return list(chain.from_iterable((a, g) for _, a, g in kronecker_shapes(builtin(model))))


def broadcast_seconds(d: int) -> float:
    """To send one inverse of side d as its triangle."""
    return BROADCAST_64(4 * (d * (d + 1) // 2))


def inversion_seconds(dims: Sequence[int], placement: Placement, workers: int = WORKERS) -> tuple[float, float]:
    """(computing on the busiest worker, sending one after the other) for a placement, by these constants."""
    loads = [0.0] * workers
    everywhere = sending = 0.0
    for d, owner in zip(dims, placement.owner, strict=True):
        if owner < 0:
            everywhere += inversion_2080ti(d)
        else:
            loads[owner] += inversion_2080ti(d)
            sending += broadcast_seconds(d)
    return everywhere + max(loads), sending


def second_order_rows() -> list[tuple[str, float, float]]:
    """(label, published, predicted) for D-KFAC, MPD-KFAC and the published placement of SPD-KFAC."""
    rows = []
    for model in ("resnet50", "resnet152"):
        published, dims = figure(f"kfac/{model}").values, sides(model)
        everywhere = inversion_seconds(dims, Placement((-1,) * len(dims), 0.0))[0]
        robin = inversion_seconds(dims, Placement(tuple(i // 2 % WORKERS for i in range(len(dims))), 0.0))[1]
        balanced = inversion_seconds(dims, place_threshold(dims, WORKERS, THRESHOLD))
        rows += [
            (f"{model}, D-KFAC, inverting", published["dkfac invert"], everywhere),
            (f"{model}, MPD-KFAC, sending", published["mpd send"], robin),
            (f"{model}, SPD-KFAC, inverting", published["spd invert"], balanced[0]),
            (f"{model}, SPD-KFAC, sending", published["spd send"], balanced[1]),
        ]
    return rows
