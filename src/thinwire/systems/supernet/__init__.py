"""Supernets: networks that can be cut to many sizes, trained on ranks that exchange only what a step has used.

The subpackage ``stereo`` contains one of them, a network for stereo matching; nothing here depends on it. Not here: how
gradients are exchanged (engine/, core/methods/).
"""

from thinwire.systems.supernet.active import ActiveSet
from thinwire.systems.supernet.reduce import ActiveReduce, ScheduleMismatch
from thinwire.systems.supernet.search import Evolution, Infeasible, search
from thinwire.systems.supernet.space import Space, SubNet

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
