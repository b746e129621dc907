"""Start-up and rate of networks and of selection, as published. Never used to decide: only to compare.

The rates are seconds per byte of what the authors' formulas call the message, which differs from ours where noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from thinwire.core.pricing.costs import Linear

_CODE = "code: HKBU-HPML/OMGS-SGD, HKBU-HPML/MG-WFBP, hclhkbu/gtopkssgd"


def _line(startup: float, rate: float) -> Linear:
    return Linear(startup, rate, "measured elsewhere", _CODE)


SORT_2019 = {"P102-100": 2.18896957e-10, "V100": 4.99671953e-10}
"""gamma of gamma * d * log2(d), seconds to select from d elements: the single-block torch.topk of the time."""

ALL_GATHER_1GBE = {2: _line(1.6e-3, 1e-8), 4: _line(2.7e-3, 1.3e-8), 8: _line(4e-3, 1.5e-8), 16: _line(1.1e-2, 1.7e-8)}
"""By workers. The bytes are those that every rank *receives*, P times one rank's message."""

ALL_GATHER_1GBE_LARGE = {
    2: _line(4.4e-3, 5.8e-9),
    4: _line(5.6e-3, 7.4e-9),
    8: _line(7.68e-3, 8.2e-9),
    16: _line(2.1e-3, 1.7e-8),  # tuned per model by the authors
}
"""The same for messages of at least 1 MiB."""

ALL_REDUCE_10GBE = {
    2: _line(2.55e-6, 9.84e-11),
    4: _line(4.2e-5, 2.06e-10),
    8: _line(5.23e-4, 8.57e-10),
    16: _line(9.08e-4, 7.4e-10),
}
"""By workers, of the whole tensor's bytes."""

ALL_REDUCE_56GBIT_INFINIBAND = {
    2: _line(2.55e-6, 9.84e-11),
    4: _line(4.2e-5, 2.06e-10),
    8: _line(9.75e-5, 3.06e-10),
    16: _line(2.36e-4, 4.06e-10),
}
"""By workers, of the whole tensor's bytes."""

POINT_TO_POINT_1GBE = _line(0.436e-3, 9e-9)
"""Of a message between two workers."""


def sort_2019(elements: int, gpu: str = "P102-100") -> float:
    """Seconds to select from so many elements, by the published fit."""
    return SORT_2019[gpu] * elements * math.log2(elements) if elements > 1 else 0.0


def omgs_exchange(workers: int, density: float = 0.001) -> Callable[[int], float]:
    """How the OMGS code prices a group of elements on 1 GbE: two all-gathers, of values and of indices."""
    line = ALL_GATHER_1GBE[workers]
    return lambda elements: 2 * line(4 * workers * density * elements)
