"""EASNet: an elastic stereo network, its data, its training and its cut to a latency, built on ``supernet``.

Not here: how gradients are exchanged (engine/, core/methods/), other elastic models, other people's weights.
"""

from thinwire.systems.supernet.stereo.data import Pairs, RandomDots, StereoFiles, batches, pad, random_dot_pair
from thinwire.systems.supernet.stereo.evaluation import calibrate, evaluate, measure
from thinwire.systems.supernet.stereo.export import export, load_net, save_net
from thinwire.systems.supernet.stereo.latency import LatencyTable, build_table, measure_net
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.training import Phase, SupernetTrainer, published, pyramid_loss, short, shrink

__all__ = [
    "ElasticStereo",
    "LatencyTable",
    "Pairs",
    "Phase",
    "RandomDots",
    "StereoFiles",
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
    "short",
    "shrink",
]
