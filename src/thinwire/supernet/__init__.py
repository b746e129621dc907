"""EASNet: an elastic stereo network, trained over many ranks that exchange only what they touch, cut to a latency.

What does not live here: how gradients travel (engine/, methods/), other elastic models, other people's weights.
"""

from thinwire.supernet.active import ActiveSet
from thinwire.supernet.calibrate import calibrate, evaluate
from thinwire.supernet.export import export
from thinwire.supernet.files import StereoFiles
from thinwire.supernet.latency import LatencyTable, build_table, measure_net
from thinwire.supernet.loss import pyramid_loss
from thinwire.supernet.metrics import Metrics, measure
from thinwire.supernet.pairs import Pairs, StereoBatch, batches, pad
from thinwire.supernet.phases import Phase, published, short
from thinwire.supernet.reduce import ActiveReduce, ScheduleMismatch
from thinwire.supernet.search import Evolution, Infeasible, SearchResult, search
from thinwire.supernet.semantics import InactiveWeights
from thinwire.supernet.shrink import ShrinkReport, shrink
from thinwire.supernet.space import Space, SubNet
from thinwire.supernet.step import SupernetTrainer
from thinwire.supernet.stereo import ElasticStereo, Stereo
from thinwire.supernet.stereograms import RandomDots, random_dot_pair
from thinwire.supernet.store import load_net, save_net

__all__ = [
    "ActiveReduce",
    "ActiveSet",
    "ElasticStereo",
    "Evolution",
    "InactiveWeights",
    "Infeasible",
    "LatencyTable",
    "Metrics",
    "Pairs",
    "Phase",
    "RandomDots",
    "ScheduleMismatch",
    "SearchResult",
    "ShrinkReport",
    "Space",
    "Stereo",
    "StereoBatch",
    "StereoFiles",
    "SubNet",
    "SupernetTrainer",
    "batches",
    "build_table",
    "calibrate",
    "evaluate",
    "export",
    "load_net",
    "measure",
    "measure_net",
    "pad",
    "published",
    "pyramid_loss",
    "random_dot_pair",
    "save_net",
    "search",
    "short",
    "shrink",
]
