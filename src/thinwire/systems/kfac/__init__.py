"""K-FAC: second-order preconditioning of averaged gradients; programs and plans exchange its factors and inverses.

Not here: how programs run (engine/), how messages are fused and work is placed (core/pricing/).
"""

from thinwire.systems.kfac import published
from thinwire.systems.kfac.assignment import make_plan
from thinwire.systems.kfac.kfac import KFAC
from thinwire.systems.kfac.plan import KFACPlan
from thinwire.systems.kfac.variant import Variant, stepped

__all__ = ["KFAC", "KFACPlan", "Variant", "make_plan", "published", "stepped"]
