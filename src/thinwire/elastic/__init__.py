"""EASNet: an elastic stereo network, trained over many ranks that exchange only what they touch, cut to a latency.

What does not live here: how gradients travel (engine/, methods/), other elastic models, other people's weights.
"""

from thinwire.elastic.active import ActiveSet
from thinwire.elastic.calibrate import calibrate, evaluate
from thinwire.elastic.export import export
from thinwire.elastic.files import StereoFiles
from thinwire.elastic.latency import LatencyTable, build_table, measure_net
from thinwire.elastic.loss import pyramid_loss
from thinwire.elastic.metrics import Metrics, measure
from thinwire.elastic.pairs import Batch, Pairs, batches, pad
from thinwire.elastic.phases import Phase, published, short
from thinwire.elastic.reduce import ActiveReduce, ScheduleMismatch
from thinwire.elastic.search import Evolution, Infeasible, SearchResult, search
from thinwire.elastic.semantics import InactiveWeights
from thinwire.elastic.shrink import ShrinkReport, shrink
from thinwire.elastic.space import Space, SubNet
from thinwire.elastic.step import ElasticTrainer
from thinwire.elastic.stereo import ElasticStereo, Stereo
from thinwire.elastic.stereograms import RandomDots, random_dot_pair
from thinwire.elastic.store import load_net, save_net

__all__ = [
    "ActiveReduce",
    "ActiveSet",
    "Batch",
    "ElasticStereo",
    "ElasticTrainer",
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
    "StereoFiles",
    "SubNet",
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
