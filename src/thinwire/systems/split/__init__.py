"""Fine-tuning across a cut (SFT, arXiv 2211.16703): surgery, the two ends, frames over TLS, codecs, tasks.

Not here: data-parallel training (``methods``, ``engine``), averaging over many edges (``federated``).
"""

from thinwire.systems.link.tls import Credentials
from thinwire.systems.split.batch import Batch
from thinwire.systems.split.compare import compare
from thinwire.systems.split.edge import EdgeEnd
from thinwire.systems.split.errors import SplitError
from thinwire.systems.split.estimate import Link, Shape, crossings, estimate
from thinwire.systems.split.files import load_half, prepare
from thinwire.systems.split.finetune import SplitReport, split_finetune
from thinwire.systems.split.halves import Back, Front
from thinwire.systems.split.ledger import ByteLedger
from thinwire.systems.split.link import CloudClient
from thinwire.systems.split.pair import LocalPair
from thinwire.systems.split.plan import SplitPlan
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.serve import CloudServer
from thinwire.systems.split.session import CloudEnd
from thinwire.systems.split.surgery import split_model

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
