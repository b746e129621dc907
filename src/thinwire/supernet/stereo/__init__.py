"""EASNet: an elastic stereo network, its data, its training and its cut to a latency, built on ``supernet``.

Not here: how gradients are exchanged (engine/, methods/), other elastic models, other people's weights.
"""

from thinwire.supernet.stereo.calibrate import calibrate, evaluate
from thinwire.supernet.stereo.export import export
from thinwire.supernet.stereo.files import StereoFiles
from thinwire.supernet.stereo.latency import LatencyTable, build_table, measure_net
from thinwire.supernet.stereo.loss import pyramid_loss
from thinwire.supernet.stereo.metrics import measure
from thinwire.supernet.stereo.network import ElasticStereo
from thinwire.supernet.stereo.pairs import Pairs, batches, pad
from thinwire.supernet.stereo.phases import Phase, published, short
from thinwire.supernet.stereo.shrink import shrink
from thinwire.supernet.stereo.step import SupernetTrainer
from thinwire.supernet.stereo.stereograms import RandomDots, random_dot_pair
from thinwire.supernet.stereo.store import load_net, save_net

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
