"""Fine-tuning across a cut (SFT, arXiv 2211.16703): surgery, the two ends, frames over TLS, codecs, tasks.

Not here: data-parallel training (``methods``, ``engine``), averaging over many edges (``federated``).
"""

from thinwire.core.tls import Credentials
from thinwire.systems.split.connection import CloudClient, CloudServer
from thinwire.systems.split.ends import CloudEnd, EdgeEnd, LocalPair
from thinwire.systems.split.errors import SplitError
from thinwire.systems.split.estimate import Link, Shape, crossings, estimate
from thinwire.systems.split.finetune import SplitReport, compare, split_finetune
from thinwire.systems.split.frames import ByteLedger
from thinwire.systems.split.plan import Recipe, SplitPlan
from thinwire.systems.split.surgery import Back, Front, load_half, prepare, split_model
from thinwire.systems.split.tasks import Batch

__all__ = [
    "Back",
    "Batch",
    "ByteLedger",
    "CloudClient",
    "CloudEnd",
    "CloudServer",
    "Credentials",
    "EdgeEnd",
    "Front",
    "Link",
    "LocalPair",
    "Recipe",
    "Shape",
    "SplitError",
    "SplitPlan",
    "SplitReport",
    "compare",
    "crossings",
    "estimate",
    "load_half",
    "prepare",
    "split_finetune",
    "split_model",
]
