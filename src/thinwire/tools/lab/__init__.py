"""An emulated cluster on one Linux machine: namespaces, token-bucket links, a process per rank, byte counts.

Training code, models and the meaning of measurements do not belong here (see ``bench``, ``report``); nor does torch.
"""

from thinwire.tools.lab.access import available
from thinwire.tools.lab.cleanup import clean
from thinwire.tools.lab.cluster import Cluster
from thinwire.tools.lab.errors import LabError
from thinwire.tools.lab.faults import Happening, RankFault, parse_kills, parse_pauses
from thinwire.tools.lab.launch import LabResult, run
from thinwire.tools.lab.rates import format_rate, parse_delay, parse_rate

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
    "parse_pauses",
    "parse_rate",
    "run",
]
