"""Supernets: networks that are cut to many sizes, trained over ranks that exchange only what a step has touched.

The subpackage ``stereo`` is one of them, a network for stereo matching; nothing here knows it. What does not live here:
how gradients travel (engine/, methods/).
"""

from thinwire.supernet.active import ActiveSet
from thinwire.supernet.reduce import ActiveReduce, ScheduleMismatch
from thinwire.supernet.search import Evolution, Infeasible, search
from thinwire.supernet.space import Space, SubNet

__all__ = [
    "ActiveReduce",
    "ActiveSet",
    "Evolution",
    "Infeasible",
    "ScheduleMismatch",
    "Space",
    "SubNet",
    "search",
]
