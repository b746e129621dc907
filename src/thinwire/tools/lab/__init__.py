"""An emulated cluster on one Linux machine: namespaces, token-bucket links, a process per rank, byte counts.

Training code, models and the meaning of measurements do not belong here (see ``bench``, ``report``); nor does torch.
"""

from thinwire.tools.lab.cluster import Cluster, LabError, format_rate, parse_delay, parse_loss, parse_rate
from thinwire.tools.lab.launch import LabResult, run
from thinwire.tools.lab.network import available, clean
from thinwire.tools.lab.supervise import Happening, RankFault, parse_kills, parse_pauses

__all__ = [
    "Cluster",
    "Happening",
    "LabError",
    "LabResult",
    "RankFault",
    "available",
    "clean",
    "format_rate",
    "parse_delay",
    "parse_kills",
    "parse_loss",
    "parse_pauses",
    "parse_rate",
    "run",
]
