"""EASNet: an elastic stereo network, its data, its training and its cut to a latency, built on ``supernet``.

Not here: how gradients are exchanged (engine/, core/methods/), other elastic models, other people's weights.
"""

from thinwire.systems.supernet.stereo.calibrate import calibrate, evaluate
from thinwire.systems.supernet.stereo.export import export
from thinwire.systems.supernet.stereo.files import StereoFiles
from thinwire.systems.supernet.stereo.latency import LatencyTable, build_table, measure_net
from thinwire.systems.supernet.stereo.loss import pyramid_loss
from thinwire.systems.supernet.stereo.metrics import measure
from thinwire.systems.supernet.stereo.network import ElasticStereo
from thinwire.systems.supernet.stereo.pairs import Pairs, batches, pad
from thinwire.systems.supernet.stereo.phases import Phase, published, short
from thinwire.systems.supernet.stereo.shrink import shrink
from thinwire.systems.supernet.stereo.step import SupernetTrainer
from thinwire.systems.supernet.stereo.stereograms import RandomDots, random_dot_pair
from thinwire.systems.supernet.stereo.store import load_net, save_net

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
