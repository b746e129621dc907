"""What the papers and their code report, each number with its source, and what of it follows from their constants.

What does not live here: costs that decide anything (planner/costs, from measurements), our own measurements.
"""

from thinwire.planner.published.constants import (
    ALL_GATHER_1GBE,
    ALL_GATHER_1GBE_LARGE,
    ALL_REDUCE_10GBE,
    ALL_REDUCE_56GBIT_INFINIBAND,
    POINT_TO_POINT_1GBE,
    SORT_2019,
    omgs_exchange,
    sort_2019,
)
from thinwire.planner.published.figures import FIGURES, Figure, figure
from thinwire.planner.published.reproduce import REPRODUCIBLE, pipelining_bound, reproduce, why_off

__all__ = [
    "ALL_GATHER_1GBE",
    "ALL_GATHER_1GBE_LARGE",
    "ALL_REDUCE_10GBE",
    "ALL_REDUCE_56GBIT_INFINIBAND",
    "FIGURES",
    "POINT_TO_POINT_1GBE",
    "REPRODUCIBLE",
    "SORT_2019",
    "Figure",
    "figure",
    "omgs_exchange",
    "pipelining_bound",
    "reproduce",
    "sort_2019",
    "why_off",
]
