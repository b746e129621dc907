"""Fine-tuning across a cut (SFT, arXiv 2211.16703): surgery, the two ends, frames over TLS, codecs, tasks.

Not here: data-parallel training (``methods``, ``engine``), averaging over many edges (``federated``).
"""

from thinwire.link.tls import Credentials
from thinwire.split.batch import Batch
from thinwire.split.compare import compare
from thinwire.split.edge import EdgeEnd
from thinwire.split.errors import SplitError
from thinwire.split.estimate import Link, Shape, crossings, estimate
from thinwire.split.files import load_half, prepare
from thinwire.split.finetune import SplitReport, split_finetune
from thinwire.split.halves import Back, Front
from thinwire.split.ledger import ByteLedger
from thinwire.split.link import CloudClient
from thinwire.split.pair import LocalPair
from thinwire.split.plan import SplitPlan
from thinwire.split.recipe import Recipe
from thinwire.split.serve import CloudServer
from thinwire.split.session import CloudEnd
from thinwire.split.surgery import split_model

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
