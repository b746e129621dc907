"""What the papers and their code report, each number with its source, and what of it follows from their constants.

What does not live here: costs that decide anything (the planner's, from measurements), our own measurements.
"""

from published.constants import (
    ALL_GATHER_1GBE,
    ALL_GATHER_1GBE_LARGE,
    ALL_REDUCE_10GBE,
    ALL_REDUCE_56GBIT_INFINIBAND,
    POINT_TO_POINT_1GBE,
    SORT_2019,
    omgs_exchange,
    sort_2019,
)
from published.figures import FIGURES, Figure, figure
from published.reproduce import REPRODUCIBLE, pipelining_bound, reproduce, why_off

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
