"""Which message is measured next and how often, within a time budget. Numbers only: all ranks decide alike."""

from __future__ import annotations

from collections.abc import Mapping

SMALLEST = 4 << 10
LARGEST = 16 << 20
_MOST = 1 << 36
_STRIDES = (4, 2, 1)
_SLICE_SECONDS = 0.5
MOST_REPEATS = 15


def message_sizes(smallest: int = SMALLEST, largest: int = LARGEST) -> list[int]:
    """Return sizes in bytes: powers of two times the smallest, and the largest.

    Raises:
        ValueError: the largest is below twice the smallest, so no line could be fitted, or no machine could hold it.
    """
    if not 2 * smallest <= largest <= _MOST:
        raise ValueError(
            f"the largest message must be at least {2 * smallest} bytes and at most {_MOST}, not {largest}"
        )
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == largest else [*sizes, largest]


def coarse_to_fine(sizes: list[int]) -> list[int]:
    """Put both ends and a few between first, then the rest: if time runs out, the curve is still covered."""
    order: list[int] = []
    for stride in _STRIDES:
        chosen = [*range(0, len(sizes), stride), *([len(sizes) - 1] if stride == _STRIDES[0] else [])]
        order += [i for i in dict.fromkeys(chosen) if i not in order]
    return [sizes[i] for i in order]


def expected_seconds(size: int, measured: Mapping[int, float]) -> float:
    """Return an upper estimate: the next smaller message scaled up, or the next larger one as it is; 0 if unknown."""
    above = [known for known in measured if known >= size]
    below = [known for known in measured if known < size]
    bounds = [measured[min(above)]] if above else []
    if below:
        bounds.append(measured[max(below)] * size / max(below))
    return min(bounds, default=0.0)


def repeats(first_seconds: float, share_seconds: float) -> int:
    """Return the number of runs, given the first one's time: half a second's worth, 3 up to that time each, 1 if long.

    Never more than half of the share, so that time is left for the sizes between.
    """
    wanted = min(share_seconds / 2, max(_SLICE_SECONDS, min(3 * first_seconds, 3 * _SLICE_SECONDS)))
    return max(1, min(MOST_REPEATS, int(wanted / max(first_seconds, 1e-6) + 1e-6)))
